"""Question: do implementations of multi-head attention compute the same function?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from headwise.function.budget import Budget
from headwise.function.rounding import Roundoff
from headwise.masks.mask import Mask
from headwise.reports.report import SameFunction
from headwise.study import conventions, encoder
from headwise.study.drawing import CARD, INK, SOFT, Axes, Figure
from headwise.study.implementations import (
    IMPLEMENTATIONS,
    PEERS,
    REWRITTEN,
    Bert,
    EinopsPage,
    Implementation,
    SharedWeights,
)
from headwise.study.measures import layer_error_budget, name_cause
from headwise.study.question import Numbers, Progress, fill_template, format_scientific

BATCH, NUM_HEADS, LENGTH, EMBED_DIM = 3, 6, 45, 192
CODE = tuple(key for key in IMPLEMENTATIONS if key != "paper")  # the paper's form has no code
MISREAD = {
    "transposed": "wo transposed",
    "exchanged": "wq and wk exchanged",
    "interleaved": "rows of the heads interleaved",
    "scale": "scores over √embed_dim",
}
NAMED = {
    "transposed": "square matrix transposed",
    "exchanged": "q and k exchanged",
    "interleaved": "heads interleaved",
    "scale": "factor",
}
TABLE = ("boolean", "empty_row", "dropped", "weights", "weights_in_training", "block")
VARIES = {"allowed", "largest_pair", "largest_share", "largest_share_of_a_model"}
VARIES |= {"least_misread_share", "pairs"}


def measure(progress: Progress) -> dict[str, Any]:
    """Compare all implementations under the same weights, then measure their conventions."""
    progress("the same weights", 0, 3)
    same = compare_random_weights()
    same["blocks_are_sums"] = einops_and_bert_blocks_are_post_norm()
    progress("the weights of an encoder", 1, 3)
    run = encoder.encoder_run(progress)
    shares = error_budget_shares_over_layers(run)
    progress("conventions", 2, 3)
    each = {key: conventions.measure_conventions(IMPLEMENTATIONS[key]) for key in CODE}
    initial, sizes = conventions.initial_output_projection_std, (EMBED_DIM, NUM_HEADS)
    starts = {key: initial(IMPLEMENTATIONS[key], *sizes) for key in CODE}
    out = {key: start["out"] for key, start in starts.items()}
    return {
        "names": {key: kind.name for key, kind in IMPLEMENTATIONS.items()},
        "count": len(IMPLEMENTATIONS),
        "own": len(IMPLEMENTATIONS) - len(PEERS),
        "written_anew": join_names(k for k, kind in IMPLEMENTATIONS.items() if kind in REWRITTEN),
        "without_biases": join_names(k for k, kind in IMPLEMENTATIONS.items() if not kind.biased),
        "misread": MISREAD,
        **same,
        "model": run.model,
        "layers": len(run.calls),
        "largest_share_of_a_model": max(shares.values()),
        # The weights of all implementations end in these axes.
        "conventions": {
            key: {what: str(each[key][what]).removesuffix(", queries, keys") for what in TABLE}
            for key in CODE
        },
        "who": {
            what: {kind: join_names(k for k in CODE if each[k][what] == kind) for kind in kinds}
            for what, kinds in conventions.KINDS.items()
        },
        "fills": describe_masked_score_values({key: str(each[key]["fill"]) for key in CODE}),
        "idle_dropout": join_names(
            k for k in CODE if each[k]["dropout_modules_called"] != each[k]["dropout_modules"]
        ),
        "narrow_softmax": [k for k in CODE if each[k]["softmax_narrows"]],
        "who_narrows": join_names(k for k in CODE if each[k]["softmax_narrows"]),
        "orders_of_weights": len({each[k]["weights"] for k in CODE} - {conventions.UNSEEN}),
        "out": out,
        "copies_of_one": join_names(key for key, start in starts.items() if start["copies"]),
        "narrowest_start": min(out.values()),
        "widest_start": max(out.values()),
        "one_class": conventions.conventions_by_path(),
    }


def join_names(keys: Iterable[str]) -> str:
    return ", ".join(IMPLEMENTATIONS[key].name for key in keys) or "none"


def describe_masked_score_values(scores: Mapping[str, str]) -> str:
    kinds = [fill for fill in dict.fromkeys(scores.values()) if fill != conventions.UNSEEN]
    return ", ".join(
        f"{fill} ({join_names(k for k in scores if scores[k] == fill)})" for fill in kinds
    )


def output_error_budget(
    x: Tensor, weights: SharedWeights, *, num_heads: int, may_attend: Tensor | None = None
) -> Budget:
    mask = None if may_attend is None else Mask.may_attend(may_attend, axes="batch queries keys")
    return layer_error_budget(x, x, x, weights, num_heads=num_heads, mask=mask)


def make_implementations(
    keys: Iterable[str] = tuple(IMPLEMENTATIONS),
    *,
    biased: bool = False,
    embed_dim: int = EMBED_DIM,
    num_heads: int = NUM_HEADS,
) -> dict[str, Implementation]:
    return {
        key: IMPLEMENTATIONS[key](embed_dim, num_heads).eval()
        for key in keys
        if IMPLEMENTATIONS[key].biased or not biased
    }


@torch.no_grad()
def compute_outputs(
    implementations: Mapping[str, Implementation],
    x: Tensor,
    weights: SharedWeights,
    may_attend: Tensor | None = None,
) -> dict[str, Tensor]:
    return {
        key: implementation.load_weights(weights)(
            x, None if may_attend is None else implementation.convert_mask(may_attend)
        )
        for key, implementation in implementations.items()
    }


def budget_share_of_each_output(allowed: Budget, outputs: Mapping[str, Tensor]) -> dict[str, float]:
    return {key: allowed.check(output).ratio for key, output in outputs.items()}


def largest_differences(
    rows: Mapping[str, Tensor], columns: Mapping[str, Tensor]
) -> list[list[float]]:
    return [[float((a - b).abs().max()) for b in columns.values()] for a in rows.values()]


def all_pairs_agree(allowed: Budget, outputs: Mapping[str, Tensor]) -> bool:
    """Check that any two outputs differ by at most twice the allowed error, at every element."""
    pairs = combinations((output.double() for output in outputs.values()), 2)
    return all(bool(((a - b).abs() <= 2 * allowed.allowed).all()) for a, b in pairs)


def make_misread_weights(weights: SharedWeights) -> dict[str, SharedWeights]:
    """Return the same numbers misread in four ways, as happens when weights are ported.

    All matrices are square, so no shape error shows the mistake.
    """
    q, k, v, out = weights.matrices
    by_head = (w.unflatten(0, (-1, NUM_HEADS)).transpose(0, 1).flatten(0, 1) for w in (q, k, v))
    return {
        "transposed": SharedWeights(q, k, v, out.mT),
        "exchanged": SharedWeights(k, q, v, out),
        "interleaved": SharedWeights.of_matrices((*by_head, out)),
        "scale": SharedWeights(q / math.sqrt(NUM_HEADS), k, v, out),
    }


def named_causes_of_misread_weights(weights: SharedWeights) -> dict[str, str]:
    right = make_implementations(["torch"])["torch"].load_weights(weights).inner
    wrong = make_implementations(["torch"])["torch"]
    return {
        how: name_cause(wrong.load_weights(misread).inner, right)
        for how, misread in make_misread_weights(weights).items()
    }


def error_budget_shares_over_layers(
    run: encoder.RecordedRun, keys: Iterable[str] = tuple(IMPLEMENTATIONS)
) -> dict[str, float]:
    """Return the largest budget share of each implementation over the layers of an encoder.

    Weights, tokens and padding are those of each layer. The encoder's own outputs are included.
    """
    sizes = {"embed_dim": run.calls[0].x.shape[-1], "num_heads": run.num_heads}
    implementations = make_implementations(keys, biased=True, **sizes)
    seen = run.real[:, None].expand(-1, run.real.shape[1], -1)
    largest: dict[str, float] = {}
    for call in run.calls:
        outputs = compute_outputs(implementations, call.x, call.weights, seen)
        outputs["encoder"] = call.output
        allowed = output_error_budget(
            call.x, call.weights, num_heads=run.num_heads, may_attend=seen
        )
        for key, share in budget_share_of_each_output(allowed, outputs).items():
            largest[key] = max(share, largest.get(key, 0.0))
    return largest


def compare_with_model_layers(run: encoder.RecordedRun) -> SameFunction:
    shares = error_budget_shares_over_layers(run, keys=("drop_in", "native"))
    names = {key: make.name for key, make in IMPLEMENTATIONS.items()}
    names["encoder"] = "the model's own layers"
    by_name = {names[key]: share for key, share in shares.items()}
    return SameFunction(run.model, len(run.calls), by_name)


def compare_random_weights() -> dict[str, Any]:
    """Compare all implementations under random weights: plain, masked, biased, float64, misread.

    The mask is causal, and also hides the last third of the keys in the second sequence.
    """
    x = torch.randn(BATCH, LENGTH, EMBED_DIM)
    mask = torch.ones(BATCH, LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[1, :, 2 * LENGTH // 3 :] = False
    plain, biased = SharedWeights.random(EMBED_DIM), SharedWeights.random(EMBED_DIM, biased=True)
    implementations = make_implementations()

    def masked(made: Mapping[str, Implementation], weights: SharedWeights) -> dict[str, float]:
        allowed = output_error_budget(x, weights, num_heads=NUM_HEADS, may_attend=mask)
        return budget_share_of_each_output(allowed, compute_outputs(made, x, weights, mask))

    outputs = compute_outputs(implementations, x, plain)
    allowed = output_error_budget(x, plain, num_heads=NUM_HEADS)
    share = {
        "plain": budget_share_of_each_output(allowed, outputs),
        "masked": masked(implementations, plain),
        "biased": masked(make_implementations(biased=True), biased),
    }
    wrong = {
        how: compute_outputs({"torch": implementations["torch"]}, x, weights)["torch"]
        for how, weights in make_misread_weights(plain).items()
    }
    wide = {key: implementation.double() for key, implementation in implementations.items()}
    finer = Roundoff.of(torch.float64).u / Roundoff.of(x.dtype).u
    narrow = replace(allowed, allowed=finer * allowed.allowed)
    fine = budget_share_of_each_output(narrow, compute_outputs(wide, x.double(), plain))
    pairs = largest_differences(outputs, outputs)
    return {
        "pairs": pairs,
        "each_pair_within": all_pairs_agree(allowed, outputs),
        "largest_pair": max(map(max, pairs)),
        "typical_output": float(allowed.exact.std()),
        "allowed": float(allowed.allowed.max()),
        "largest_share": {name: max(each.values()) for name, each in share.items()},
        "misread_causes": named_causes_of_misread_weights(plain),
        "misread_pairs": largest_differences(wrong, outputs),
        "least_misread_share": min(budget_share_of_each_output(allowed, wrong).values()),
        "outside_in_float64": [key for key, used in fine.items() if used > 1],
    }


@torch.no_grad()
def einops_and_bert_blocks_are_post_norm() -> bool:
    x, weights = torch.randn(BATCH, LENGTH, EMBED_DIM), SharedWeights.random(EMBED_DIM, biased=True)
    einops, bert = EinopsPage(EMBED_DIM, NUM_HEADS), Bert(EMBED_DIM, NUM_HEADS)
    norms = {einops: einops.layer_norm, bert: bert.inner.output.LayerNorm}
    return all(
        torch.equal(
            implementation.load_weights(weights).eval().compute_block(x),
            norm(implementation(x) + x),
        )
        for implementation, norm in norms.items()
    )


def facts(n: Numbers) -> dict[str, bool]:
    paths, largest = n["one_class"], n["largest_share"]
    varied = {
        what: sum(names != "none" for names in kinds.values()) > 1
        for what, kinds in n["who"].items()
    }
    return {
        "random-weights": max(largest["plain"], largest["masked"]) <= 1 and n["each_pair_within"],
        "biases": max(largest["biased"], n["largest_share_of_a_model"]) <= 1,
        "misread": n["least_misread_share"] > 1,
        "float64": n["outside_in_float64"] == n["narrow_softmax"],
        "masks": varied["boolean"] and varied["empty_row"],
        "dropout": varied["dropped"] and n["idle_dropout"] != "none",
        "blocks": (
            varied["block"]
            and n["blocks_are_sums"]
            and n["orders_of_weights"] > 1
            and n["narrowest_start"] < n["widest_start"]
        ),
        "one-class": (
            paths["torch_in_evaluation"] != paths["torch_in_training"]
            and paths["gpt2_boolean"]["eager"] != paths["gpt2_boolean"]["sdpa"]
            and paths["gpt2_sees_ahead"]["eager"] != paths["gpt2_sees_ahead"]["sdpa"]
        ),
        "causes": n["misread_causes"] == NAMED,
    }


def draw(figure: Figure, n: Numbers) -> None:
    from matplotlib.colors import LogNorm

    figure.set_figheight(6.3)
    figure.set_layout_engine("none")  # the names have a separate column
    norm = LogNorm(1e-8, 10)
    names, misread = list(n["names"].values()), list(n["misread"].values())
    layout = {"left": 0.335, "right": 0.885, "top": 0.955, "bottom": 0.09, "hspace": 0.36}
    ratios = (len(names), len(misread), 0.4)
    upper, lower, scale = figure.subplots(3, 1, height_ratios=ratios, gridspec_kw=layout)
    draw_differences(upper, n["pairs"], names, norm)
    upper.set_title("With the same weights", loc="left")
    for row in range(len(names)):
        upper.text(-5.45, row + 0.5, str(row + 1), color=SOFT, ha="right", va="center")
    draw_differences(lower, n["misread_pairs"], misread, norm)
    lower.set_title("PyTorch's layer with these weights misread, against each", loc="left")
    bar = figure.colorbar(lower.collections[0], cax=scale, orientation="horizontal")
    bar.set_ticks([1e-8, 1e-6, 1e-4, 1e-2, 1.0], labels=["10⁻⁸", "10⁻⁶", "10⁻⁴", "10⁻²", "1"])
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)
    bar.ax.axvline(n["allowed"], color=CARD, linewidth=3)
    words = fill_template("rounding allows up to {allowed:sci}", n)
    inside = bar.ax.get_xaxis_transform()
    bar.ax.text(n["allowed"], 1.25, words, color=INK, va="bottom", transform=inside)
    bar.set_label("largest difference between two outputs, on a logarithmic scale")


def short_number(value: float) -> str:
    return f"{value:.1f}" if value >= 0.1 else format_scientific(value)


def draw_differences(
    axes: Axes, values: Sequence[Sequence[float]], names: Sequence[str], norm: Any
) -> None:
    """Draw differences as colours, and each row's largest as text; = where all bits agree."""
    import numpy as np

    shown = np.ma.masked_equal(np.array(values), 0.0)
    axes.pcolormesh(shown, cmap="viridis", norm=norm, edgecolors=CARD, linewidth=2)
    axes.invert_yaxis()
    columns = len(values[0])
    axes.set_xticks([c + 0.5 for c in range(columns)], [str(c + 1) for c in range(columns)])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    for row, (name, numbers) in enumerate(zip(names, values, strict=True)):
        axes.text(-5.2, row + 0.5, name, color=INK, va="center")
        axes.text(columns + 0.2, row + 0.5, short_number(max(numbers)), color=SOFT, va="center")
        for column, value in enumerate(numbers):
            if value == 0:
                axes.text(column + 0.5, row + 0.5, "=", color=SOFT, ha="center", va="center")
    axes.text(columns + 0.2, -0.1, "at most", color=SOFT, va="bottom")
