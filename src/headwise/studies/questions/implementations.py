"""Are the implementations the same?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from headwise.models.reading import Progress
from headwise.studies import encoder
from headwise.studies.experiments import conventions, same_weights
from headwise.studies.experiments.own_layers import IMPLEMENTATIONS
from headwise.studies.experiments.same_weights import EMBED_DIM, NUM_HEADS
from headwise.studies.pictures.style import CARD, INK, LINE, SOFT
from headwise.studies.question import Fact, Numbers, Question, Table
from headwise.studies.words import scientific

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CODE = tuple(key for key in IMPLEMENTATIONS if key != "paper")  # a formula has no conventions
MISREAD = {
    "transposed": "output matrix transposed",
    "exchanged": "queries and keys exchanged",
    "interleaved": "rows of heads interleaved",
    "scale": "scale of one wide head",
}


def measure(progress: Progress) -> dict[str, Any]:
    """Fill all with the same weights and compare; then try out each one's conventions."""
    progress("the same weights", 0, 3)
    same = same_weights.of_random_weights()
    blocks = same_weights.of_blocks()
    progress("the weights of an encoder", 1, 3)
    reading = encoder.reading()
    shares, apart = same_weights.of_a_model(reading)
    progress("conventions", 2, 3)
    each = {key: conventions.conventions(IMPLEMENTATIONS[key]) for key in CODE}
    begins = {key: beginning(key) for key in CODE}
    return {
        "names": {key: make.name for key, make in IMPLEMENTATIONS.items()},
        "count": len(IMPLEMENTATIONS),
        "written_anew": listed(key for key, make in IMPLEMENTATIONS.items() if not make.real),
        "without_biases": listed(key for key, make in IMPLEMENTATIONS.items() if not make.biased),
        "misread": MISREAD,
        **same,
        "share_of_blocks": blocks,
        "model": reading.model,
        "layers": len(reading.calls),
        "share_of_a_model": shares,
        "largest_share_of_a_model": max(shares.values()),
        "bert_from_the_encoder": apart,
        "conventions": each,
        "who": {
            what: {kind: listed(k for k in CODE if each[k][what] == kind) for kind in kinds}
            for what, kinds in conventions.KINDS.items()
        },
        "idle_dropout": listed(
            k for k in CODE if each[k]["dropout_modules_called"] != each[k]["dropout_modules"]
        ),
        "narrow_softmax": [k for k in CODE if each[k]["softmax_narrows"]],
        "who_narrows": listed(k for k in CODE if each[k]["softmax_narrows"]),
        "orders_of_weights": len({each[k]["weights"] for k in CODE} - {conventions.UNSEEN}),
        "begins": begins,
        "copies_of_one": listed(key for key, begin in begins.items() if begin["copies"]),
        "narrowest_beginning": min(begin["out"] for begin in begins.values()),
        "widest_beginning": max(begin["out"] for begin in begins.values()),
        "one_class": conventions.of_one_class(),
    }


def listed(keys: Iterable[str]) -> str:
    """Names in a row, for a sentence."""
    return ", ".join(IMPLEMENTATIONS[key].name for key in keys) or "none"


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


def beginning(key: str) -> dict[str, float | bool]:
    """How the weights of an implementation begin, at the sizes that are compared."""
    return conventions.beginning(IMPLEMENTATIONS[key], embed_dim=EMBED_DIM, num_heads=NUM_HEADS)


