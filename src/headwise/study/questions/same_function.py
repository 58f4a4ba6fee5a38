"""Are eight heads of 64 and one head of 512 the same function, given the same projections?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from headwise import reference
from headwise.attention_matrix import AttentionMatrix
from headwise.bundled_models.recorded_run import AttentionCall
from headwise.error_budget.budget import Budget
from headwise.study import trained_encoder
from headwise.study.charts import (
    INK,
    SERIES,
    SOFT,
    Figure,
    SubFigure,
    beside,
    plotted,
    weight_map,
)
from headwise.study.experiments.measures import (
    Projected,
    budget_of_scores,
    difference,
    excess,
    merged_scores,
    reads_one_key,
)
from headwise.study.question import Fact, FactTable, Numbers, Question, say
from headwise.support.progress import Progress

EMBED_DIM, HEADS = 512, 8
BATCH, LENGTH = 2, 10
QUIET = 0.01  # a factor of x with which no row gives all its weight to one key
SEEDS = 200
DIGITS = 3  # of the size of a score


@dataclass(frozen=True, eq=False)
class TrainedSample:
    """All seeds of one condition: BATCH sequences of each, and one ``wo`` for all of them."""

    projected: Projected
    wo: Tensor

    def by_seed(self, rows: Tensor) -> Tensor:
        """Put what belongs to one seed into one row."""
        return rows.reshape(len(rows) // BATCH, -1)


def measure(progress: Progress) -> dict[str, Any]:
    """Repeat the check under four conditions, then merge the heads of a trained encoder."""
    published, quiet = samples("rand", 1.0, QUIET)
    (normal,), (own,) = samples("randn", 1.0), samples("own", 1.0)
    conditions = {"published": published, "quiet": quiet, "normal": normal, "own": own}
    checks, cases = {}, {}
    for name, sample in conditions.items():
        checks[name], cases[name] = check(sample)
    example = next((seed for seed, equal in enumerate(checks["published"]["equal"]) if equal), 0)
    reading = trained_encoder.reading(progress)
    layers = [merge_heads(call, reading.num_heads) for call in reading.calls]
    apart = [[round(x, 4) for x in layer["apart"]] for layer in layers]
    sums = [sum_of_scores(sample.projected, HEADS) for sample in (published, own)]
    sums += [layer["sum"] for layer in layers]
    return {
        "shape": [BATCH, LENGTH, EMBED_DIM],
        "heads": HEADS,
        "factor": QUIET,
        "cases": cases,
        # The mean entropy of a row of the several heads, in nats.
        "entropy": float(AttentionMatrix(*published.projected.split(HEADS)[:2]).entropy().mean()),
        "said": {name: count(found) for name, found in checks.items()},
        "sum": max(sums),
        "beyond": beyond(own) | {"encoder": min(min(x["beyond"]) for x in layers)},
        "encoder": {
            "layers": len(apart),
            "apart": apart,
            "least": min(map(min, apart)),
            "most": max(map(max, apart)),
            "model": reading.model,
            "heads": reading.num_heads,
        },
        "equal_maps": maps(published, example),
        "maps": {"normal": maps(normal, 0), "own": maps(own, 0)},
    }


# ---- the check ---------------------------------------------------------------------------------


def samples(kind: str, *factors: float) -> list[TrainedSample]:
    """Tokens and projections of each seed, drawn as the asker did; a sample for each factor of x.

    ``kind`` is "rand", "randn", or "own": torch's own initialisation, with tokens from randn.
    """
    random = source_of(kind)
    found: list[list[Tensor]] = [[] for _ in factors]
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        if kind == "own":
            weight = nn.MultiheadAttention(EMBED_DIM, HEADS).in_proj_weight.detach().mT
        else:
            weight = torch.cat([random(EMBED_DIM, EMBED_DIM) for _ in range(3)], dim=1)
        x = random(BATCH, LENGTH, EMBED_DIM)
        for products, factor in zip(found, factors, strict=True):
            products.append((factor * x) @ weight)
    wo = output_projection(kind)
    return [TrainedSample(Projected(*torch.cat(each).chunk(3, dim=-1)), wo) for each in found]


def source_of(kind: str) -> Callable[..., Tensor]:
    """Where the tokens are drawn from, and all matrices that torch does not initialise."""
    return torch.rand if kind == "rand" else torch.randn


def output_projection(kind: str) -> Tensor:
    """One for all seeds, of the seed after the last: one for each would take much memory."""
    torch.manual_seed(SEEDS)
    if kind == "own":
        return nn.MultiheadAttention(EMBED_DIM, HEADS).out_proj.weight.detach().mT
    return source_of(kind)(EMBED_DIM, EMBED_DIM)


def check(sample: TrainedSample) -> tuple[dict[str, list[bool]], dict[str, float]]:
    """What each seed says, by ``==``, and whether what is taken for the reason is so in it.

    Then means over all rows of all heads; the relative differences are means over the seeds.
    """
    projected, scores = sample.projected, sample.projected.scores(HEADS)
    one, several = projected.outputs(1), projected.outputs(HEADS)
    single, favourites = projected.scores(1).argmax(-1), scores.argmax(-1)
    read = reads_one_key(several, projected.v, favourites)
    pairs = {"apart": (one, several), "apart_projected": (one @ sample.wo, several @ sample.wo)}
    found = {
        "equal": one == several,
        "projected": torch.eq(*pairs["apart_projected"]),
        "one_key": torch.cat([read, reads_one_key(one, projected.v, single)], dim=1),
        "same_key": favourites == single,
    }
    means = {
        "score": float(f"{scores.abs().mean():.{DIGITS}g}"),
        "one_key": float(read.float().mean()),
        "same_key": float(found["same_key"].float().mean()),
    } | {name: float(difference(*map(sample.by_seed, pair)).mean()) for name, pair in pairs.items()}
    return {name: sample.by_seed(rows).all(1).tolist() for name, rows in found.items()}, means


def count(found: Mapping[str, list[bool]]) -> dict[str, int]:
    """How many seeds say so, and how many are equal for another reason than the two."""
    seeds = zip(found["equal"], found["one_key"], found["same_key"], strict=True)
    unexplained = sum(equal and not (one and same) for equal, one, same in seeds)
    counts = {name: sum(said) for name, said in found.items()}
    return counts | {"seeds": SEEDS, "unexplained": unexplained}


# ---- the identity, and what rounding may do ------------------------------------------------------


def sum_of_scores(projected: Projected, heads: int) -> float:
    """How far the single head's scores are from the sum of the heads', in error budgets."""
    made = merged_scores(projected.scores(heads))
    return float(excess(made, budget_of_scores(projected)).max())


def beyond(sample: TrainedSample) -> dict[str, float]:
    """How far one head is from several, in error budgets: in the seed where that is least."""
    p = sample.projected
    budget = Budget.for_head_outputs(*p.split(HEADS))
    after = Budget.of(
        lambda q, k, v, wo: Projected(q, k, v).outputs(HEADS) @ wo, p.q, p.k, p.v, sample.wo
    )
    found = {
        "outputs": excess(reference.split_heads(p.outputs(1), heads=HEADS), budget),
        "projected": excess(p.outputs(1) @ sample.wo, after),
    }
    return {name: float(sample.by_seed(x).amax(1).min()) for name, x in found.items()}


def merge_heads(call: AttentionCall, heads: int) -> dict[str, Any]:
    """A layer's projections read by one head, against its own heads: on the text itself."""
    p = call.projections
    parts = linear(call.x[:1], p.in_proj_weight, p.in_proj_bias).chunk(3, dim=-1)
    projected = Projected(*parts)
    one, several = projected.outputs(1), projected.outputs(heads)
    pair = (reference.split_heads(x, heads=heads)[0] for x in (one, several))
    budget = Budget.for_head_outputs(*projected.split(heads))
    return {
        "apart": difference(*pair).tolist(),
        "beyond": excess(reference.split_heads(one, heads=heads), budget).amax((0, 2, 3)).tolist(),
        "sum": sum_of_scores(projected, heads),
    }


