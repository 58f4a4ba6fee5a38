"""Are the implementations the same?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headwise.study import trained_encoder
from headwise.study.charts import CARD, INK, SOFT, Axes, Figure
from headwise.study.experiments import conventions, same_weights
from headwise.study.experiments.same_weights import EMBED_DIM, NUM_HEADS
from headwise.study.implementations import IMPLEMENTATIONS, PEERS, WRITTEN_ANEW
from headwise.study.question import Fact, FactTable, Numbers, Question, say, scientific
from headwise.support.progress import Progress

CODE = tuple(key for key in IMPLEMENTATIONS if key != "paper")  # a formula has no conventions
MISREAD = {
    "transposed": "wo transposed",
    "exchanged": "wq and wk exchanged",
    "interleaved": "rows of the heads interleaved",
    "scale": "scores over √embed_dim",
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
    """Fill all with the same weights and compare; then try out each one's conventions."""
    progress("the same weights", 0, 3)
    same = same_weights.of_random_weights()
    same["blocks_are_sums"] = same_weights.blocks_are_sums()
    progress("the weights of an encoder", 1, 3)
    reading = trained_encoder.reading(progress)
    shares = same_weights.of_a_model(reading)
    progress("conventions", 2, 3)
    each = {key: conventions.conventions(IMPLEMENTATIONS[key]) for key in CODE}
    sizes = {"embed_dim": EMBED_DIM, "num_heads": NUM_HEADS}
    starts = {key: conventions.start(IMPLEMENTATIONS[key], **sizes) for key in CODE}
    out = {key: found["out"] for key, found in starts.items()}
    return {
        "names": {key: make.name for key, make in IMPLEMENTATIONS.items()},
        "count": len(IMPLEMENTATIONS),
        "own": len(IMPLEMENTATIONS) - len(PEERS),
        "written_anew": listed(k for k, make in IMPLEMENTATIONS.items() if make in WRITTEN_ANEW),
        "without_biases": listed(key for key, make in IMPLEMENTATIONS.items() if not make.biased),
        "misread": MISREAD,
        **same,
        "model": reading.model,
        "layers": len(reading.calls),
        "share_of_a_model": shares,
        "largest_share_of_a_model": max(shares.values()),
        # All returned weights end in the same axes.
        "conventions": {
            key: {what: str(each[key][what]).removesuffix(", queries, keys") for what in TABLE}
            for key in CODE
        },
        "who": {
            what: {kind: listed(k for k in CODE if each[k][what] == kind) for kind in kinds}
            for what, kinds in conventions.KINDS.items()
        },
        "fills": fills({key: str(found["fill"]) for key, found in each.items()}),
        "idle_dropout": listed(
            k for k in CODE if each[k]["dropout_modules_called"] != each[k]["dropout_modules"]
        ),
        "narrow_softmax": [k for k in CODE if each[k]["softmax_narrows"]],
        "who_narrows": listed(k for k in CODE if each[k]["softmax_narrows"]),
        "orders_of_weights": len({each[k]["weights"] for k in CODE} - {conventions.UNSEEN}),
        "out": out,
        "copies_of_one": listed(key for key, found in starts.items() if found["copies"]),
        "narrowest_start": min(out.values()),
        "widest_start": max(out.values()),
        "one_class": conventions.of_one_class(),
    }


def listed(keys: Iterable[str]) -> str:
    """Names in a row, for a sentence."""
    return ", ".join(IMPLEMENTATIONS[key].name for key in keys) or "none"


def fills(found: Mapping[str, str]) -> str:
    """Each score that stands for a hidden one, with the names of those who use it."""
    seen = [fill for fill in dict.fromkeys(found.values()) if fill != conventions.UNSEEN]
    return ", ".join(f"{fill} ({listed(k for k in found if found[k] == fill)})" for fill in seen)


