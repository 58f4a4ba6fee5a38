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
from headwise.studies.pictures.style import INK, LINE, SERIES
from headwise.studies.question import Fact, Numbers, Question, Table
from headwise.studies.words import say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EMBED_DIM, HEADS = 512, 8
BATCH, LENGTH, LONGER = 40, 5, 50
QUIET = 0.01  # a factor of the tokens
THEIR_SCALE = EMBED_DIM**-0.5 / HEADS**0.5  # gives one head of ones the scores of a narrow one
FACTORS = tuple(10 ** (quarter / 4) for quarter in range(-14, 5))  # of torch.randn, up to 10
DIGITS = 3  # of the size of a score


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
        "quoted": {"ones": QUIET, "own": 1.0},
        "sweep": {"ones": sweep(ones, x), "own": sweep(own, x)},
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
    """Size of scores and evenness of rows with several heads, and how far one head is away."""
    size = projected(layer, x).scores(HEADS).abs().mean()
    return {
        "score": float(f"{size:.{DIGITS}g}"),
        "evenness": evenness(layer, x, heads=HEADS),
        "apart": apart(layer, x),
    }


def sweep(layer: MultiheadAttention, x: Tensor) -> dict[str, list[float]]:
    """For tokens of all sizes, how far one head is away and how even the rows are."""
    return {
        "apart": [apart(layer, factor * x) for factor in FACTORS],
        "one": [evenness(layer, factor * x, heads=1) for factor in FACTORS],
        "several": [evenness(layer, factor * x, heads=HEADS) for factor in FACTORS],
    }


def evenness(layer: MultiheadAttention, x: Tensor, *, heads: int) -> float:
    """The mean entropy of a row of one or several heads, as a share of the largest possible."""
    q, k, _ = projected(layer, x).split(heads)
    return round(float(AttentionMatrix(q, k).entropy().mean()) / math.log(x.shape[1]), 4)


def apart(layer: MultiheadAttention, x: Tensor) -> float:
    """The relative difference of the output of several heads from that of one: the median."""
    one, several = pair(layer, x)
    return float(difference(several, one).median())


def equal(layer: MultiheadAttention, x: Tensor) -> Tensor:
    """Of which sequences the outputs are the same by ``==``."""
    one, several = pair(layer, x)
    return (one == several).flatten(1).all(1)