def maps(sample: TrainedSample, seed: int) -> list[list[list[float]]]:
    """The weights of the single head, then of each of the several, for one sequence."""
    p = sample.projected
    first = Projected(*(x[seed * BATCH, None] for x in (p.q, p.k, p.v)))
    weights = torch.cat([first.weights(heads)[0] for heads in (1, HEADS)])
    return [[[round(w, 4) for w in row] for row in head] for head in weights.tolist()]


# ---- the picture -------------------------------------------------------------------------------


def draw(figure: Figure, n: Numbers) -> None:
    """The maps of one head and of eight, and how much a trained encoder's heads change."""
    figure.set_figheight(5.5)
    parts: Any = figure.subfigures(2, 1, height_ratios=(3.1, 2.4))
    draw_maps(parts[0], n)
    draw_encoder(parts[1], n)


def draw_maps(figure: SubFigure, n: Numbers) -> None:
    """A row of maps for each way to draw tokens and matrices, and how often the outputs agree."""
    rows = {
        "published": "torch.rand",
        "normal": "torch.randn",
        "own": "default\ninitialisation",
    }
    drawn = n["maps"] | {"published": n["equal_maps"]}
    ratios = [1, 0.2, *[1] * n["heads"]]
    grid = figure.subplots(len(rows), len(ratios), width_ratios=ratios)
    for row, (name, title) in zip(grid, rows.items(), strict=True):
        row[1].set_axis_off()
        for axes, weights in zip([row[0], *row[2:]], drawn[name], strict=True):
            image = weight_map(axes, weights)
        row[0].set_ylabel(title, rotation=0, ha="right", va="center", color=INK)
        said = n["said"][name]
        words = "equal in\n{equal} of {seeds} seeds;\non average\n{apart:percent} apart"
        look = {"xycoords": "axes fraction", "va": "center"}
        look["color"] = INK if said["equal"] else SOFT
        beside(row[-1], say(words, said | n["cases"][name]), (1, 0.5), (8, 0), **look)
    grid[0][0].set_title("one head")
    words = f"{n['heads']} heads with the same queries, keys and values"
    several = beside(grid[0][2], words, (0, 1), (0, 6), xycoords="axes fraction")
    several.set_in_layout(False)  # wider than its column, which shall not grow with it
    bar = figure.colorbar(image, ax=grid, location="bottom", aspect=60, shrink=0.7, pad=0.04)
    bar.set_ticks(ticks := [0, 0.01, 0.1, 0.3, 1], labels=[f"{100 * x:g}\u00a0%" for x in ticks])
    bar.set_label("attention weight (square-root scale)")
    bar.outline.set_visible(False)


