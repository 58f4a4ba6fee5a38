"""Can heads learn different things, and does it pay?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch

from headwise.layers.native.attention import Attention
from headwise.studies.drawing import (
    INK,
    SERIES,
    SOFT,
    Axes,
    Figure,
    SubFigure,
    beside,
    plotted,
    weight_map,
)
from headwise.studies.experiments import lookups
from headwise.studies.experiments.lookups import HALF, LOOKUPS, Texts
from headwise.studies.experiments.measures import parameters
from headwise.studies.question import Fact, Numbers, Question, Table
from headwise.support.progress import Progress
from headwise.support.threads import one_thread

HEADS = (1, 2, 4, 8)
WIDER = 4  # times as wide is a single head that is tried as well
SEEDS, FIRST_SEED = 5, 1
FEWER_SEEDS = 3  # for the layers that are tried besides
STEPS, POOLED = 200, 4  # a point of a curve is the mean of so many steps
TEST = 1024  # texts
STANDARD_ERRORS = 4  # beyond which a difference is not the luck of the test
MAPPED = (1, 2, 4)  # heads of the layers whose weights are shown


@dataclass(frozen=True, eq=False)
class Run:
    """A layer that was trained, its error at each step, and at the end for texts and lookups."""

    model: Attention
    curve: list[float]
    left: torch.Tensor

    @property
    def end(self) -> float:
        """The error at the end."""
        return float(self.left.mean())


def measure(progress: Progress) -> dict[str, Any]:
    """Train layers that differ in their number of heads alone, from several seeds."""
    with one_thread():
        given = lookups.texts(TEST)
        jobs: dict[str, dict[str, int]] = {str(heads): {"num_heads": heads} for heads in HEADS}
        jobs["wide"] = {"num_heads": 1, "head_dim": WIDER * lookups.EMBED_DIM}
        jobs["one_lookup"] = {"num_heads": 1, "lookups": 1}
        runs = {}
        for count, (name, sizes) in enumerate(jobs.items()):
            progress("training layers", count, len(jobs))
            seeds = range(SEEDS if name.isdigit() else FEWER_SEEDS)
            runs[name] = [train(FIRST_SEED + seed, given, **sizes) for seed in seeds]
        return numbers_of(runs, given)


def train(seed: int, given: Texts, **sizes: int) -> Run:
    """A layer from a seed, which also sees the same texts as all others from this seed."""
    torch.manual_seed(seed)
    model = lookups.layer(**sizes)
    curve = lookups.train(model, steps=STEPS)
    with torch.no_grad():
        return Run(model, curve, lookups.errors(model, given))


def numbers_of(runs: dict[str, list[Run]], given: Texts) -> dict[str, Any]:
    """What is shown of all the runs."""
    counts = [str(heads) for heads in HEADS]
    lucky = [run.left.mean(1).std() / len(run.left) ** 0.5 for run in (*runs["1"], *runs["wide"])]
    looks = {name: [lookups.attended(run.model, given) for run in runs[name]] for name in counts}
    return {
        "length": lookups.LENGTH,
        "heads": list(HEADS),
        "wider": WIDER,
        "seeds": SEEDS,
        "steps": STEPS,
        "half": HALF,
        "luck": STANDARD_ERRORS * float(max(lucky)),
        "parameters": {name: parameters(runs[name][0].model) for name in (*counts, "wide")},
        "ends": {name: spread([run.end for run in runs[name]]) for name in runs},
        "at": [POOLED * (n + 0.5) for n in range(STEPS // POOLED)],
        "curves": {name: curves([run.curve for run in runs[name]]) for name in counts},
        "own": own_share(looks["2"]),
        "closed": closed([run.model for run in runs["2"]], looks["2"], given),
        "looks": {name: [rounded(look.mT) for look in looks[name]] for name in counts},
        "roles": {name: roles(torch.cat(looks[name], dim=1)) for name in counts},
        "blend": {name: blend(torch.cat(looks[name], dim=1)) for name in counts},
        "maps": {str(heads): maps(runs[str(heads)][0].model, given) for heads in MAPPED},
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """The best, the median and the worst of the seeds."""
    return {"best": min(values), "median": median(values), "worst": max(values)}


def curves(runs: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """The median over the seeds, and their range, in pools of steps."""
    pooled = [[fmean(run[n : n + POOLED]) for n in range(0, STEPS, POOLED)] for run in runs]
    points = [spread(point) for point in zip(*pooled, strict=True)]
    return {key: [float(f"{p[key]:.3g}") for p in points] for key in ("best", "median", "worst")}


def own_share(looks: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Whether the lookups have heads of their own, and the least weight these put on them."""
    best = [look.max(dim=1) for look in looks]
    return {
        "apart": all(len(set(found.indices.tolist())) == len(LOOKUPS) for found in best),
        "least": min(float(found.values.min()) for found in best),
    }


