"""All weights are set to one, and the number of heads changes nothing: why?"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from headwise.study.charts import INK, SERIES, Figure, beside, plotted
from headwise.study.experiments.measures import (
    Projected,
    budget_of_scores,
    difference,
    excess,
    layer_budget,
)
from headwise.study.implementations import TorchLayer
from headwise.study.question import Fact, FactTable, Numbers, Question, say
from headwise.support.progress import Progress

EMBED_DIM, HEADS = 512, 8
BATCH, LENGTH, LONGER = 40, 5, 50
QUIET = 0.01  # a factor of the tokens
FACTORS = tuple(10 ** (quarter / 4) for quarter in range(-14, 5))  # of torch.randn, up to 10
DIGITS = 3  # of the size of a score


@torch.no_grad()
def measure(progress: Progress) -> dict[str, Any]:
    """One head against eight, with weights of one and with torch's own, for tokens of all sizes."""
    own, ones = layer_of(HEADS), layer_of(HEADS)
    set_to_one(ones)
    x = torch.randn(BATCH, LENGTH, EMBED_DIM)
    tokens = {
        "rand": torch.rand(BATCH, LENGTH, EMBED_DIM),
        "randn": x,
        "quiet": QUIET * x,
        "same": QUIET * repeated(x),
    }
    longer = QUIET * torch.randn(BATCH, LONGER, EMBED_DIM)
    quiet = projected(ones, tokens["quiet"])
    larger = math.sqrt(HEADS) * quiet.scores(HEADS)
    return {
        "heads": HEADS,
        "root": math.sqrt(HEADS),
        "sequences": BATCH,
        "length": LENGTH,
        "longer": LONGER,
        "quiet": QUIET,
        "tokens": {
            name: compare(ones, x)
            | {"score": float(f"{projected(ones, x).scores(HEADS).abs().mean():.{DIGITS}g}")}
            for name, x in tokens.items()
        },
        "own_apart": compare(own, x)["apart"],
        "longer_apart": compare(ones, longer)["apart"],
        # Of how many sequences the outputs are the same by ``==``.
        "equal": {
            name: int((single(ones)(x) == ones(x)).flatten(1).all(1).sum())
            for name, x in tokens.items()
        },
        "rounding": {
            # Each narrow head's scores, times the root of their number, against the single head's.
            "scores": float(excess(larger, budget_of_scores(quiet)).max()),
            "rescaled": float(beyond(rescaled(ones), ones, tokens["quiet"]).max()),
            "same": float(beyond(single(ones), ones, tokens["same"]).max()),
            "quiet": float(beyond(single(ones), ones, tokens["quiet"]).min()),
            "own": float(beyond(single(own), own, x).min()),
        },
        "factors": list(FACTORS),
        "quoted": {"ones": QUIET, "own": 1.0},
        "sweep": {"ones": sweep(ones, x), "own": sweep(own, x)},
    }


# ---- the layers, and what they are given -------------------------------------------------------


def layer_of(heads: int) -> TorchLayer:
    """torch.nn.MultiheadAttention as it is made and called by default."""
    return TorchLayer(EMBED_DIM, heads)


def set_to_one(layer: nn.Module) -> None:
    """Every number of every projection; biases are zero as they start."""
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            nn.init.ones_(parameter)


def single(layer: TorchLayer) -> TorchLayer:
    """A layer of one head with the same parameters."""
    one = layer_of(1)
    one.fill(layer.held())
    return one


def rescaled(layer: TorchLayer) -> TorchLayer:
    """The same, with queries, and so scores, divided by the root of the number of heads."""
    one, given = layer_of(1), layer.held()
    one.fill(replace(given, q=given.q / math.sqrt(layer.num_heads)))  # the bias of q is zero
    return one


def repeated(x: Tensor) -> Tensor:
    """Sequences all of whose tokens are the first."""
    return x[:, :1].expand_as(x)


def projected(layer: TorchLayer, x: Tensor) -> Projected:
    """What the layer's heads read, which torch's layer does not return."""
    inner = layer.inner
    return Projected(*linear(x, inner.in_proj_weight, inner.in_proj_bias).chunk(3, dim=-1))


# ---- what is measured --------------------------------------------------------------------------


def compare(layer: TorchLayer, x: Tensor) -> dict[str, float]:
    """How far the output of one head is from that of several, and how even the softmaxes are."""
    (one, of_one), (several, of_several) = (
        each.inner(x, x, x, average_attn_weights=False) for each in (single(layer), layer)
    )
    return {
        "apart": float(difference(one, several).median()),
        "one": evenness(of_one),
        "several": evenness(of_several),
    }


def evenness(weights: Tensor) -> float:
    """The mean entropy of a row of a head, as a share of the largest possible."""
    entropy = torch.special.entr(weights).sum(-1).mean()
    return round(float(entropy) / math.log(weights.shape[-1]), 4)


