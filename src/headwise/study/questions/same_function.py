"""Question: are eight heads of 64 and one head of 512 the same function?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.function import stages
from headwise.function.budget import Budget
from headwise.matrix.operator import AttentionMatrix
from headwise.study import drawing, encoder, measures
from headwise.study.drawing import INK, SERIES, SOFT, Figure, SubFigure
from headwise.study.measures import Projected, error_budget_ratios, name_cause
from headwise.study.question import Numbers, Progress, fill_template

EMBED_DIM, HEADS = 512, 8
BATCH, LENGTH = 2, 10
QUIET = 0.01  # a factor of x; with it, no row puts all its weight on one key
SEEDS = 200
COMPARED = 12  # seeds whose layers `headwise.compare` compares
SATURATED, OTHER_HEADS = "inconclusive: saturated", "number of heads"
DIGITS = 3  # of the mean score size
VARIES = {"beyond", "compared", "equal_maps", "said", "sum"}


class ConditionSample(NamedTuple):
    """The samples of one condition: BATCH sequences of each seed, and one shared ``wo``."""

    projected: Projected
    wo: Tensor


def measure(progress: Progress) -> dict[str, Any]:
    """Repeat the published check under four conditions, then merge a trained encoder's heads."""
    published, quiet = make_samples("rand", "rand", 1.0, QUIET)
    (normal,), (default,) = make_samples("randn", "randn", 1.0), make_samples("randn", "own", 1.0)
    (positive,) = make_samples("rand", "own", 1.0)
    conditions = {"published": published, "quiet": quiet, "normal": normal}
    conditions |= {"own": default, "positive": positive}
    checks, cases = {}, {}
    for name, sample in conditions.items():
        checks[name], cases[name] = check_samples(sample)
    example = next((seed for seed, equal in enumerate(checks["published"]["equal"]) if equal), 0)
    run = encoder.encoder_run(progress)
    layers = [compare_merged_head(call, run.num_heads) for call in run.calls]
    apart = [[round(x, 4) for x in layer["apart"]] for layer in layers]
    sums = [measures.score_sum_error(sample.projected, HEADS) for sample in (published, default)]
    return {
        "shape": [BATCH, LENGTH, EMBED_DIM],
        "heads": HEADS,
        "factor": QUIET,
        "cases": cases,
        # The mean entropy of a row of weights with several heads, in nats.
        "entropy": float(AttentionMatrix(*published.projected.split(HEADS)[:2]).entropy().mean()),
        "said": {name: count_seeds_by_check(by_seed) for name, by_seed in checks.items()},
        "compared": compare_published_check(HEADS, (BATCH, LENGTH, EMBED_DIM), COMPARED),
        "sum": max(*sums, *(layer["sum"] for layer in layers)),
        "beyond": {
            "own": least_error_budget_ratios(default),
            "positive": least_error_budget_ratios(positive),
            "encoder": min(min(layer["beyond"]) for layer in layers),
        },
        "encoder": {
            "layers": len(apart),
            "apart": apart,
            "least": min(map(min, apart)),
            "most": max(map(max, apart)),
            "model": run.model,
            "heads": run.num_heads,
        },
        "equal_maps": weight_maps(published, example),
        "maps": {"normal": weight_maps(normal, 0), "own": weight_maps(default, 0)},
    }


def make_samples(tokens: str, matrices: str, *factors: float) -> list[ConditionSample]:
    """Draw tokens and projections of each seed, as the published test does, for each factor of x.

    ``tokens`` and ``matrices`` are "rand" or "randn"; matrices may also be "own", torch's default
    initialisation. All seeds share one output projection, to save memory.
    """
    projections: list[list[Tensor]] = [[] for _ in factors]
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        if matrices == "own":
            weight = nn.MultiheadAttention(EMBED_DIM, HEADS).in_proj_weight.detach().mT
        else:
            parts = [getattr(torch, matrices)(EMBED_DIM, EMBED_DIM) for _ in range(3)]
            weight = torch.cat(parts, dim=1)
        x = getattr(torch, tokens)(BATCH, LENGTH, EMBED_DIM)
        for products, factor in zip(projections, factors, strict=True):
            products.append((factor * x) @ weight)
    torch.manual_seed(SEEDS)
    if matrices == "own":
        wo = nn.MultiheadAttention(EMBED_DIM, HEADS).out_proj.weight.detach().mT
    else:
        wo = getattr(torch, matrices)(EMBED_DIM, EMBED_DIM)
    return [
        ConditionSample(Projected(*torch.cat(each).chunk(3, dim=-1)), wo) for each in projections
    ]