def draw_encoder(figure: SubFigure, n: Numbers) -> None:
    """How far each head of each layer is from its part of the merged head."""
    axes, encoder = figure.subplots(), n["encoder"]
    for layer, heads in enumerate(encoder["apart"]):
        spread = [layer + (place / max(len(heads) - 1, 1) - 0.5) / 2 for place in range(len(heads))]
        axes.plot(spread, heads, "o", markersize=4, color=SERIES[0])
    axes.set_xticks(range(encoder["layers"]), [f"layer {x}" for x in range(encoder["layers"])])
    axes.set_ylim(0)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f}\u00a0%")
    plotted(
        axes,
        f"{encoder['model']}, the same projections read as one head in place of {encoder['heads']}",
        ylabel="relative difference of\neach head's output",
    )


QUESTION = Question(
    id="same-function",
    asks="Are eight heads of 64 and one head of 512 the same function when the projections are "
    "the same?",
    claim="No. One head adds up the heads' scores and takes one softmax; several heads take one "
    "each. A test finds them equal only where every softmax picks a single key, the same in all "
    "heads.",
    measure=measure,
    facts=(
        Fact(
            "the single head's scores are the sum of the {heads} heads' scores, divided by the "
            "root of {heads}: the largest error is {sum:.2f} of the error budget",
            lambda n: n["sum"] <= 1,
        ),
        Fact(
            "one softmax of that sum is not {heads} softmaxes: with PyTorch's default "
            "initialisation the mean relative difference of the outputs is "
            "{cases[own][apart]:percent}, and in every seed at least {beyond[outputs]:,.0f} times "
            "the error budget",
            lambda n: n["beyond"]["outputs"] > 1,
        ),
        Fact(
            "with tokens and matrices from torch.rand the outputs are equal, by ==, in "
            "{said[published][equal]} of {said[published][seeds]} seeds, and in all of these every "
            "output is a copy of one key's value and every head picks the single head's key; the "
            "mean entropy of a row is {entropy:.4f} nats",
            lambda n: (
                0 < n["said"]["published"]["equal"] < n["said"]["published"]["seeds"]
                and not any(said["unexplained"] for said in n["said"].values())
            ),
        ),
        Fact(
            "both are needed: with the tokens times {factor} the heads pick the same keys in "
            "{said[quiet][same_key]} seeds, and with torch.randn "
            "{cases[normal][one_key]:percent} of the rows are on one key, yet {said[quiet][equal]} "
            "and {said[normal][equal]} of {said[normal][seeds]} seeds are equal",
            lambda n: (
                n["said"]["quiet"]["same_key"] > 0
                and n["cases"]["normal"]["one_key"] > 0.5
                and n["said"]["quiet"]["equal"] == n["said"]["normal"]["equal"] == 0
            ),
        ),
        Fact(
            "an output projection shared by both does not change this: after it "
            "{said[published][projected]} of {said[published][seeds]} seeds from torch.rand are "
            "equal, and with the default initialisation the mean relative difference is "
            "{cases[own][apart_projected]:percent}, in every seed at least "
            "{beyond[projected]:,.0f} times the error budget",
            lambda n: (
                0 < n["said"]["published"]["projected"] < n["said"]["published"]["seeds"]
                and n["beyond"]["projected"] > 1
            ),
        ),
        Fact(
            "read as one head, each of the {encoder[layers]} layers of {encoder[model]} returns "
            "something else in the place of every one of its heads: the relative difference is "
            "{encoder[least]:percent} to {encoder[most]:percent}, and at least "
            "{beyond[encoder]:,.0f} times the error budget",
            lambda n: n["beyond"]["encoder"] > 1,
        ),
    ),
    verdict="No: one head of {shape[2]} adds up the {heads} heads' scores before its only softmax, "
    "so with default initialisation the outputs differ by {cases[own][apart]:percent}; a test with "
    "torch.rand finds them equal ({said[published][equal]} of {said[published][seeds]} seeds) only "
    "where all heads pick the same single key.",
    why="Several heads can attend to different keys; one head has a single row of attention "
    "weights for each query. A test with torch.rand hides this, because all its numbers are "
    "positive: the scores are about {cases[published][score]:,.0f}, nearly every softmax gives all "
    "its weight to the largest, and in {cases[published][same_key]:percent} of the rows that is "
    "the single head's key. Where it is so in all rows, both return copies of the same values.",
    caption="Above: the attention weights of one head and of {heads} for one sequence; rows are "
    "queries, columns are keys. Beside them, how often the outputs are equal by ==, and their mean "
    "relative difference. The first row repeats a published test: tokens and matrices "
    "from torch.rand, no output projection; its maps are of a seed with equal outputs. All its "
    "numbers are positive, so scores are huge and the softmax picks a single key. A seed is "
    "{shape[0]} sequences of {shape[1]} tokens. Below: a trained encoder reads a text; a dot is a "
    "head, in order from left to right within its layer. Relative differences are over the norm "
    "of what several heads return.",
    draw=draw,
    table=FactTable(
        columns=(
            "tokens and matrices",
            "mean score size",
            "rows on one key",
            "same favourite key",
            "mean relative difference",
            "equal seeds",
        ),
        rows=tuple(
            (
                title,
                f"{{cases[{name}][score]:{size}}}",
                f"{{cases[{name}][one_key]:percent}}",
                f"{{cases[{name}][same_key]:percent}}",
                f"{{cases[{name}][apart]:percent}}",
                f"{{said[{name}][equal]}} of {{said[{name}][seeds]}}",
            )
            for name, title, size in (
                ("published", "torch.rand, as published", ",.0f"),
                ("quiet", "torch.rand, tokens times {factor}", ".1f"),
                ("normal", "torch.randn", ".0f"),
                ("own", "default initialisation", ".1f"),
            )
        ),
    ),
    varies=frozenset({"said", "sum", "beyond", "equal_maps"}),
)
