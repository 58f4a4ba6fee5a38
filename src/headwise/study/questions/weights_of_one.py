"""Question: why does the number of heads change nothing if all weights are one?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from headwise.study.drawing import INK, SERIES, Figure, label_point, style_axes
from headwise.study.experiments.causes import name_cause
from headwise.study.experiments.measures import (
    Projected,
    error_budget_ratios,
    layer_error_budget,
    relative_difference,
    score_error_budget,
)
from headwise.study.implementations import TorchLayer
from headwise.study.question import Fact, FactTable, Numbers, Question, fill_template
from headwise.support.progress import Progress

EMBED_DIM, HEADS = 512, 8
BATCH, LENGTH, LONGER = 40, 5, 50
QUIET = 0.01  # a factor of the tokens
FACTORS = tuple(10 ** (quarter / 4) for quarter in range(-14, 5))  # of torch.randn, up to 10
DIGITS = 3  # of the mean score size


@torch.no_grad()
def measure(progress: Progress) -> dict[str, Any]:
    """Compare one head with eight, with weights of one and with torch's initialisation."""
    default, ones = make_default_torch_layer(HEADS), make_default_torch_layer(HEADS)
    set_weights_to_one(ones)
    x = torch.randn(BATCH, LENGTH, EMBED_DIM)
    tokens = {
        "rand": torch.rand(BATCH, LENGTH, EMBED_DIM),
        "randn": x,
        "quiet": QUIET * x,
        "same": QUIET * repeat_first_token(x),
    }
    longer = QUIET * torch.randn(BATCH, LONGER, EMBED_DIM)
    quiet = project_tokens(ones, tokens["quiet"])
    larger = math.sqrt(HEADS) * quiet.scores(HEADS)
    ratios, sweep = error_budget_ratios_by_sequence, compare_head_counts_over_token_scales
    return {
        "heads": HEADS,
        "root": math.sqrt(HEADS),
        "sequences": BATCH,
        "length": LENGTH,
        "longer": LONGER,
        "quiet": QUIET,
        "tokens": {
            name: compare_head_counts(ones, x)
            | {"score": float(f"{project_tokens(ones, x).scores(HEADS).abs().mean():.{DIGITS}g}")}
            for name, x in tokens.items()
        },
        "own_apart": compare_head_counts(default, x)["apart"],
        "longer_apart": compare_head_counts(ones, longer)["apart"],
        # The number of sequences whose outputs are equal by ``==``.
        "equal": {
            name: int((copy_as_single_head_layer(ones)(x) == ones(x)).flatten(1).all(1).sum())
            for name, x in tokens.items()
        },
        "rounding": {
            # A narrow head's scores, times the root of the number of heads, and the single head's.
            "scores": float(error_budget_ratios(larger, score_error_budget(quiet)).max()),
            "rescaled": float(ratios(rescaled_single_head(ones), ones, tokens["quiet"]).max()),
            "same": float(ratios(copy_as_single_head_layer(ones), ones, tokens["same"]).max()),
            "quiet": float(ratios(copy_as_single_head_layer(ones), ones, tokens["quiet"]).min()),
            "own": float(ratios(copy_as_single_head_layer(default), default, x).min()),
        },
        "compared": name_causes(ones, tokens | {"elsewhere": None}),
        "factors": list(FACTORS),
        "quoted": {"ones": QUIET, "own": 1.0},
        "sweep": {"ones": sweep(ones, x), "own": sweep(default, x)},
    }


def name_causes(layer: TorchLayer, tokens: Mapping[str, Tensor | None]) -> dict[str, str]:
    """Return what `headwise.compare` says of a layer and a single head, for each input."""
    single = copy_as_single_head_layer(layer).inner
    return {name: name_cause(layer.inner, single, x) for name, x in tokens.items()}


# ---- the layers and their inputs -------------------------------------------------------


def make_default_torch_layer(heads: int) -> TorchLayer:
    """Make torch.nn.MultiheadAttention with default options."""
    return TorchLayer(EMBED_DIM, heads)


def set_weights_to_one(layer: nn.Module) -> None:
    """Set all projection matrices to one; biases start at zero."""
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            nn.init.ones_(parameter)


def copy_as_single_head_layer(layer: TorchLayer) -> TorchLayer:
    """Make a layer of one head with the same parameters."""
    single = make_default_torch_layer(1)
    single.load_weights(layer.as_shared_weights())
    return single


def rescaled_single_head(layer: TorchLayer) -> TorchLayer:
    """Make a layer of one head whose queries are divided by the root of the number of heads."""
    single, weights = make_default_torch_layer(1), layer.as_shared_weights()
    single.load_weights(replace(weights, q=weights.q / math.sqrt(layer.num_heads)))  # q has no bias
    return single


def repeat_first_token(x: Tensor) -> Tensor:
    """Repeat the first token of each sequence."""
    return x[:, :1].expand_as(x)


def project_tokens(layer: TorchLayer, x: Tensor) -> Projected:
    """Return the layer's queries, keys and values, which torch's layer does not return."""
    inner = layer.inner
    return Projected(*linear(x, inner.in_proj_weight, inner.in_proj_bias).chunk(3, dim=-1))


# ---- what is measured --------------------------------------------------------------------------


