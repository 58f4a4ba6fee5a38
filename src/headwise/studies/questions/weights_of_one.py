"""All weights are set to one, and the number of heads changes nothing: why?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from headwise import functional
from headwise.budget import Budget
from headwise.drop_in.layer import MultiheadAttention
from headwise.matrix import AttentionMatrix
from headwise.models.reading import Progress
from headwise.studies.experiments.one_head import (
    Projected,
    budget_of_scores,
    difference,
    excess,
)
from headwise.studies.pictures.style import LINE, SERIES
from headwise.studies.question import Fact, Numbers, Question, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EMBED_DIM, HEADS = 512, 8
BATCH, LENGTH, LONGER = 40, 5, 50
QUIET = 0.01  # a factor of the tokens
THEIR_SCALE = EMBED_DIM**-0.5 / HEADS**0.5  # gives one head of ones the scores of a narrow one
FACTORS = tuple(10 ** (quarter / 4) for quarter in range(-14, 5))  # of torch.randn, up to 10


@torch.no_grad()
def measure(progress: Progress) -> dict[str, Any]:
    """One head against eight, with weights of one and with torch's own, for tokens of all sizes."""
    progress("weights-of-one", 0, 1)
    own, ones = layer_of(HEADS), layer_of(HEADS)
    set_to_one(ones)
    x = torch.randn(BATCH, LENGTH, EMBED_DIM)
    tokens = {
        "rand": torch.rand(BATCH, LENGTH, EMBED_DIM),
        "randn": x,
        "quiet": QUIET * x,
        "same": QUIET * x[:, :1].expand_as(x),
    }
    longer = QUIET * torch.randn(BATCH, LONGER, EMBED_DIM)
    return {
        "heads": HEADS,
        "root": math.sqrt(HEADS),
        "sequences": BATCH,
        "length": LENGTH,
        "longer": LONGER,
        "quiet": QUIET,
        "even": math.log(LENGTH),
        "tokens": {name: describe(ones, x) for name, x in tokens.items()},
        "own_apart": apart(own, x),
        "longer_apart": apart(ones, longer),
        "equal": {name: int(equal(ones, x).sum()) for name, x in tokens.items()},
        "rounding": {
            "scores": excess_of_scores(ones, tokens["quiet"]),
            "their_scale": float(beyond(ones, tokens["quiet"], scale=THEIR_SCALE).max()),
            "same": float(beyond(ones, tokens["same"]).max()),
            "quiet": float(beyond(ones, tokens["quiet"]).min()),
            "own": float(beyond(own, x).min()),
        },
        "factors": list(FACTORS),
        "sweep": {
            name: [apart(layer, factor * x) for factor in FACTORS]
            for name, layer in (("ones", ones), ("own", own))
        },
    }


# ---- the layers --------------------------------------------------------------------------------


def layer_of(heads: int) -> MultiheadAttention:
    """torch's layer, with its own initialisation."""
    return MultiheadAttention(EMBED_DIM, heads, batch_first=True).eval()


def set_to_one(layer: nn.Module) -> None:
    """Every number of every projection; biases are zero as they start."""
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            nn.init.ones_(parameter)


def pair(layer: MultiheadAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of one head, and of the layer's heads, with the same parameters."""
    single = layer_of(1)
    single.load_state_dict(layer.state_dict())
    one, several = (each(x, x, x, need_weights=False)[0] for each in (single, layer))
    return one, several


def projected(layer: MultiheadAttention, x: Tensor) -> Projected:
    """What the layer's heads, or one head, read."""
    return Projected(*linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, dim=-1))


# ---- what is measured --------------------------------------------------------------------------


def describe(layer: MultiheadAttention, x: Tensor) -> dict[str, float]:
    """Size of scores and entropy of rows with several heads, and how far one head is away."""
    heads = projected(layer, x)
    q, k, _ = heads.split(HEADS)
    return {
        "score": float(heads.scores(HEADS).abs().mean()),
        "entropy": float(AttentionMatrix(q, k).entropy().mean()),
        "apart": apart(layer, x),
    }


def apart(layer: MultiheadAttention, x: Tensor) -> float:
    """The change of the output from one head to several, as a share of it: the median sequence."""
    one, several = pair(layer, x)
    return float(difference(several, one).median())


def equal(layer: MultiheadAttention, x: Tensor) -> Tensor:
    """Of which sequences the outputs are the same by ``==``."""
    one, several = pair(layer, x)
    return (one == several).flatten(1).all(1)


def beyond(layer: MultiheadAttention, x: Tensor, *, scale: float | None = None) -> Tensor:
    """How far one head's outputs are from several, in units of what rounding may do.

    The worst element of each sequence, before the output projection.
    """
    heads = projected(layer, x)
    q, k, v = heads.split(1)
    one = functional.merge_heads(AttentionMatrix(q, k, scale=scale) @ v)
    budget = Budget.for_head_outputs(*heads.split(HEADS))
    return excess(functional.split_heads(one, heads=HEADS), budget).amax((1, 2, 3))


def excess_of_scores(layer: MultiheadAttention, x: Tensor) -> float:
    """Each narrow head's scores, times the root of their number, against the single head's."""
    heads = projected(layer, x)
    larger = math.sqrt(HEADS) * heads.scores(HEADS)
    return float(excess(larger, budget_of_scores(heads)).max())


# ---- the picture -------------------------------------------------------------------------------


