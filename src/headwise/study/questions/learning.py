"""Can heads learn different things, and does it pay?

The task: each token of a text holds a value (random numbers), its own name, and the name of another
token. Two values are predicted at each token: those of the token before and of the named token. The
model is one layer, so both values must come through its heads.

One head hands on one mean of the values, sum over j of p_j v_j, and each value told is a linear map
of it. Where the p_j do not depend on the values (of unit variance, unrelated), the best map for the
value of token a leaves the share 1 - p_a^2 / sum p_j^2 of its variance, and for that of token b
1 - p_b^2 / sum p_j^2. The mean of both is at least a half, however wide the head is. A trained
head need not meet the condition: queries and keys are made of the whole token, its value too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise.layers.native.attention import Attention
from headwise.study.charts import INK, SERIES, SOFT, Axes, Figure, beside, plotted, weight_map
from headwise.study.experiments.measures import parameters
from headwise.study.question import Fact, FactTable, Numbers, Question
from headwise.support.progress import Progress
from headwise.support.thread_count import one_thread

LENGTH = 16  # tokens of a text, and so names
VALUE = 16  # numbers of a token's value
EMBED_DIM = VALUE + 2 * LENGTH  # a value, a name, and the name of another
LOOKUPS = ("before", "named")
HALF = 0.5  # of the error of two lookups: the least that one such mean leaves
BATCH, RATE = 16, 1e-2
HEADS = (1, 2, 4, 8)
WIDER = 4  # times as wide is a single head that is tried as well
SEEDS, FEWER_SEEDS, FIRST_SEED = 5, 3, 1  # fewer for the layers that are tried besides
STEPS, POOLED, TEST = 200, 4, 1024  # a point of a curve is the mean of POOLED steps; texts
STANDARD_ERRORS = 4  # beyond which a difference is not the luck of the test
MAPPED = (1, 2, 4)  # heads of the layers whose weights are shown


@dataclass(frozen=True, eq=False)
class LabelledTexts:
    """Tokens, and what must be told at each.

    Each of ``x`` is a value, an own name, and the name of another; ``named`` is the place of that
    one, never the token before. The first token, which has none before it, is told nothing.
    """

    x: Float[Tensor, "batch length embed_dim"]
    named: Int[Tensor, "batch length"]
    values: Float[Tensor, "batch later lookups value"]


def texts(batch: int) -> LabelledTexts:
    """Random texts. The error of telling nothing is 1, for each lookup."""
    values = torch.randn(batch, LENGTH, VALUE)
    # Any token but the one before, which is the last of a ring.
    named = (torch.arange(LENGTH) + torch.randint(LENGTH - 1, (batch, LENGTH))) % LENGTH
    names = LENGTH**0.5 * torch.eye(LENGTH)  # as large as the values
    x = torch.cat([values, names.expand(batch, -1, -1), names[named]], dim=-1)
    of_named = values.take_along_dim(named[..., None], dim=1)
    return LabelledTexts(x, named, torch.stack([values[:, :-1], of_named[:, 1:]], dim=2))


def layer(num_heads: int, *, lookups: int = len(LOOKUPS), head_dim: int | None = None) -> Attention:
    """One attention layer, whose output is the values of the first so many lookups."""
    return Attention(EMBED_DIM, num_heads, head_dim=head_dim, out_dim=lookups * VALUE)


def errors(
    model: Attention, given: LabelledTexts, *, gate: Float[Tensor, " heads"] | None = None
) -> Float[Tensor, "batch lookups"]:
    """The mean squared error of each text and lookup: 1 is that of telling nothing, 0 is right."""
    told: Tensor = model(given.x, gate=gate)[:, 1:].unflatten(-1, (-1, VALUE))
    return (told - given.values[:, :, : told.shape[2]]).square().mean(dim=(1, 3))


def train(model: Attention, *, steps: int) -> list[float]:
    """Adam on new texts at every step, at a rate that falls to 0; the error at each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    found = []
    for _ in range(steps):
        error = errors(model, texts(BATCH)).mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        schedule.step()
        found.append(error.item())
    return found


@torch.no_grad()
def attended(model: Attention, given: LabelledTexts) -> Float[Tensor, "lookups heads"]:
    """The mean weight that each head puts on the token that each lookup is about."""
    weights = model.matrix(given.x).dense()
    on_named = weights.take_along_dim(given.named[:, None, :, None], dim=-1)[:, :, 1:, 0]
    return torch.stack([weights.diagonal(-1, -2, -1).mean((0, 2)), on_named.mean((0, 2))])


@dataclass(frozen=True, eq=False)
class TrainingRun:
    """A layer that was trained, its error at each step, and at the end for texts and lookups."""

    model: Attention
    curve: list[float]
    left: Tensor