def differ(n: Numbers, what: str) -> bool:
    """Whether the implementations are of more than one kind."""
    return sum(1 for names in n["who"][what].values() if names != "none") > 1


def one_class_differs(found: Numbers) -> bool:
    """Whether each of the classes that were run on two of their paths has two conventions."""
    boolean, ahead = found["gpt2_boolean"], found["gpt2_sees_ahead"]
    return bool(
        found["torch_in_evaluation"] != found["torch_in_training"]
        and boolean["eager"] != boolean["sdpa"]
        and ahead["eager"] != ahead["sdpa"]
    )


# ---- the picture -------------------------------------------------------------------------------


def draw(figure: Figure, n: Numbers) -> None:
    """Who differs how much from whom, on a log scale; below, the same weights misread."""
    from matplotlib.colors import LogNorm

    figure.set_figheight(6.3)
    figure.set_layout_engine("none")  # the names stand in a column of their own
    norm = LogNorm(1e-8, 10)
    names, misread = list(n["names"].values()), list(n["misread"].values())
    place: dict[str, Any] = {
        "left": 0.335,
        "right": 0.885,
        "top": 0.955,
        "bottom": 0.09,
        "hspace": 0.36,
    }
    place["height_ratios"] = (len(names), len(misread), 0.4)
    upper, lower, scale = figure.subplots(3, 1, gridspec_kw=place)
    differences(upper, n["pairs"], names, norm)
    upper.set_title("Filled with the same weights", loc="left")
    for row in range(len(names)):
        upper.text(-5.45, row + 0.5, str(row + 1), color=SOFT, ha="right", va="center")
    differences(lower, n["misread_pairs"], misread, norm)
    lower.set_title("PyTorch's layer with these weights misread, against each", loc="left")
    bar = figure.colorbar(lower.collections[0], cax=scale, orientation="horizontal")
    bar.set_ticks([1e-8, 1e-6, 1e-4, 1e-2, 1.0], labels=["10⁻⁸", "10⁻⁶", "10⁻⁴", "10⁻²", "1"])
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)
    bar.ax.axvline(n["allowed"], color=CARD, linewidth=3)
    words, inside = say("rounding allows up to {allowed:sci}", n), bar.ax.get_xaxis_transform()
    bar.ax.text(n["allowed"], 1.25, words, color=INK, va="bottom", transform=inside)
    bar.set_label("largest difference between two outputs, on a logarithmic scale")


def size(value: float) -> str:
    """A difference in few signs: with a power of ten only where it is small."""
    return f"{value:.1f}" if value >= 0.1 else scientific(value)


def differences(
    axes: Axes, values: Sequence[Sequence[float]], names: Sequence[str], norm: Any
) -> None:
    """Coloured differences, with the largest of each row beside it; = where all bits agree."""
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
        axes.text(columns + 0.2, row + 0.5, size(max(numbers)), color=SOFT, va="center")
        for column, value in enumerate(numbers):
            if value == 0:
                axes.text(column + 0.5, row + 0.5, "=", color=SOFT, ha="center", va="center")
    axes.text(columns + 0.2, -0.1, "at most", color=SOFT, va="bottom")