@torch.no_grad()
def closed(
    models: Sequence[Attention], looks: Sequence[torch.Tensor], given: Texts
) -> dict[str, float]:
    """The error of each lookup without the head that attends to it, and without the other one."""
    own, others = [], []
    for model, look in zip(models, looks, strict=True):
        for lookup, head in enumerate(look.argmax(dim=1).tolist()):
            gate = (torch.arange(model.num_heads) != head).float()
            left = lookups.errors(model, given, gate=gate).mean(0).tolist()
            own.append(left.pop(lookup))
            others += left
    return {"own": min(own), "other": max(others)}


def roles(look: torch.Tensor) -> dict[str, int]:
    """How many heads put more weight on the one lookup than on the other."""
    return dict(zip(LOOKUPS, (look > look.flip(0)).sum(1).tolist(), strict=True))


def blend(look: torch.Tensor) -> dict[str, float]:
    """The mean weight of a head on the lookup it attends to more, and on the other one."""
    return {"more": float(look.amax(0).mean()), "less": float(look.amin(0).mean())}


@torch.no_grad()
def maps(model: Attention, given: Texts) -> list[list[list[float]]]:
    """What each head does with the first text."""
    return [rounded(head) for head in model.matrix(given.x[:1]).dense()[0]]


def rounded(values: torch.Tensor) -> list[list[float]]:
    """Rows of numbers to three decimals."""
    return [[round(value, 3) for value in row] for row in values.tolist()]


# ---- the picture -------------------------------------------------------------------------------

FEW = {1: "one head", 2: "two heads", 4: "four heads", 8: "eight heads"}


def draw(figure: Figure, n: Numbers) -> None:
    """Error over steps, where each head's weight goes, and the weights on one text."""
    figure.set_figheight(5.7)
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(3.3, 2.3), hspace=0.0)[
        :, 0
    ]
    left, right = above.subplots(1, 2, width_ratios=(3, 2))
    _draw_curves(left, n)
    _draw_looks(right, n)
    _draw_maps(below, n)