def sweep(layer: TorchLayer, x: Tensor) -> dict[str, list[float]]:
    """The comparison for tokens of all sizes."""
    found = [compare(layer, factor * x) for factor in FACTORS]
    return {name: [each[name] for each in found] for name in found[0]}


def beyond(one: TorchLayer, layer: TorchLayer, x: Tensor) -> Tensor:
    """How far one head's output is from that of several, over what rounding may do to both.

    The worst element of each sequence.
    """
    budgets = [layer_budget(x, x, x, y.held(), num_heads=y.num_heads) for y in (one, layer)]
    allowed = budgets[0].allowed + budgets[1].allowed
    result: Tensor = ((one(x).double() - layer(x).double()).abs() / allowed).amax((1, 2))
    return result


# ---- the picture -------------------------------------------------------------------------------


def draw(figure: Figure, n: Numbers) -> None:
    """One head against eight over the size of the tokens, above what their softmaxes do there."""
    figure.set_figheight(4.6)
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
        words = say("{share:percent} at {factor:g}", {"share": share, "factor": factor})
        beside(above, words, (factor, share), (-9, 4), ha="right", color=INK)
        below.plot(n["factors"], n["sweep"][name]["several"], color=SERIES[0])
        below.plot(n["factors"], n["sweep"][name]["one"], color=SERIES[2], linestyle="--")
        plotted(above, title, xscale="log")
        below.set_xticks(ticks := [0.001, 0.01, 0.1, 1, 10], [f"{tick:g}" for tick in ticks])
        plotted(below, xlabel="size of the tokens")
    grid[1][0].text(0.05, 0.55, f"{n['heads']} heads", color=SERIES[0])
    grid[1][0].text(0.011, 0.35, "one head", color=SERIES[2], ha="right")
    grid[0][0].set(ylim=(-0.03 * top, 1.1 * top), ylabel="relative difference\nof the outputs")
    grid[0][0].set_yticks(shares := [0, 0.5, 1], [f"{100 * x:g}\u00a0%" for x in shares])
    grid[1][0].set(ylim=(-0.08, 1.08), ylabel="softmax")
    grid[1][0].set_yticks([0, 1], ["one key", "even"])


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
            "with its scores divided by that factor, the single head gives the output of all "
            "{heads}: the largest difference is {rounding[rescaled]:.2f} of both error budgets",
            lambda n: n["rounding"]["rescaled"] <= 1,
        ),
        Fact(
            "tokens from torch.rand give scores of about {tokens[rand][score]:,.0f}, and the "
            "outputs of one head and {heads} are equal, by ==, for {equal[rand]} of {sequences} "
            "sequences",
            lambda n: n["equal"]["rand"] == n["sequences"],
        ),
        Fact(
            "tokens that are all equal give even softmaxes ({tokens[same][several]:percent} of "
            "the largest entropy), and the outputs are the same: the largest difference is "
            "{rounding[same]:.2f} of both error budgets",
            lambda n: n["rounding"]["same"] <= 1,
        ),
        Fact(
            "in between, with tokens from torch.randn times {quiet}, the relative difference of "
            "the outputs is {tokens[quiet][apart]:percent}, and {longer_apart:percent} with "
            "{longer} tokens in place of {length}: in every sequence at least "
            "{rounding[quiet]:,.0f} times both error budgets",
            lambda n: n["rounding"]["quiet"] > 1,
        ),
        Fact(
            "with PyTorch's default initialisation it is {own_apart:percent} for tokens from "
            "torch.randn, in every sequence at least {rounding[own]:,.0f} times both error budgets",
            lambda n: n["rounding"]["own"] > 1,
        ),
    ),
    verdict="It does matter: with all weights one the {heads} heads are identical, and only their "
    "scores are smaller than a single head's, by the root of {heads}, which does not show where "
    "the softmax picks one key or is even; with default initialisation, and tokens from "
    "torch.randn, the outputs of one head and {heads} differ by {own_apart:percent}.",
    why="With all weights one, every number of a query, key or value is the sum of its token's "
    "numbers, so all heads compute the same. Tokens with large values saturate the softmax, tokens "
    "near zero, or all equal, leave it even, and a factor of the scores changes neither; in "
    "between it shows, as a relative difference of {tokens[quiet][apart]:percent}. With default "
    "initialisation the heads are not identical, and a saturated softmax does not hide it.",
    caption="Two layers torch.nn.MultiheadAttention with the same parameters, of one head and of "
    "{heads}. Above: the relative difference of the one head's output from that of {heads}, the "
    "median of {sequences} sequences of {length} tokens. Below: whether the softmax is even or "
    "puts all weight on one key (its mean entropy over the largest possible), for {heads} heads "
    "and, dashed, for one. Across: the size of the tokens, which are those of torch.randn "
    "multiplied by it. The dots are the differences quoted in the text.",
    draw=draw,
    table=FactTable(
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
                f"{{tokens[{name}][several]:percent}}",
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