def draw(figure: Figure, n: Numbers) -> None:
    """Who differs how much from whom, on a log scale; below, the same weights misread."""
    from matplotlib.colors import LogNorm

    figure.set_size_inches(7.6, 5.9)
    norm = LogNorm(1e-8, 10)
    names = [f"{name}   {place}" for place, name in enumerate(n["names"].values(), 1)]
    upper, lower = figure.subplots(2, 1, height_ratios=(len(names), len(n["misread"])))
    differences(upper, n["pairs"], names, norm)
    differences(lower, n["misread_pairs"], list(n["misread"].values()), norm)
    upper.set_title("filled with the same weights", loc="left")
    lower.set_title("torch's layer with the same numbers, misread", loc="left")
    bar = figure.colorbar(lower.collections[0], ax=(upper, lower), location="bottom", aspect=50)
    ticks = {value: size(value) for value in (1e-8, 1e-4, 1e-2, 1.0)}
    ticks[n["allowed"]] = f"{size(n['allowed'])}\nlargest error allowed"
    bar.set_ticks(list(ticks), labels=list(ticks.values()))
    bar.ax.axvline(n["allowed"], color=CARD, linewidth=3)
    bar.set_label("largest difference between two outputs")


def size(value: float) -> str:
    """A difference in few signs: as a power of ten only where it is small."""
    return f"{value:.1f}" if value >= 0.1 else scientific(value).removeprefix("1.0 × ")


def differences(
    axes: Axes, values: Sequence[Sequence[float]], names: Sequence[str], norm: Any
) -> None:
    """Coloured differences, with the largest of each row beside it; grey where all bits agree."""
    import numpy as np

    shown = np.ma.masked_equal(np.array(values), 0.0)
    axes.set_facecolor(LINE)
    axes.pcolormesh(shown, cmap="viridis", norm=norm, edgecolors=CARD, linewidth=2)
    axes.invert_yaxis()
    axes.set_yticks([row + 0.5 for row in range(len(names))], names, color=INK)
    columns = range(len(values[0]))
    axes.set_xticks([column + 0.5 for column in columns], [str(c + 1) for c in columns])
    for side in axes.spines.values():
        side.set_visible(False)
    for row, numbers in enumerate(values):
        largest = size(max(numbers))
        axes.text(len(numbers) + 0.2, row + 0.5, largest, color=SOFT, va="center")
    axes.text(len(columns) + 0.2, -0.1, "at most", color=SOFT, va="bottom")


def conventions_of(key: str) -> tuple[str, ...]:
    """One row of the table."""

    def said(what: str) -> str:
        return f"{{conventions[{key}][{what}]}}"

    spreads = (f"{{begins[{key}][{name}]:.3f}}" for name in ("q", "k", "v", "out"))
    return (
        f"{{names[{key}]}}",
        said("boolean"),
        f"{said('fill')}; {said('empty_row')}",
        f"{said('dropped')}; {said('dropout_modules_called')} of {said('dropout_modules')}",
        said("weights"),
        said("weights_in_training"),
        said("block"),
        " ".join(spreads),
    )