def compare_head_counts(layer: TorchLayer, x: Tensor) -> dict[str, float]:
    """Compare the outputs of one head and of several, and the entropy of their weights."""
    (single, single_weights), (several, several_weights) = (
        each.inner(x, x, x, average_attn_weights=False)
        for each in (copy_as_single_head_layer(layer), layer)
    )
    return {
        "apart": float(relative_difference(single, several).median()),
        "one": normalised_entropy(single_weights),
        "several": normalised_entropy(several_weights),
    }


def normalised_entropy(weights: Tensor) -> float:
    """Return the mean entropy of a head's rows as a share of the largest possible."""
    entropy = torch.special.entr(weights).sum(-1).mean()
    return round(float(entropy) / math.log(weights.shape[-1]), 4)


def compare_head_counts_over_token_scales(layer: TorchLayer, x: Tensor) -> dict[str, list[float]]:
    """Compare one head with several for tokens of all sizes."""
    results = [compare_head_counts(layer, factor * x) for factor in FACTORS]
    return {name: [each[name] for each in results] for name in results[0]}


def error_budget_ratios_by_sequence(single: TorchLayer, layer: TorchLayer, x: Tensor) -> Tensor:
    """Return the largest difference of two layers' outputs over both error budgets."""
    budgets = [
        layer_error_budget(x, x, x, each.as_shared_weights(), num_heads=each.num_heads)
        for each in (single, layer)
    ]
    allowed = budgets[0].allowed + budgets[1].allowed
    result: Tensor = ((single(x).double() - layer(x).double()).abs() / allowed).amax((1, 2))
    return result


# ---- the picture -------------------------------------------------------------------------------


def draw(figure: Figure, n: Numbers) -> None:
    """Draw the difference of one head and eight over the size of the tokens, and the entropies."""
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
        words = fill_template("{share:percent} at {factor:g}", {"share": share, "factor": factor})
        label_point(above, words, (factor, share), (-9, 4), ha="right", color=INK)
        below.plot(n["factors"], n["sweep"][name]["several"], color=SERIES[0])
        below.plot(n["factors"], n["sweep"][name]["one"], color=SERIES[2], linestyle="--")
        style_axes(above, title, xscale="log")
        below.set_xticks(ticks := [0.001, 0.01, 0.1, 1, 10], [f"{tick:g}" for tick in ticks])
        style_axes(below, xlabel="size of the tokens")
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
    "head only in the scale of their scores. A softmax that picks one key, or is even, hides this "
    "scale.",
    measure=measure,
    facts=(
        Fact(
            "with all weights one the {heads} heads have identical scores, and the single head's "
            "are the root of {heads}, {root:.2f}, times as large: the largest error is "
            "{rounding[scores]:.2f} of the error budget",
            lambda n: n["rounding"]["scores"] <= 1,
        ),
        Fact(
            "with the single head's scores divided by that factor, one head gives the output of "
            "all {heads}: the largest difference is {rounding[rescaled]:.2f} of both error budgets",
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
            "the outputs is {tokens[quiet][apart]:percent} with {length} tokens and "
            "{longer_apart:percent} with {longer}. The difference in every sequence of {length} "
            "is at least {rounding[quiet]:,.0f} times both error budgets",
            lambda n: n["rounding"]["quiet"] > 1,
        ),
        Fact(
            "with PyTorch's default initialisation and tokens from torch.randn the relative "
            "difference is {own_apart:percent}, in every sequence at least {rounding[own]:,.0f} "
            "times both error budgets",
            lambda n: n["rounding"]["own"] > 1,
        ),
        Fact(
            "headwise.compare, asked about the layers with all weights one, says "
            "“{compared[rand]}” for tokens from torch.rand and “{compared[same]}” for equal "
            "tokens. For small tokens, and on its own inputs, it names the cause: "
            "{compared[elsewhere]}",
            lambda n: (
                n["compared"]["rand"].startswith("inconclusive")
                and n["compared"]["same"].startswith("inconclusive")
                and n["compared"]["quiet"] == n["compared"]["elsewhere"] == "number of heads"
            ),
        ),
    ),
    verdict="It does matter. With all weights one the {heads} heads are identical, and only their "
    "scores are smaller than a single head's, by the root of {heads}. A softmax that picks one "
    "key, or is even, hides this. With default initialisation, and tokens from torch.randn, the "
    "outputs of one head and {heads} differ by {own_apart:percent}.",
    why="With all weights one, every number of a query, key or value is the sum of its token's "
    "numbers, so all heads compute the same. Tokens with large values saturate the softmax. Tokens "
    "near zero, or all equal, leave the softmax even. A factor of the scores changes neither; in "
    "between, the relative difference is {tokens[quiet][apart]:percent}. With default "
    "initialisation the heads differ, and a saturated softmax does not hide the difference.",
    caption="Two layers torch.nn.MultiheadAttention with the same parameters, of one head and of "
    "{heads}. Above: the relative difference of the single head's output from that of {heads} "
    "heads, the median of {sequences} sequences of {length} tokens. Below: the mean entropy of "
    "the softmax over the largest possible, from all weight on one key to even. It is drawn for "
    "{heads} heads and, dashed, for one head. Across: the factor of the tokens, which come from "
    "torch.randn. The dots are the differences quoted in the text.",
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