QUESTION = Question(
    id="implementations",
    asks="Are the implementations the same?",
    claim="Filled with the same weights they give the same output, to rounding. What surrounds "
    "the formula is different: masks, dropout, residual and norm, the attention weights that are "
    "returned, and the initialisation.",
    measure=measure,
    facts=(
        Fact(
            "each of the {count} is within the error budget of the float64 result: at most "
            "{largest_share[plain]:percent} of it is used without a mask, and "
            "{largest_share[masked]:percent} with a causal and padding mask in its own convention; "
            "and any two differ by no more than rounding allows both",
            lambda n: (
                max(n["largest_share"]["plain"], n["largest_share"]["masked"]) <= 1
                and n["each_pair_within"]
            ),
        ),
        Fact(
            "so is, with biases, each that has them (not {without_biases}; "
            "{largest_share[biased]:percent}), and with "
            "the weights and tokens of the {layers} layers of {model}, whose own outputs are "
            "among them ({largest_share_of_a_model:percent})",
            lambda n: max(n["largest_share"]["biased"], n["largest_share_of_a_model"]) <= 1,
        ),
        Fact(
            "weights that are misread do not pass: the error is at least "
            "{least_misread_share:,.0f} times the error budget",
            lambda n: n["least_misread_share"] > 1,
        ),
        Fact(
            "in float64 the errors shrink accordingly, except in {who_narrows}, whose softmax "
            "stays in float32",
            lambda n: n["outside_in_float64"] == n["narrow_softmax"],
        ),
        Fact(
            "True in a boolean mask hides the key ({who[boolean][hides the key]}), keeps it "
            "({who[boolean][keeps the key]}) or adds one to its score "
            "({who[boolean][adds 1 to the score]}), and a hidden score is {fills}; a query without "
            "keys gets NaN ({who[empty_row][NaN]}), the mean of all values "
            "({who[empty_row][mean of all values]}) or zeros ({who[empty_row][zeros]})",
            lambda n: differ(n, "boolean") and differ(n, "empty_row"),
        ),
        Fact(
            "dropout falls on the attention weights ({who[dropped][attention weights]}), on the "
            "output ({who[dropped][output]}) or on both ({who[dropped][both]}), and some have a "
            "dropout module that is never called ({idle_dropout})",
            lambda n: differ(n, "dropped") and n["idle_dropout"] != "none",
        ),
        Fact(
            "a residual and a norm are inside in {who[block][residual, norm]}: the output is the "
            "norm of input and attention, bit for bit; attention weights are returned "
            "in {orders_of_weights} orders of axes; the standard deviation of wo is initialised "
            "from {narrowest_start:.4f} to {widest_start:.3f}, and in {copies_of_one} all four "
            "matrices are copies of one until the model initialises them",
            lambda n: (
                differ(n, "block")
                and n["blocks_are_sums"]
                and n["orders_of_weights"] > 1
                and n["narrowest_start"] < n["widest_start"]
            ),
        ),
        Fact(
            "even one class can have two conventions: with need_weights=False and no gradients, "
            "PyTorch's layer gives a query without keys {one_class[torch_in_evaluation]} in "
            "evaluation and {one_class[torch_in_training]} in training; with GPT-2's class, True "
            "in a mask {one_class[gpt2_boolean][eager]} in the eager implementation and "
            "{one_class[gpt2_boolean][sdpa]} in the one called sdpa, and without a mask a query "
            "sees later keys: {one_class[gpt2_sees_ahead][eager]:yesno} in eager, "
            "{one_class[gpt2_sees_ahead][sdpa]:yesno} in sdpa",
            lambda n: one_class_differs(n["one_class"]),
        ),
    ),
    verdict="In what they compute, yes; in what surrounds it, no: filled with the same weights, "
    "{count} implementations agree to {largest_pair:sci}, which is rounding, but they differ in "
    "masks, dropout, residuals, returned attention weights and initialisation (table below).",
    why="All compute the same formula; they store its matrices packed, transposed or head by head "
    "and sum in another order, so only the last bits differ. What to do with a mask, with dropout "
    "and with the initial weights is not part of the formula, and everyone chose for themselves.",
    caption="Above: the rows and columns are {count} implementations, and a square is the largest "
    "difference between the outputs of two (whose standard deviation is {typical_output:.1f}); = "
    "where every bit agrees. Rewritten here from their source: {written_anew} (the paper is "
    "“Attention Is All You Need”, the example one of einops' documentation); the others run as "
    "installed, the last {own} are headwise's. "
    "Below: four mistakes made when porting weights, each far beyond rounding; the last divides "
    "scores by √embed_dim instead of √head_dim.",
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
