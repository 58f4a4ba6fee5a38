"""Question: why does the number of heads change nothing if all weights are one?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from headwise.study import drawing, measures
from headwise.study.drawing import INK, SERIES, Figure
from headwise.study.implementations import TorchLayer
from headwise.study.measures import Projected, error_budget_ratios, layer_error_budget
from headwise.study.question import Numbers, Progress, fill_template

EMBED_DIM, HEADS = 512, 8
BATCH, LENGTH, LONGER = 40, 5, 50
QUIET = 0.01  # a factor of the tokens
FACTORS = tuple(10 ** (quarter / 4) for quarter in range(-14, 5))  # of torch.randn, up to 10
DIGITS = 3  # of the mean score size
VARIES = {"equal", "rounding"}


@torch.no_grad()
def measure(progress: Progress) -> dict[str, Any]:
    """Compare one head with eight, with weights of one and with torch's initialisation."""
    default, ones = TorchLayer(EMBED_DIM, HEADS), TorchLayer(EMBED_DIM, HEADS)
    set_weights_to_one(ones)
    x = torch.randn(BATCH, LENGTH, EMBED_DIM)
    tokens = {"rand": torch.rand(BATCH, LENGTH, EMBED_DIM), "randn": x, "quiet": QUIET * x}
    tokens["same"] = QUIET * repeat_first_token(x)
    longer = QUIET * torch.randn(BATCH, LONGER, EMBED_DIM)
    quiet = project_tokens(ones, tokens["quiet"])
    larger = math.sqrt(HEADS) * quiet.scores(HEADS)
    ratios, sweep = error_budget_ratios_by_sequence, compare_head_counts_over_token_scales
    single, default_single = copy_as_single_head_layer(ones), copy_as_single_head_layer(default)
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
            name: int((single(x) == ones(x)).flatten(1).all(1).sum()) for name, x in tokens.items()
        },
        "rounding": {
            # A narrow head's scores, times the root of the number of heads, and the single head's.
            "scores": float(error_budget_ratios(larger, measures.score_error_budget(quiet)).max()),
            "rescaled": float(ratios(rescaled_single_head(ones), ones, tokens["quiet"]).max()),
            "same": float(ratios(single, ones, tokens["same"]).max()),
            "quiet": float(ratios(single, ones, tokens["quiet"]).min()),
            "own": float(ratios(default_single, default, x).min()),
        },
        "compared": name_causes(ones, tokens | {"elsewhere": None}),
        "factors": list(FACTORS),
        "quoted": {"ones": QUIET, "own": 1.0},
        "sweep": {"ones": sweep(ones, x), "own": sweep(default, x)},
    }


def name_causes(layer: TorchLayer, tokens: Mapping[str, Tensor | None]) -> dict[str, str]:
    single = copy_as_single_head_layer(layer).inner
    return {name: measures.name_cause(layer.inner, single, x) for name, x in tokens.items()}


def set_weights_to_one(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            nn.init.ones_(parameter)


def copy_as_single_head_layer(layer: TorchLayer) -> TorchLayer:
    single = TorchLayer(EMBED_DIM, 1)
    single.load_weights(layer.as_shared_weights())
    return single


def rescaled_single_head(layer: TorchLayer) -> TorchLayer:
    single, weights = TorchLayer(EMBED_DIM, 1), layer.as_shared_weights()
    single.load_weights(replace(weights, q=weights.q / math.sqrt(layer.num_heads)))  # q has no bias
    return single


def repeat_first_token(x: Tensor) -> Tensor:
    return x[:, :1].expand_as(x)


def project_tokens(layer: TorchLayer, x: Tensor) -> Projected:
    inner = layer.inner
    return Projected(*linear(x, inner.in_proj_weight, inner.in_proj_bias).chunk(3, dim=-1))


def compare_head_counts(layer: TorchLayer, x: Tensor) -> dict[str, float]:
    (single, single_weights), (several, several_weights) = (
        each.inner(x, x, x, average_attn_weights=False)
        for each in (copy_as_single_head_layer(layer), layer)
    )
    return {
        "apart": float(measures.relative_difference(single, several).median()),
        "one": normalised_entropy(single_weights),
        "several": normalised_entropy(several_weights),
    }


def normalised_entropy(weights: Tensor) -> float:
    entropy = torch.special.entr(weights).sum(-1).mean()
    return round(float(entropy) / math.log(weights.shape[-1]), 4)


def compare_head_counts_over_token_scales(layer: TorchLayer, x: Tensor) -> dict[str, list[float]]:
    results = [compare_head_counts(layer, factor * x) for factor in FACTORS]
    return {name: [each[name] for each in results] for name in results[0]}


def error_budget_ratios_by_sequence(single: TorchLayer, layer: TorchLayer, x: Tensor) -> Tensor:
    budgets = [
        layer_error_budget(x, x, x, each.as_shared_weights(), num_heads=each.num_heads)
        for each in (single, layer)
    ]
    difference: Tensor = single(x).double() - layer(x).double()
    return (difference.abs() / (budgets[0].allowed + budgets[1].allowed)).amax((1, 2))


def facts(n: Numbers) -> dict[str, bool]:
    rounding, compared = n["rounding"], n["compared"]
    return {
        "scores": rounding["scores"] <= 1,
        "rescaled": rounding["rescaled"] <= 1,
        "saturated": n["equal"]["rand"] == n["sequences"],
        "even": rounding["same"] <= 1,
        "between": rounding["quiet"] > 1,
        "default": rounding["own"] > 1,
        "compare": (
            all(compared[name].startswith("inconclusive") for name in ("rand", "same"))
            and compared["quiet"] == compared["elsewhere"] == "number of heads"
        ),
    }


def draw(figure: Figure, n: Numbers) -> None:
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
        drawing.label_point(above, words, (factor, share), (-9, 4), ha="right", color=INK)
        below.plot(n["factors"], n["sweep"][name]["several"], color=SERIES[0])
        below.plot(n["factors"], n["sweep"][name]["one"], color=SERIES[2], linestyle="--")
        drawing.style_axes(above, title, xscale="log")
        below.set_xticks(ticks := [0.001, 0.01, 0.1, 1, 10], [f"{tick:g}" for tick in ticks])
        drawing.style_axes(below, xlabel="size of the tokens")
    grid[1][0].text(0.05, 0.55, f"{n['heads']} heads", color=SERIES[0])
    grid[1][0].text(0.011, 0.35, "one head", color=SERIES[2], ha="right")
    grid[0][0].set(ylim=(-0.03 * top, 1.1 * top), ylabel="relative difference\nof the outputs")
    grid[0][0].set_yticks(shares := [0, 0.5, 1], [f"{100 * x:g}\u00a0%" for x in shares])
    grid[1][0].set(ylim=(-0.08, 1.08), ylabel="softmax")
    grid[1][0].set_yticks([0, 1], ["one key", "even"])