@one_thread()
def measure(progress: Progress) -> dict[str, Any]:
    """Train layers that differ in their number of heads alone, from several seeds."""
    given = texts(TEST)
    jobs: dict[str, dict[str, int]] = {str(heads): {"num_heads": heads} for heads in HEADS}
    jobs["wide"] = {"num_heads": 1, "head_dim": WIDER * EMBED_DIM}
    jobs["one_lookup"] = {"num_heads": 1, "lookups": 1}
    runs = {}
    for count, (name, sizes) in enumerate(jobs.items()):
        progress("training layers", count, len(jobs))
        seeds = range(FIRST_SEED, FIRST_SEED + (SEEDS if name.isdigit() else FEWER_SEEDS))
        runs[name] = [trained(seed, given, **sizes) for seed in seeds]
    return numbers_of(runs, given)


def trained(seed: int, given: LabelledTexts, **sizes: int) -> TrainingRun:
    """A layer from a seed, which also sees the same texts as all others from this seed."""
    torch.manual_seed(seed)
    model = layer(**sizes)
    curve = train(model, steps=STEPS)
    return TrainingRun(model, curve, errors(model, given).detach())


def numbers_of(runs: dict[str, list[TrainingRun]], given: LabelledTexts) -> dict[str, Any]:
    """Return the numbers of the question from the trained layers and the test texts."""
    counts = [str(heads) for heads in HEADS]
    lucky = [run.left.mean(1).std() / len(run.left) ** 0.5 for run in (*runs["1"], *runs["wide"])]
    looks = {name: [attended(run.model, given) for run in runs[name]] for name in counts}
    of_all = {name: torch.cat(looks[name], dim=1) for name in counts}
    return {
        "length": LENGTH,
        "heads": list(HEADS),
        "wider": WIDER,
        "seeds": SEEDS,
        "steps": STEPS,
        "half": HALF,
        "luck": STANDARD_ERRORS * float(max(lucky)),
        "parameters": {name: parameters(runs[name][0].model) for name in (*counts, "wide")},
        "ends": {name: spread([float(run.left.mean()) for run in runs[name]]) for name in runs},
        "at": [POOLED * (n + 0.5) for n in range(STEPS // POOLED)],
        "curves": {name: curves([run.curve for run in runs[name]]) for name in counts},
        "own": own_share(looks["2"]),
        "closed": closed([run.model for run in runs["2"]], looks["2"], given),
        "looks": {name: [rounded(look.mT) for look in looks[name]] for name in counts},
        "roles": {name: roles(look) for name, look in of_all.items()},
        "blend": {name: blend(look) for name, look in of_all.items()},
        # What each head does with the first text.
        "maps": {
            name: [rounded(head) for head in runs[name][0].model.matrix(given.x[:1]).dense()[0]]
            for name in map(str, MAPPED)
        },
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the least, the median and the largest error."""
    return {"best": min(values), "median": median(values), "worst": max(values)}


def curves(runs: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """The median over the seeds, and their range, in pools of steps."""
    pooled = [[fmean(run[n : n + POOLED]) for n in range(0, STEPS, POOLED)] for run in runs]
    points = [spread(point) for point in zip(*pooled, strict=True)]
    return {key: [float(f"{p[key]:.3g}") for p in points] for key in ("best", "median", "worst")}


def own_share(looks: Sequence[Tensor]) -> dict[str, Any]:
    """Whether the lookups have heads of their own, and the least weight these put on them."""
    best = [look.max(dim=1) for look in looks]
    return {
        "apart": all(len(set(found.indices.tolist())) == len(LOOKUPS) for found in best),
        "least": min(float(found.values.min()) for found in best),
    }


@torch.no_grad()
def closed(
    models: Sequence[Attention], looks: Sequence[Tensor], given: LabelledTexts
) -> dict[str, float]:
    """The error of each lookup without the head that attends to it, and without the other one."""
    own, others = [], []
    for model, look in zip(models, looks, strict=True):
        for lookup, head in enumerate(look.argmax(dim=1).tolist()):
            gate = (torch.arange(model.num_heads) != head).float()
            left = errors(model, given, gate=gate).mean(0).tolist()
            own.append(left.pop(lookup))
            others += left
    return {"own": min(own), "other": max(others)}


def roles(look: Tensor) -> dict[str, int]:
    """How many heads put more weight on the one lookup than on the other."""
    return dict(zip(LOOKUPS, (look > look.flip(0)).sum(1).tolist(), strict=True))


def blend(look: Tensor) -> dict[str, float]:
    """The mean weight of a head on the lookup it attends to more, and on the other one."""
    return {"more": float(look.amax(0).mean()), "less": float(look.amin(0).mean())}


def rounded(values: Tensor) -> list[list[float]]:
    """Return a matrix as lists of numbers with three decimals."""
    return [[round(value, 3) for value in row] for row in values.tolist()]


# ---- the picture -------------------------------------------------------------------------------

FEW = {"1": "one head", "2": "two heads", "4": "four heads", "8": "eight heads"}
COLOURS = dict(zip(FEW, SERIES, strict=False))


def draw(figure: Figure, n: Numbers) -> None:
    """Draw the training curves, the weights on the two tokens, and maps of the heads."""
    figure.set_figheight(5.7)
    parts: Any = figure.subfigures(2, 1, height_ratios=(3.3, 2.3), hspace=0.0)
    left, right = parts[0].subplots(1, 2, width_ratios=(3, 2))
    _draw_curves(left, n)
    _draw_looks(right, n)
    _draw_maps(parts[1], n)


def _draw_curves(axes: Axes, n: Numbers) -> None:
    for name, colour in COLOURS.items():
        curve = n["curves"][name]
        axes.fill_between(n["at"], curve["best"], curve["worst"], color=colour, alpha=0.2, lw=0)
        axes.plot(n["at"], curve["median"], color=colour)
        end = (n["at"][-1], curve["median"][-1])
        beside(axes, FEW[name], end, (6, 0), color=colour, va="center")
    axes.plot([0, n["steps"]], [n["half"]] * 2, color=INK, lw=0.8, ls=(0, (4, 3)))
    end = (n["steps"], n["half"])
    beside(axes, "half of the error", end, (0, -7), ha="right", va="top", color=INK)
    axes.set(yscale="log", yticks=[10.0**-power for power in range(5)])
    axes.set(yticklabels=["100 %", "10 %", "1 %", "0.1 %", "0.01 %"])
    axes.set_ylim(top=2)
    plotted(
        axes,
        "Error during training",
        xlim=(0, 1.34 * n["steps"]),
        xticks=range(0, n["steps"] + 1, n["steps"] // 4),
        xlabel="training step",
        ylabel="error left",
    )


def _draw_looks(axes: Axes, n: Numbers) -> None:
    axes.plot([0, 1], [1, 0], color=SOFT, lw=0.6, zorder=0)  # all of a head's weight
    look: dict[str, Any] = {"rotation": -45, "ha": "center", "va": "center"}
    axes.text(0.57, 0.57, "nothing on other tokens", color=SOFT, **look)
    for name, colour in reversed(COLOURS.items()):
        before, named = zip(*(head for look in n["looks"][name] for head in look), strict=True)
        axes.scatter(before, named, color=colour, alpha=0.6)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    axes.set(xlim=(-0.08, 1.08), ylim=(-0.08, 1.08), aspect="equal")
    axes.set(xlabel="on the token before", ylabel="on the named token")
    axes.set_title("Each head's attention weight", loc="left")


def _draw_maps(figure: Any, n: Numbers) -> None:
    heads = [(name, head) for name, found in n["maps"].items() for head in range(len(found))]
    # A narrow column without a map sets a layer apart from the next one.
    columns = [part for pair in heads for part in ([None, pair] if pair[1] == 0 else [pair])][1:]
    widths = [0.2 if pair is None else 1.0 for pair in columns]
    maps = figure.subplots(1, len(columns), width_ratios=widths)
    for axes, pair in zip(maps, columns, strict=True):
        if pair is None:
            axes.set_axis_off()
            continue
        name, head = pair
        image = weight_map(axes, n["maps"][name][head])
        # A share is not shown as 0 unless it is.
        before, named = (
            f"{100 * share:.0f} %" if share >= 0.01 else "< 1 %"
            for share in n["looks"][name][0][head]
        )
        axes.set_xlabel(f"before {before}\nnamed {named}", color=SOFT, size=9)
        if head == 0:
            axes.set_title(FEW[name], color=COLOURS[name], loc="left")
    bar = figure.colorbar(image, ax=maps, location="bottom", shrink=0.6, aspect=45)
    bar.set_ticks([0, 0.01, 0.1, 0.5, 1], labels=["0", "1 %", "10 %", "50 %", "100 %"])
    bar.outline.set_visible(False)
    bar.set_label("attention weight, on a square-root scale")


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
    table=FactTable(
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
                    words,
                    f"{{ends[{heads}][best]:percent}}",
                    f"{{ends[{heads}][worst]:percent}}",
                    *(f"{{roles[{heads}][{lookup}]}}" for lookup in LOOKUPS),
                    *(f"{{blend[{heads}][{share}]:percent}}" for share in ("more", "less")),
                )
                for heads, words in FEW.items()
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
