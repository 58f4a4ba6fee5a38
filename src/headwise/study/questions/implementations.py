"""Question: do implementations of multi-head attention compute the same function?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headwise.study import encoder
from headwise.study.drawing import CARD, INK, SOFT, Axes, Figure
from headwise.study.experiments import conventions, same_weights
from headwise.study.experiments.same_weights import EMBED_DIM, NUM_HEADS
from headwise.study.implementations import IMPLEMENTATIONS, PEERS, REWRITTEN
from headwise.study.question import (
    Numbers,
    fill_template,
    format_scientific,
)
from headwise.support.progress import Progress

CODE = tuple(
    key for key in IMPLEMENTATIONS if key != "paper"
)  # the paper's form has no code, and so no conventions
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
VARIES = {
    "allowed",
    "largest_pair",
    "largest_share",
    "largest_share_of_a_model",
    "least_misread_share",
    "misread_share",
    "pairs",
    "share",
    "share_of_a_model",
}


def measure(progress: Progress) -> dict[str, Any]:
    """Compare all implementations under the same weights, then measure their conventions."""
    progress("the same weights", 0, 3)
    same = same_weights.compare_random_weights()
    same["blocks_are_sums"] = same_weights.einops_and_bert_blocks_are_post_norm()
    progress("the weights of an encoder", 1, 3)
    run = encoder.encoder_run(progress)
    shares = same_weights.error_budget_shares_over_layers(run)
    progress("conventions", 2, 3)
    each = {key: conventions.measure_conventions(IMPLEMENTATIONS[key]) for key in CODE}
    sizes = {"embed_dim": EMBED_DIM, "num_heads": NUM_HEADS}
    initial = conventions.initial_output_projection_std
    starts = {key: initial(IMPLEMENTATIONS[key], **sizes) for key in CODE}
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
        "share_of_a_model": shares,
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
    """Join the implementations' names for a sentence."""
    return ", ".join(IMPLEMENTATIONS[key].name for key in keys) or "none"


def describe_masked_score_values(scores: Mapping[str, str]) -> str:
    """Return each value of hidden scores, with the names of the implementations that use it."""
    kinds = [fill for fill in dict.fromkeys(scores.values()) if fill != conventions.UNSEEN]
    return ", ".join(
        f"{fill} ({join_names(k for k in scores if scores[k] == fill)})" for fill in kinds
    )


def has_several_kinds(n: Numbers, what: str) -> bool:
    """Check that the implementations have more than one kind of a convention."""
    return sum(1 for names in n["who"][what].values() if names != "none") > 1


def paths_differ(paths: Numbers) -> bool:
    """Check that each class has different conventions on its two paths."""
    boolean, ahead = paths["gpt2_boolean"], paths["gpt2_sees_ahead"]
    return bool(
        paths["torch_in_evaluation"] != paths["torch_in_training"]
        and boolean["eager"] != boolean["sdpa"]
        and ahead["eager"] != ahead["sdpa"]
    )


def facts(n: Numbers) -> dict[str, bool]:
    """Check the facts of the text by the numbers."""
    return {
        "random-weights": (
            max(n["largest_share"]["plain"], n["largest_share"]["masked"]) <= 1
            and n["each_pair_within"]
        ),
        "biases": max(n["largest_share"]["biased"], n["largest_share_of_a_model"]) <= 1,
        "misread": n["least_misread_share"] > 1,
        "float64": (n["outside_in_float64"] == n["narrow_softmax"]),
        "masks": has_several_kinds(n, "boolean") and has_several_kinds(n, "empty_row"),
        "dropout": has_several_kinds(n, "dropped") and n["idle_dropout"] != "none",
        "blocks": (
            has_several_kinds(n, "block")
            and n["blocks_are_sums"]
            and n["orders_of_weights"] > 1
            and n["narrowest_start"] < n["widest_start"]
        ),
        "one-class": paths_differ(n["one_class"]),
        "causes": n["misread_causes"] == NAMED,
    }


# ---- the picture -------------------------------------------------------------------------------


def draw(figure: Figure, n: Numbers) -> None:
    """Draw the largest differences on a log scale; below, the same weights misread."""
    from matplotlib.colors import LogNorm

    figure.set_figheight(6.3)
    figure.set_layout_engine("none")  # the names have a separate column
    norm = LogNorm(1e-8, 10)
    names, misread = list(n["names"].values()), list(n["misread"].values())
    layout: dict[str, Any] = {
        "left": 0.335,
        "right": 0.885,
        "top": 0.955,
        "bottom": 0.09,
        "hspace": 0.36,
    }
    layout["height_ratios"] = (len(names), len(misread), 0.4)
    upper, lower, scale = figure.subplots(3, 1, gridspec_kw=layout)
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
    words, inside = (
        fill_template("rounding allows up to {allowed:sci}", n),
        bar.ax.get_xaxis_transform(),
    )
    bar.ax.text(n["allowed"], 1.25, words, color=INK, va="bottom", transform=inside)
    bar.set_label("largest difference between two outputs, on a logarithmic scale")


def short_number(value: float) -> str:
    """Format a difference: with a power of ten only if it is small."""
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