def beyond(layer: MultiheadAttention, x: Tensor, *, scale: float | None = None) -> Tensor:
    """How far one head's outputs are from several, in error budgets.

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
    """One head against eight over the size of the tokens, above what their softmaxes do there."""
    figure.set_size_inches(7.6, 4.6)
    grid = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(1.4, 1))
    top = max(max(sweep["apart"]) for sweep in n["sweep"].values())
    panels = (
        ("ones", "all weights one", n["tokens"]["quiet"]["apart"]),
        ("own", "default initialisation", n["own_apart"]),
    )
    for column, (name, title, share) in zip(grid.T, panels, strict=True):
        above, below = column
        factor = n["quoted"][name]
        above.plot(n["factors"], n["sweep"][name]["apart"], color=SERIES[1])
        above.plot(factor, share, "o", color=SERIES[1])
        above.annotate(
            say("{share:percent} at {factor:g}", {"share": share, "factor": factor}),
            *((factor, share), (-9, 4)),
            textcoords="offset points",
            ha="right",
            color=INK,
        )
        below.plot(n["factors"], n["sweep"][name]["several"], color=SERIES[0])
        below.plot(n["factors"], n["sweep"][name]["one"], color=SERIES[2], linestyle="--")
        above.set_title(title, loc="left")
        above.set_xscale("log")
        below.set_xticks(ticks := [0.001, 0.01, 0.1, 1, 10], [f"{tick:g}" for tick in ticks])
        below.set_xlabel("size of the tokens")
        for axes in column:
            axes.grid(axis="y", color=LINE)
    grid[1][0].text(0.05, 0.55, f"{n['heads']} heads", color=SERIES[0])
    grid[1][0].text(0.011, 0.35, "one head", color=SERIES[2], ha="right")
    grid[0][0].set_ylim(-0.03 * top, 1.1 * top)
    grid[0][0].set_yticks(shares := [0, 0.5, 1], [f"{100 * x:g}\u00a0%" for x in shares])
    grid[0][0].set_ylabel("relative difference\nof the outputs")
    grid[1][0].set_ylim(-0.08, 1.08)
    grid[1][0].set_yticks([0, 1], ["one key", "even"])
    grid[1][0].set_ylabel("softmax")


QUESTION = Question(
    id="weights-of-one",
    asks="I set all weights to one, and the number of heads changes nothing: does it never matter?",
    claim="It does matter. With all weights one the heads are identical, and differ from a single "
    "head only in the scale of their scores; a softmax that picks one key, or is even, does not "
    "show a scale.",
    measure=measure,
    facts=(
        Fact(
            "with all weights one the {heads} heads have identical scores, and the single head's "
            "are the root of {heads}, {root:.2f}, times as large: the largest error is "
            "{rounding[scores]:.2f} of the error budget",
            lambda n: n["rounding"]["scores"] <= 1,
        ),
        Fact(
            "divided by that factor, the single head's scores give the head outputs of all "
            "{heads}: the largest error is {rounding[their_scale]:.2f} of the error budget",
            lambda n: n["rounding"]["their_scale"] <= 1,
        ),
        Fact(
            "tokens from torch.rand give scores of about {tokens[rand][score]:,.0f}, and the "
            "outputs of one head and {heads} are equal, by ==, for {equal[rand]} of {sequences} "
            "sequences",
            lambda n: n["equal"]["rand"] == n["sequences"],
        ),
        Fact(
            "tokens that are all equal give even softmaxes ({tokens[same][evenness]:percent} of "
            "the largest entropy), and the head outputs are the same: the largest error is "
            "{rounding[same]:.2f} of the error budget",
            lambda n: n["rounding"]["same"] <= 1,
        ),
        Fact(
            "in between, with tokens from torch.randn times {quiet}, the relative difference of "
            "the outputs is {tokens[quiet][apart]:percent}, and {longer_apart:percent} with "
            "{longer} tokens in place of {length}: in every sequence at least "
            "{rounding[quiet]:,.0f} times the error budget",
            lambda n: n["rounding"]["quiet"] > 1,
        ),
        Fact(
            "with PyTorch's default initialisation it is {own_apart:percent} for tokens from "
            "torch.randn, in every sequence at least {rounding[own]:,.0f} times the error budget",
            lambda n: n["rounding"]["own"] > 1,
        ),
    ),
    verdict="It does matter: with all weights one the {heads} heads are identical, and only their "
    "scores are smaller than a single head's, by the root of {heads}, which does not show where "
    "the softmax picks one key or is even; with default initialisation the outputs of one "
    "head and {heads} differ by {own_apart:percent}.",
    why="With all weights one, every number of a query, key or value is the sum of its token's "
    "numbers, so all heads compute the same. Tokens with large values saturate the softmax, tokens "
    "near zero, or all equal, leave it even, and a factor of the scores changes neither; in "
    "between it shows, as a relative difference of {tokens[quiet][apart]:percent}. With default "
    "initialisation the heads are not identical, and a saturated softmax does not hide it.",
    caption="Above: the relative difference of the outputs of {heads} heads from that of one head "
    "with the same parameters, the median of {sequences} sequences of {length} tokens. Below: "
    "whether the softmax is even or puts all weight on one key (its mean entropy over the largest "
    "possible), for {heads} heads and, dashed, for one. Across: the size of the tokens, which are "
    "those of torch.randn multiplied by it. The dots are the differences quoted in the text.",
    draw=draw,
    table=Table(
        columns=(
            "tokens, weights of one",
            "mean score size",
            "entropy / largest",
            "relative difference",
            "equal by ==",
        ),
        rows=tuple(
            (
                title,
                f"{{tokens[{name}][score]:{size}}}",
                f"{{tokens[{name}][evenness]:percent}}",
                f"{{tokens[{name}][apart]:percent}}",
                f"{{equal[{name}]}} of {{sequences}}",
            )
            for name, title, size in (
                ("rand", "torch.rand", ",.0f"),
                ("randn", "torch.randn", ",.0f"),
                ("quiet", "torch.randn, times {quiet}", ".1f"),
                ("same", "all equal, times {quiet}", ".1f"),
            )
        ),
    ),
    varies=frozenset({"rounding", "equal"}),
)
