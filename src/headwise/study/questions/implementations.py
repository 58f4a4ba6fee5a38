"""Question: do implementations of multi-head attention compute the same function?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headwise.study import trained
from headwise.study.drawing import CARD, INK, SOFT, Axes, Figure
from headwise.study.experiments import conventions, same_weights
from headwise.study.experiments.same_weights import EMBED_DIM, NUM_HEADS
from headwise.study.implementations import IMPLEMENTATIONS, PEERS, REWRITTEN
from headwise.study.question import (
    Fact,
    FactTable,
    Numbers,
    Question,
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
TABLE = {
    "boolean": "True in a mask",
    "empty_row": "query without keys",
    "dropped": "dropout on",
    "weights": "weights returned per",
    "weights_in_training": "weights in training",
    "block": "also inside",
}


def measure(progress: Progress) -> dict[str, Any]:
    """Compare all implementations under the same weights, then measure their conventions."""
    progress("the same weights", 0, 3)
    same = same_weights.compare_random_weights()
    same["blocks_are_sums"] = same_weights.einops_and_bert_blocks_are_post_norm()
    progress("the weights of an encoder", 1, 3)
    run = trained.encoder_run(progress)
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


QUESTION = Question(
    id="implementations",
    asks="Are the implementations the same?",
    claim="With the same weights they give the same output, up to rounding. Their conventions "
    "around the formula differ: masks, dropout, residual and norm, the returned attention weights, "
    "and the initialisation.",
    measure=measure,
    facts=(
        Fact(
            "each of the {count} implementations is within the error budget of the float64 result: "
            "they use at most {largest_share[plain]:percent} without a mask, and "
            "{largest_share[masked]:percent} with a causal and padding mask in their own "
            "convention. Any two differ by no more than rounding allows both",
            lambda n: (
                max(n["largest_share"]["plain"], n["largest_share"]["masked"]) <= 1
                and n["each_pair_within"]
            ),
        ),
        Fact(
            "with biases, the implementations that have them (not {without_biases}) use at most "
            "{largest_share[biased]:percent}. With the weights and tokens of the {layers} layers "
            "of {model}, these and the model itself use at most "
            "{largest_share_of_a_model:percent}",
            lambda n: max(n["largest_share"]["biased"], n["largest_share_of_a_model"]) <= 1,
        ),
        Fact(
            "misread weights do not pass this test: their error is at least "
            "{least_misread_share:,.0f} times the error budget",
            lambda n: n["least_misread_share"] > 1,
        ),
        Fact(
            "in float64 all outputs are within the smaller error budget, except those of "
            "{who_narrows}, whose softmax stays in float32",
            lambda n: n["outside_in_float64"] == n["narrow_softmax"],
        ),
        Fact(
            "True in a boolean mask hides the key ({who[boolean][hides the key]}), keeps it "
            "({who[boolean][keeps the key]}) or adds one to its score "
            "({who[boolean][adds 1 to the score]}). A hidden score is {fills}. A query without "
            "keys gets NaN ({who[empty_row][NaN]}), the mean of all values "
            "({who[empty_row][mean of all values]}) or zeros ({who[empty_row][zeros]})",
            lambda n: has_several_kinds(n, "boolean") and has_several_kinds(n, "empty_row"),
        ),
        Fact(
            "dropout acts on the attention weights ({who[dropped][attention weights]}), on the "
            "output ({who[dropped][output]}) or on both ({who[dropped][both]}). Some have a "
            "dropout module that they never call ({idle_dropout})",
            lambda n: has_several_kinds(n, "dropped") and n["idle_dropout"] != "none",
        ),
        Fact(
            "some blocks include a residual and a norm ({who[block][residual, norm]}): the output "
            "is the norm of input plus attention, bit for bit. Attention weights are returned in "
            "{orders_of_weights} orders of axes. The initial standard deviation of wo is "
            "{narrowest_start:.4f} to {widest_start:.3f}. In {copies_of_one} all four matrices are "
            "copies of one until the model initialises them",
            lambda n: (
                has_several_kinds(n, "block")
                and n["blocks_are_sums"]
                and n["orders_of_weights"] > 1
                and n["narrowest_start"] < n["widest_start"]
            ),
        ),
        Fact(
            "even one class can have two conventions: with need_weights=False and no gradients, "
            "PyTorch's layer gives a query without keys {one_class[torch_in_evaluation]} in "
            "evaluation and {one_class[torch_in_training]} in training. In GPT-2's class, True "
            "in a mask {one_class[gpt2_boolean][eager]} in the eager implementation and "
            "{one_class[gpt2_boolean][sdpa]} in sdpa. Without a mask a query attends to later "
            "keys in eager ({one_class[gpt2_sees_ahead][eager]:yesno}) and in sdpa "
            "({one_class[gpt2_sees_ahead][sdpa]:yesno})",
            lambda n: paths_differ(n["one_class"]),
        ),
        Fact(
            "headwise.compare names the four mistakes: {misread[transposed]} "
            "({misread_causes[transposed]}), {misread[exchanged]} ({misread_causes[exchanged]}), "
            "{misread[interleaved]} ({misread_causes[interleaved]}), {misread[scale]} "
            "({misread_causes[scale]}, here of wq)",
            lambda n: n["misread_causes"] == NAMED,
        ),
    ),
    verdict="They compute the same formula: with the same weights, {count} implementations agree "
    "within {largest_pair:sci}, which is rounding. They differ around the formula: in masks, "
    "dropout, residuals, returned attention weights and initialisation (table below).",
    why="All compute the same formula. They store its matrices packed, transposed or head by head "
    "and sum in another order, so only the last bits differ. Masks, dropout and initial weights "
    "are not part of the formula, and every implementation chose its own conventions.",
    caption="Above: the rows and columns are {count} implementations, and a square is the largest "
    "difference between the outputs of two. The standard deviation of the outputs is "
    "{typical_output:.1f}; = means that every bit agrees. Rewritten here from their source: "
    "{written_anew} (the paper is “Attention Is All You Need”; the example is from einops' "
    "documentation). The others run from installed packages; the last {own} are headwise's. "
    "Below: four mistakes in porting weights, each far beyond rounding; the last divides scores by "
    "√embed_dim instead of √head_dim.",
    draw=draw,
    table=FactTable(
        columns=("implementation", *TABLE.values(), "initial std of wo"),
        rows=tuple(
            (
                f"{{names[{key}]}}",
                *(f"{{conventions[{key}][{what}]}}" for what in TABLE),
                f"{{out[{key}]:.3f}}",
            )
            for key in CODE
        ),
    ),
    varies=frozenset(
        {
            "pairs",
            "largest_pair",
            "allowed",
            "share",
            "largest_share",
            "misread_share",
            "least_misread_share",
            "share_of_a_model",
            "largest_share_of_a_model",
        }
    ),
)