def one_row_per_seed(rows: Tensor) -> Tensor:
    return rows.reshape(len(rows) // BATCH, -1)


def check_samples(sample: ConditionSample) -> tuple[dict[str, list[bool]], dict[str, float]]:
    """Check equality by ``==``, and the conditions that should explain it, for each seed.

    Also return means: over all rows of all heads, and for relative differences over the seeds.
    """
    projected, scores = sample.projected, sample.projected.scores(HEADS)
    merged, several = projected.outputs(1), projected.outputs(HEADS)
    single, favourites = projected.scores(1).argmax(-1), scores.argmax(-1)
    read = equals_value_of_top_key(several, projected.v, favourites)
    pairs = {"apart": (merged, several)}
    pairs["apart_projected"] = (merged @ sample.wo, several @ sample.wo)
    checks = {
        "equal": merged == several,
        "projected": torch.eq(*pairs["apart_projected"]),
        "one_key": torch.cat([read, equals_value_of_top_key(merged, projected.v, single)], dim=1),
        "same_key": favourites == single,
    }
    means = {
        "score": float(f"{scores.abs().mean():.{DIGITS}g}"),
        "one_key": float(read.float().mean()),
        "same_key": float(checks["same_key"].float().mean()),
    }
    for name, pair in pairs.items():
        means[name] = float(measures.relative_difference(*map(one_row_per_seed, pair)).mean())
    return {name: one_row_per_seed(rows).all(1).tolist() for name, rows in checks.items()}, means


def equals_value_of_top_key(outputs: Tensor, v: Tensor, favourites: Tensor) -> Tensor:
    """Return where a head's output equals, bit for bit, the value of its largest-scoring key.

    ``outputs`` and ``v`` are (batch, length, embed_dim), ``favourites`` and the result
    (batch, heads, queries).
    """
    heads = favourites.shape[1]
    values = stages.split_heads(v, heads=heads).take_along_dim(favourites[..., None], dim=2)
    return (stages.split_heads(outputs, heads=heads) == values).all(-1)


def count_seeds_by_check(checks: Mapping[str, list[bool]]) -> dict[str, int]:
    seeds = zip(checks["equal"], checks["one_key"], checks["same_key"], strict=True)
    unexplained = sum(equal and not (copies and same) for equal, copies, same in seeds)
    counts = {name: sum(by_seed) for name, by_seed in checks.items()}
    return counts | {"seeds": SEEDS, "unexplained": unexplained}


def compare_published_check(heads: int, shape: tuple[int, int, int], seeds: int) -> dict[str, Any]:
    """Compare layers of several heads and of one, as a published test does, for each seed.

    Tokens and projections come from torch.rand, and the output projection is the identity. The
    answers are counted for equal and for other outputs; one is for the inputs that headwise makes.
    """
    answers: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for seed in range(seeds):
        torch.manual_seed(seed)
        weight = torch.cat([torch.rand(shape[2], shape[2]) for _ in range(3)], dim=1)
        x = torch.rand(shape)
        several, single = (
            nn.MultiheadAttention(len(weight), count, batch_first=True, bias=False)
            for count in (heads, 1)
        )
        with torch.no_grad():
            for layer in (several, single):
                layer.in_proj_weight.copy_(weight.mT)
                layer.out_proj.weight.copy_(torch.eye(len(weight)))
            is_equal = torch.equal(several(x, x, x)[0], single(x, x, x)[0])
        answers[is_equal][name_cause(several, single, x)] += 1
    return {
        "seeds": seeds,
        "equal": answers[True].total(),
        "of_equal": dict(answers[True]),
        "of_others": dict(answers[False]),
        "elsewhere": name_cause(several, single),
    }


def least_error_budget_ratios(sample: ConditionSample) -> dict[str, float]:
    p = sample.projected
    budget = Budget.for_head_outputs(*p.split(HEADS))
    after = Budget.for_function(
        lambda q, k, v, wo: Projected(q, k, v).outputs(HEADS) @ wo, p.q, p.k, p.v, sample.wo
    )
    ratios = {
        "outputs": error_budget_ratios(stages.split_heads(p.outputs(1), heads=HEADS), budget),
        "projected": error_budget_ratios(p.outputs(1) @ sample.wo, after),
    }
    return {name: float(one_row_per_seed(x).amax(1).min()) for name, x in ratios.items()}


def compare_merged_head(call: encoder.AttentionCall, heads: int) -> dict[str, Any]:
    projected = Projected(*call.weights.project(call.x[:1]))
    merged, several = (
        stages.split_heads(projected.outputs(count), heads=heads) for count in (1, heads)
    )
    budget = Budget.for_head_outputs(*projected.split(heads))
    return {
        "apart": measures.relative_difference(merged[0], several[0]).tolist(),
        "beyond": error_budget_ratios(merged, budget).amax((0, 2, 3)).tolist(),
        "sum": measures.score_sum_error(projected, heads),
    }


def weight_maps(sample: ConditionSample, seed: int) -> list[list[list[float]]]:
    p = sample.projected
    first = Projected(*(x[seed * BATCH, None] for x in (p.q, p.k, p.v)))
    weights = torch.cat([first.weights(heads)[0] for heads in (1, HEADS)])
    return [measures.round_matrix(head, digits=4) for head in weights]


def facts(n: Numbers) -> dict[str, bool]:
    counts, beyond, compared = n["said"], n["beyond"], n["compared"]
    seeds = counts["published"]["seeds"]
    return {
        "scores": n["sum"] <= 1,
        "softmax": min(beyond[name]["outputs"] for name in ("own", "positive")) > 1,
        "published": (
            0 < counts["published"]["equal"] < seeds
            and not any(by_check["unexplained"] for by_check in counts.values())
        ),
        "conditions": (
            counts["quiet"]["same_key"] > 0
            and n["cases"]["normal"]["one_key"] > 0.5
            and counts["quiet"]["equal"] == counts["normal"]["equal"] == 0
        ),
        "projected": (
            0 < counts["published"]["projected"] < seeds
            and min(beyond[name]["projected"] for name in ("own", "positive")) > 1
        ),
        "encoder": beyond["encoder"] > 1,
        "compare": (
            [*compared["of_equal"]] == [SATURATED]
            and [*compared["of_others"], compared["elsewhere"]] == 2 * [OTHER_HEADS]
        ),
    }


def draw(figure: Figure, n: Numbers) -> None:
    figure.set_figheight(5.5)
    parts: Any = figure.subfigures(2, 1, height_ratios=(3.1, 2.4))
    draw_maps(parts[0], n)
    axes, run = parts[1].subplots(), n["encoder"]
    for layer, heads in enumerate(run["apart"]):
        spread = [layer + (head / max(len(heads) - 1, 1) - 0.5) / 2 for head in range(len(heads))]
        axes.plot(spread, heads, "o", markersize=4, color=SERIES[0])
    axes.set_xticks(range(run["layers"]), [f"layer {x}" for x in range(run["layers"])])
    axes.set_ylim(0)
    axes.yaxis.set_major_formatter(drawing.per_cent)
    title = f"{run['model']}: the same projections used as one head instead of {run['heads']}"
    drawing.style_axes(axes, title, ylabel="relative difference of\neach head's output")


def draw_maps(figure: SubFigure, n: Numbers) -> None:
    rows = {
        "published": "torch.rand",
        "normal": "torch.randn",
        "own": "default\ninitialisation,\ntokens from\ntorch.randn",
    }
    drawn = n["maps"] | {"published": n["equal_maps"]}
    ratios = [1, 0.2, *[1] * n["heads"]]
    grid = figure.subplots(len(rows), len(ratios), width_ratios=ratios)
    look: dict[str, Any] = {"xycoords": "axes fraction"}
    for row, (name, title) in zip(grid, rows.items(), strict=True):
        row[1].set_axis_off()
        for axes, weights in zip([row[0], *row[2:]], drawn[name], strict=True):
            image = drawing.draw_weight_map(axes, weights)
        row[0].set_ylabel(title, rotation=0, ha="right", va="center", color=INK)
        counts = n["said"][name]
        words = "equal in\n{equal} of {seeds} seeds;\non average\n{apart:percent} apart"
        words = fill_template(words, counts | n["cases"][name])
        colour = INK if counts["equal"] else SOFT
        drawing.label_point(row[-1], words, (1, 0.5), (8, 0), va="center", color=colour, **look)
    grid[0][0].set_title("one head")
    words = f"{n['heads']} heads with the same queries, keys and values"
    several = drawing.label_point(grid[0][2], words, (0, 1), (0, 6), **look)
    several.set_in_layout(False)  # the label is wider than its column
    bar = figure.colorbar(image, ax=grid, location="bottom", aspect=60, shrink=0.7, pad=0.04)
    bar.set_ticks(ticks := [0, 0.01, 0.1, 0.3, 1], labels=[f"{100 * x:g}\u00a0%" for x in ticks])
    bar.set_label("attention weight (square-root scale)")
    bar.outline.set_visible(False)