def _draw_curves(axes: Axes, n: Numbers) -> None:
    """The error of each number of heads, with its name at the end of the line."""
    for name, colour in _colours(n).items():
        curve = n["curves"][name]
        axes.fill_between(n["at"], curve["best"], curve["worst"], color=colour, alpha=0.2, lw=0)
        axes.plot(n["at"], curve["median"], color=colour)
        end = (n["at"][-1], curve["median"][-1])
        beside(axes, FEW[int(name)], end, (6, 0), color=colour, va="center")
    axes.plot([0, n["steps"]], [n["half"]] * 2, color=INK, lw=0.8, ls=(0, (4, 3)))
    end = (n["steps"], n["half"])
    beside(axes, "half of the error", end, (0, -7), ha="right", va="top", color=INK)
    axes.set_yscale("log")
    axes.set_ylim(top=2)
    axes.set_yticks(
        [10.0**-power for power in range(5)], ["100 %", "10 %", "1 %", "0.1 %", "0.01 %"]
    )
    plotted(
        axes,
        "Error during training",
        xlim=(0, 1.34 * n["steps"]),
        xticks=range(0, n["steps"] + 1, n["steps"] // 4),
        xlabel="training step",
        ylabel="error left",
    )


def _draw_looks(axes: Axes, n: Numbers) -> None:
    """One dot for every head: its weight on either token. The line is all of a head's weight."""
    axes.plot([0, 1], [1, 0], color=SOFT, lw=0.6, zorder=0)
    axes.text(
        0.57, 0.57, "nothing on other tokens", color=SOFT, rotation=-45, ha="center", va="center"
    )
    for name, colour in reversed(_colours(n).items()):
        points = [head for look in n["looks"][name] for head in look]
        axes.scatter(
            [before for before, _ in points],
            [named for _, named in points],
            color=colour,
            alpha=0.6,
        )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    axes.set(xlim=(-0.08, 1.08), ylim=(-0.08, 1.08), aspect="equal")
    axes.set(xlabel="on the token before", ylabel="on the named token")
    axes.set_title("Each head's attention weight", loc="left")


def _draw_maps(figure: SubFigure, n: Numbers) -> None:
    """The weights of the first seed's layers on one text, side by side."""
    gap = 0.2
    widths = [width for found in n["maps"].values() for width in (*(1.0 for _ in found), gap)][:-1]
    maps = figure.subplots(1, len(widths), width_ratios=widths)
    places = iter(maps)
    for name, found in n["maps"].items():
        for head, weights in enumerate(found):
            axes = next(places)
            image = weight_map(axes, weights)
            before, named = (_share(share) for share in n["looks"][name][0][head])
            axes.set_xlabel(f"before {before}\nnamed {named}", color=SOFT, size=9)
            if head == 0:
                axes.set_title(FEW[int(name)], color=_colours(n)[name], loc="left")
        if (space := next(places, None)) is not None:
            space.set_axis_off()
    bar = figure.colorbar(image, ax=maps, location="bottom", shrink=0.6, aspect=45)
    bar.set_ticks([0, 0.01, 0.1, 0.5, 1], labels=["0", "1 %", "10 %", "50 %", "100 %"], minor=False)
    bar.outline.set_visible(False)
    bar.set_label("attention weight, on a square-root scale")


def _share(value: float) -> str:
    """A share in per cent, which is not 0 unless it is."""
    return f"{100 * value:.0f} %" if value >= 0.01 else "< 1 %"


def _colours(n: Numbers) -> dict[str, str]:
    """The colour of each number of heads."""
    return {str(heads): colour for heads, colour in zip(n["heads"], SERIES, strict=False)}


QUESTION = Question(
    id="learning",
    asks="Can heads learn different things, and does it pay?",
    claim="Yes, where more than one thing must be looked up at once: two heads take one of two "
    "lookups each, a single head does not do both, and more than two heads do no better.",
    measure=measure,
    facts=(
        Fact(
            "layers with {heads:list} heads have the same number of parameters, {parameters[1]:,}",
            lambda n: len({n["parameters"][str(heads)] for heads in n["heads"]}) == 1,
        ),
        Fact(
            "one head did not get below half of the error, give or take the luck of the test: it "
            "left {ends[1][best]:.3f} in the best of {seeds} seeds, and a head {wider} times as "
            "wide ({parameters[wide]:,} parameters) {ends[wide][best]:.3f}",
            lambda n: min(n["ends"][k]["best"] for k in ("1", "wide")) >= n["half"] - n["luck"],
        ),
        Fact(
            "two heads got below half from every seed: {ends[2][worst]:percent} was left in the "
            "worst",
            lambda n: n["ends"]["2"]["worst"] < n["half"],
        ),
        Fact(
            "from every seed each of two heads took one lookup, and put more than half of its "
            "attention weight on it, at least {own[least]:percent}",
            lambda n: n["own"]["apart"] and n["own"]["least"] > HALF,
        ),
        Fact(
            "with one of two heads switched off, its lookup is lost (at least "
            "{closed[own]:percent} of the error is back) and the other is kept (at most "
            "{closed[other]:percent})",
            lambda n: n["closed"]["other"] < n["half"] < n["closed"]["own"],
        ),
        Fact(
            "four and eight heads got below half from every seed too, but left more than two "
            "did, by the median: {ends[4][median]:percent} and {ends[8][median]:percent} "
            "against {ends[2][median]:percent}",
            lambda n: all(
                n["ends"][name]["worst"] < n["half"]
                and n["ends"][name]["median"] > n["ends"]["2"]["median"]
                for name in ("4", "8")
            ),
        ),
        Fact(
            "where there was only one lookup to do, one head did it from every seed: "
            "{ends[one_lookup][worst]:percent} was left in the worst",
            lambda n: n["ends"]["one_lookup"]["worst"] < n["half"],
        ),
    ),
    verdict="Yes, on a small made-up task with two lookups: a head returns one average, and a "
    "single head did not get below half of the error, while two heads took one lookup each and "
    "left at most {ends[2][worst]:percent}; four and eight left more after {steps} steps.",
    why="An average of two values is neither of them. Where the attention weights do not depend on "
    "the values, one average can be proven to leave at least half of the error, however wide the "
    "head is. A trained head is free to let them depend on the values, but none got clearly lower, "
    "not even one {wider} times as wide. Two heads return two averages. Four and eight heads still "
    "have only two lookups: several take the same one, each with a narrower part of the value, and "
    "learn more slowly.",
    caption="The task: each of {length} tokens must fetch two values, that of the token before it "
    "and that of a token it names. Above, left: the error on a logarithmic scale, where predicting "
    "nothing leaves all of it; lines are the median and bands the range of {seeds} seeds. Right, "
    "in the same colours: each dot is a trained head, placed by the mean attention weight it puts "
    "on these two tokens. Most sit near a corner, with one lookup; single heads in between. "
    "Below: attention weights of one seed's layers on one text, a row for each query, with the "
    "head's mean over all texts; the line beside the diagonal is the token before.",
    draw=draw,
    table=Table(
        columns=(
            "layer",
            "error, best seed",
            "error, worst seed",
            "heads: token before",
            "heads: named token",
            "weight on it",
            "weight on other",
        ),
        rows=(
            *(
                (
                    FEW[heads],
                    f"{{ends[{heads}][best]:percent}}",
                    f"{{ends[{heads}][worst]:percent}}",
                    *(f"{{roles[{heads}][{lookup}]}}" for lookup in LOOKUPS),
                    *(f"{{blend[{heads}][{share}]:percent}}" for share in ("more", "less")),
                )
                for heads in HEADS
            ),
            *(
                (
                    layer,
                    f"{{ends[{name}][best]:percent}}",
                    f"{{ends[{name}][worst]:percent}}",
                    *("–" for _ in range(4)),
                )
                for name, layer in (("wide", "one wide head"), ("one_lookup", "one lookup to do"))
            ),
        ),
    ),
    varies=frozenset(
        {"luck", "ends", "curves", "own", "closed", "looks", "roles", "blend", "maps"}
    ),
)