QUESTION = Question(
    id="implementations",
    asks="Are the implementations the same?",
    claim="Filled with the same weights they give the same output, to rounding. What surrounds "
    "the formula is different: masks, dropout, residual and norm, the weights that are given out, "
    "and how training begins.",
    measure=measure,
    facts=(
        Fact(
            "each of the {count} is within the error budget of the float64 result: at most "
            "{largest_share[plain]:percent} of it is used without a mask, "
            "{largest_share[masked]:percent} with a causal and padding mask in its own spelling",
            lambda n: max(n["largest_share"]["plain"], n["largest_share"]["masked"]) <= 1,
        ),
        Fact(
            "so is each that has biases with biases ({largest_share[biased]:percent}), and with "
            "the weights and tokens of the {layers} layers of {model} "
            "({largest_share_of_a_model:percent}); there BERT's class and the encoder's own "
            "layers differ by {bert_from_the_encoder:sci}",
            lambda n: max(n["largest_share"]["biased"], n["largest_share_of_a_model"]) <= 1,
        ),
        Fact(
            "weights that are misread do not pass: the error is at least "
            "{least_misread_share:,.0f} times what is allowed",
            lambda n: n["least_misread_share"] > 1,
        ),
        Fact(
            "in float64 the errors shrink with the rounding, but in {who_narrows}: the softmax "
            "there stays in float32",
            lambda n: n["outside_in_float64"] == n["narrow_softmax"],
        ),
        Fact(
            "a key marked True in a boolean mask is hidden ({who[boolean][hidden]}), kept "
            "({who[boolean][kept]}) or scored one higher ({who[boolean][scored one higher]}); a "
            "query without keys gets NaN ({who[empty_row][NaN]}), the mean of all values "
            "({who[empty_row][mean]}) or zeros ({who[empty_row][zeros]})",
            lambda n: differ(n, "boolean") and differ(n, "empty_row"),
        ),
        Fact(
            "dropout falls on the weights ({who[dropped][weights]}), on the output "
            "({who[dropped][output]}) or on both ({who[dropped][both]}), and some hold a dropout "
            "module that is never called ({idle_dropout})",
            lambda n: differ(n, "dropped") and n["idle_dropout"] != "none",
        ),
        Fact(
            "the residual and a norm are inside in {who[block][input, norm]}, and without them "
            "the attention is the same ({share_of_blocks[einops]:percent} and "
            "{share_of_blocks[bert]:percent} of the budget); weights are given out with "
            "{orders_of_weights} orders of axes; output projections begin with a standard "
            "deviation from {narrowest_beginning:.4f} to {widest_beginning:.3f}",
            lambda n: (
                differ(n, "block")
                and max(n["share_of_blocks"].values()) <= 1
                and n["orders_of_weights"] > 1
                and n["narrowest_beginning"] < n["widest_beginning"]
            ),
        ),
        Fact(
            "one class can have two conventions: not asked for weights, and without gradients, "
            "torch's layer gives a query without keys {one_class[torch_in_evaluation]} in "
            "evaluation and {one_class[torch_in_training]} in training; a key marked True is "
            "{one_class[gpt2_boolean][eager]} by GPT-2's class with its eager kernel and "
            "{one_class[gpt2_boolean][sdpa]} with sdpa; and without a mask, does a query there "
            "see later keys? {one_class[gpt2_sees_ahead][eager]:yesno} with eager, "
            "{one_class[gpt2_sees_ahead][sdpa]:yesno} with sdpa",
            lambda n: one_class_differs(n["one_class"]),
        ),
    ),
    verdict="In what they compute, yes: filled with the same weights, {count} implementations "
    "differ by at most {largest_pair:sci}, which is rounding; in what surrounds it, no: they read "
    "masks, drop out, add residuals, give out weights and begin training in different ways.",
    why="All are the same formula. They store its matrices packed, transposed or head by head, "
    "and add up in another order, so that only the last bits differ. The mask, the dropout and "
    "the first numbers of the weights are not part of the formula, and everyone chose for "
    "themselves. Classes of torch, Hugging Face, x-transformers and headwise are run as "
    "installed; these are written anew from their source: {written_anew}. Without biases: "
    "{without_biases}. With four equal matrices, until a model draws them anew, begins: "
    "{copies_of_one}.",
    caption="Each square is the largest difference between the outputs of two implementations, "
    "which are {typical_output:.1f} in size; grey where all bits agree. Above, all are "
    "filled with the same weights: nothing exceeds {largest_pair:sci}. Below, the same numbers "
    "are misread on purpose, as when weights are ported: every square is far beyond what is "
    "allowed, {allowed:sci}.",
    draw=draw,
    table=Table(
        columns=(
            "implementation",
            "a key marked True is",
            "a hidden score; a query without keys gets",
            "dropout falls on; its modules that are called",
            "axes of the weights given out",
            "in training these are",
            "besides attention, inside are",
            "standard deviation with which q, k, v, out begin",
        ),
        rows=tuple(conventions_of(key) for key in CODE),
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
            "share_of_blocks",
            "share_of_a_model",
            "largest_share_of_a_model",
            "bert_from_the_encoder",
        }
    ),
)