def draw(figure: Figure, n: Numbers) -> None:
    """One head against eight over the size of the tokens: a hump for ones, a rise for others."""
    axes = figure.subplots()
    factors, ones, own = n["factors"], n["sweep"]["ones"], n["sweep"]["own"]
    axes.plot(factors, ones, color=SERIES[1])
    axes.plot(factors, own, color=SERIES[0])
    peak, high = ones.index(max(ones)), min(range(len(own)), key=lambda i: abs(own[i] - 0.9))
    beside: dict[str, Any] = {"textcoords": "offset points"}
    names = (
        ("all weights one", (factors[peak], ones[peak]), (0, 6), "center", SERIES[1]),
        (
            "torch's own initial weights",
            (factors[high], own[high]),
            (-10, 0),
            "right",
            SERIES[0],
        ),
        ("rows even:\nequal", (factors[0], 0), (0, 8), "left", SERIES[1]),
        ("rows on one key:\nequal", (0.15, 0), (0, 14), "center", SERIES[1]),
    )
    for words, place, offset, side, colour in names:
        axes.annotate(words, place, offset, ha=side, color=colour, **beside)
    axes.set_xscale("log")
    axes.set_xticks(ticks := [0.001, 0.01, 0.1, 1, 10], [f"{tick:g}" for tick in ticks])
    axes.set_ylim(0, 1.1 * max(own))
    axes.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    axes.set_xlabel("size of the tokens (those of torch.randn times this)")
    axes.set_ylabel(f"change of the output\nfrom one head to {n['heads']}")
    axes.grid(axis="y", color=LINE)


QUESTION = Question(
    id="weights-of-one",
    asks="I set all weights to one, and the number of heads changes nothing: does it never matter?",
    claim="It does matter. With weights of one all heads are copies of one, and differ from the "
    "single wide head in the size of their scores alone; that is hidden where each row reads one "
    "key, and where all tokens are equal.",
    measure=measure,
    facts=(
        Fact(
            "with weights of one all {heads} heads have the same scores, and the single head's are "
            "the root of {heads}, {root:.2f}, times as large: off by {rounding[scores]:.2f} of "
            "what rounding may do",
            lambda n: n["rounding"]["scores"] <= 1,
        ),
        Fact(
            "with that factor taken off, the single head gives the head outputs of all {heads}: "
            "off by {rounding[their_scale]:.2f} of what rounding may do",
            lambda n: n["rounding"]["their_scale"] <= 1,
        ),
        Fact(
            "tokens from torch.rand make scores of {tokens[rand][score]:,.0f}, the entropy of the "
            "rows is {tokens[rand][entropy]:.1f}, and the outputs of one head and {heads} are "
            "equal, by ==, for {equal[rand]} of {sequences} sequences",
            lambda n: n["equal"]["rand"] == n["sequences"],
        ),
        Fact(
            "equal tokens make every row even (entropy {tokens[same][entropy]:.3f} of at most "
            "{even:.3f}) and the head outputs equal: off by {rounding[same]:.2f} of what rounding "
            "may do",
            lambda n: n["rounding"]["same"] <= 1,
        ),
        Fact(
            "where neither is so (tokens from torch.randn times {quiet}) the outputs are "
            "{tokens[quiet][apart]:percent} apart, and {longer_apart:percent} with {longer} tokens "
            "in place of {length}: in every sequence at least {rounding[quiet]:,.0f} times what "
            "rounding may do",
            lambda n: n["rounding"]["quiet"] > 1,
        ),
        Fact(
            "torch's own initial weights hide nothing: {own_apart:percent} apart for tokens from "
            "torch.randn, in every sequence at least {rounding[own]:,.0f} times what rounding may "
            "do",
            lambda n: n["rounding"]["own"] > 1,
        ),
    ),
    verdict="It matters, but weights of one hide it: large tokens put each row's whole weight on "
    "one key, equal tokens spread it evenly, and either way the outputs agree; with small, "
    "different tokens one head and {heads} are {tokens[quiet][apart]:percent} apart, with torch's "
    "own initial weights {own_apart:percent}.",
    why="With weights of one every number of a token's query, key and value is the sum of the "
    "token, so all heads are copies of one. All that is left of their number is the size of the "
    "scores: the single head's are {root:.2f} times as large, the root of {heads}. A row that "
    "already gives everything to one key cannot get sharper, and a row of equal scores stays even.",
    caption="How much the output changes from one head to {heads} with the same parameters, over "
    "the size of the tokens: the median of {sequences} sequences of {length} tokens. With weights "
    "of one a hump: no change for very small tokens, whose rows are even, and none for large ones, "
    "whose rows read one key. With torch's own initial weights the change grows and stays.",
    draw=draw,
    table=Table(
        columns=(
            "tokens, with weights of one",
            "size of a score",
            "entropy of a row, nats",
            "outputs apart",
            "equal by ==",
        ),
        rows=tuple(
            (
                title,
                f"{{tokens[{name}][score]:,.1f}}",
                f"{{tokens[{name}][entropy]:.3f}}",
                f"{{tokens[{name}][apart]:percent}}",
                f"{{equal[{name}]}} of {{sequences}}",
            )
            for name, title in (
                ("rand", "torch.rand"),
                ("randn", "torch.randn"),
                ("quiet", "torch.randn, times {quiet}"),
                ("same", "all equal, times {quiet}"),
            )
        ),
    ),
    varies=frozenset({"rounding", "equal"}),
)
