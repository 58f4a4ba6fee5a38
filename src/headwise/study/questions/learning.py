"""Question: can heads learn different things, and is it an advantage?

The task: each token of a text holds a value (random numbers), its own name, and the name of
another token. Each token must predict two values: that of the token before it, and that of the
token it names. The model is one attention layer, so both values must pass through its heads.

One head returns one mean of the values, sum over j of p_j v_j, and each prediction is a linear map
of this mean. Suppose the p_j do not depend on the values, which are independent with variance 1.
Then the best map for the value of token a leaves the share 1 - p_a^2 / sum p_j^2 of its variance,
and for token b the share 1 - p_b^2 / sum p_j^2. The mean of both shares is at least a half for any
head_dim. A trained head may break the condition, because its queries and keys use the values too.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise.layers.attention import Attention
from headwise.study import drawing
from headwise.study.drawing import INK, SERIES, SOFT, Axes, Figure
from headwise.study.measures import count_parameters, round_matrix
from headwise.study.question import Numbers, Progress
from headwise.support.tracing import one_thread

LENGTH = 16  # tokens, and so names, of a text
VALUE = 16  # numbers of a token's value
EMBED_DIM = VALUE + 2 * LENGTH  # a value, a name, and the name of another
LOOKUPS = ("before", "named")
HALF = 0.5  # share of the error of two lookups that one mean leaves at least
BATCH, RATE = 16, 1e-2
HEADS = (1, 2, 4, 8)
WIDER = 4  # factor of the width of a single wide head
SEEDS, FEWER_SEEDS, FIRST_SEED = 5, 3, 1  # fewer for the additional layers
STEPS, POOLED, TEST = 200, 4, 1024  # a point of a curve is the mean of POOLED steps; texts
STANDARD_ERRORS = 4  # a larger difference is not chance
MAPPED = (1, 2, 4)  # heads of the layers whose maps are drawn
VARIES = {"blend", "closed", "curves", "ends", "looks", "luck", "maps", "own", "roles"}


class LabelledTexts(NamedTuple):
    """Tokens (value, own name, name of another token), and the values that they must predict.

    ``named`` is the position of the named token, never the token before. Token 0 predicts nothing.
    """

    x: Float[Tensor, "batch length embed_dim"]
    named: Int[Tensor, "batch length"]
    values: Float[Tensor, "batch later lookups value"]


def random_texts(batch: int) -> LabelledTexts:
    """Draw random texts. A prediction of 0 has error 1 for each lookup."""
    values = torch.randn(batch, LENGTH, VALUE)
    # Any token but the one before, by distance around a ring.
    named = (torch.arange(LENGTH) + torch.randint(LENGTH - 1, (batch, LENGTH))) % LENGTH
    names = LENGTH**0.5 * torch.eye(LENGTH)  # as large as the values
    x = torch.cat([values, names.expand(batch, -1, -1), names[named]], dim=-1)
    of_named = values.take_along_dim(named[..., None], dim=1)
    return LabelledTexts(x, named, torch.stack([values[:, :-1], of_named[:, 1:]], dim=2))


def make_layer(
    num_heads: int, *, lookups: int = len(LOOKUPS), head_dim: int | None = None
) -> Attention:
    return Attention(EMBED_DIM, num_heads, head_dim=head_dim, out_dim=lookups * VALUE)


def squared_errors_by_lookup(
    model: Attention, texts: LabelledTexts, *, gate: Float[Tensor, " heads"] | None = None
) -> Float[Tensor, "batch lookups"]:
    """Return the mean squared error of each text and lookup; a prediction of 0 has error 1."""
    predicted: Tensor = model(texts.x, gate=gate)[:, 1:].unflatten(-1, (-1, VALUE))
    return (predicted - texts.values[:, :, : predicted.shape[2]]).square().mean(dim=(1, 3))


def run_training_steps(model: Attention, *, steps: int) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    curve = []
    for _ in range(steps):
        error = squared_errors_by_lookup(model, random_texts(BATCH)).mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        schedule.step()
        curve.append(error.item())
    return curve


@torch.no_grad()
def lookup_weights(model: Attention, texts: LabelledTexts) -> Float[Tensor, "lookups heads"]:
    weights = model.matrix(texts.x).dense()
    on_named = weights.take_along_dim(texts.named[:, None, :, None], dim=-1)[:, :, 1:, 0]
    return torch.stack([weights.diagonal(-1, -2, -1).mean((0, 2)), on_named.mean((0, 2))])


class TrainingRun(NamedTuple):
    """A trained layer, its error at each step, and its final error for each text and lookup."""

    model: Attention
    curve: list[float]
    left: Tensor


@one_thread()
def measure(progress: Progress) -> dict[str, Any]:
    """Train layers that differ only in their number of heads, from several seeds."""
    test_texts = random_texts(TEST)
    jobs: dict[str, dict[str, int]] = {str(heads): {"num_heads": heads} for heads in HEADS}
    jobs["wide"] = {"num_heads": 1, "head_dim": WIDER * EMBED_DIM}
    jobs["one_lookup"] = {"num_heads": 1, "lookups": 1}
    runs = {}
    for count, (name, sizes) in enumerate(jobs.items()):
        progress("training layers", count, len(jobs))
        seeds = range(FIRST_SEED, FIRST_SEED + (SEEDS if name.isdigit() else FEWER_SEEDS))
        runs[name] = [train_layer(seed, test_texts, **sizes) for seed in seeds]
    return collect_numbers(runs, test_texts)


def train_layer(seed: int, texts: LabelledTexts, **sizes: int) -> TrainingRun:
    torch.manual_seed(seed)
    model = make_layer(**sizes)
    curve = run_training_steps(model, steps=STEPS)
    return TrainingRun(model, curve, squared_errors_by_lookup(model, texts).detach())


def collect_numbers(runs: dict[str, list[TrainingRun]], texts: LabelledTexts) -> dict[str, Any]:
    counts = [str(heads) for heads in HEADS]
    lucky = [run.left.mean(1).std() / len(run.left) ** 0.5 for run in (*runs["1"], *runs["wide"])]
    looks = {name: [lookup_weights(run.model, texts) for run in runs[name]] for name in counts}
    of_all = {name: torch.cat(looks[name], dim=1) for name in counts}
    return {
        "length": LENGTH,
        "heads": list(HEADS),
        "wider": WIDER,
        "seeds": SEEDS,
        "steps": STEPS,
        "half": HALF,
        "luck": STANDARD_ERRORS * float(max(lucky)),
        "parameters": {name: count_parameters(runs[name][0].model) for name in (*counts, "wide")},
        "ends": {k: summarize_errors([float(run.left.mean()) for run in runs[k]]) for k in runs},
        "at": [POOLED * (n + 0.5) for n in range(STEPS // POOLED)],
        "curves": {name: summarize_curves([run.curve for run in runs[name]]) for name in counts},
        "own": check_dedicated_heads(looks["2"]),
        "closed": errors_without_head([run.model for run in runs["2"]], looks["2"], texts),
        "looks": {
            name: [round_matrix(look.mT, digits=3) for look in looks[name]] for name in counts
        },
        "roles": {name: count_heads_preferring_each_lookup(look) for name, look in of_all.items()},
        "blend": {name: mean_weight_by_preference(look) for name, look in of_all.items()},
        # The maps of the first text.
        "maps": {
            name: [
                round_matrix(head, digits=3)
                for head in runs[name][0].model.matrix(texts.x[:1]).dense()[0]
            ]
            for name in map(str, MAPPED)
        },
    }


def summarize_errors(values: Sequence[float]) -> dict[str, float]:
    return {"best": min(values), "median": median(values), "worst": max(values)}


def summarize_curves(runs: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    pooled = [[fmean(run[n : n + POOLED]) for n in range(0, STEPS, POOLED)] for run in runs]
    points = [summarize_errors(point) for point in zip(*pooled, strict=True)]
    return {key: [float(f"{p[key]:.3g}") for p in points] for key in ("best", "median", "worst")}


def check_dedicated_heads(looks: Sequence[Tensor]) -> dict[str, Any]:
    best = [look.max(dim=1) for look in looks]
    is_apart = all(len(set(heads.indices.tolist())) == len(LOOKUPS) for heads in best)
    return {"apart": is_apart, "least": min(float(heads.values.min()) for heads in best)}


@torch.no_grad()
def errors_without_head(
    models: Sequence[Attention], looks: Sequence[Tensor], texts: LabelledTexts
) -> dict[str, float]:
    lost, others = [], []
    for model, look in zip(models, looks, strict=True):
        for lookup, head in enumerate(look.argmax(dim=1).tolist()):
            gate = (torch.arange(model.num_heads) != head).float()
            left = squared_errors_by_lookup(model, texts, gate=gate).mean(0).tolist()
            lost.append(left.pop(lookup))
            others += left
    return {"own": min(lost), "other": max(others)}


def count_heads_preferring_each_lookup(look: Tensor) -> dict[str, int]:
    return dict(zip(LOOKUPS, (look > look.flip(0)).sum(1).tolist(), strict=True))


def mean_weight_by_preference(look: Tensor) -> dict[str, float]:
    return {"more": float(look.amax(0).mean()), "less": float(look.amin(0).mean())}


def facts(n: Numbers) -> dict[str, bool]:
    ends, half = n["ends"], n["half"]
    return {
        "parameters": len({n["parameters"][str(heads)] for heads in n["heads"]}) == 1,
        "one-head": min(ends[k]["best"] for k in ("1", "wide")) >= half - n["luck"],
        "two-heads": ends["2"]["worst"] < half,
        "apart": n["own"]["apart"] and n["own"]["least"] > HALF,
        "switched-off": n["closed"]["other"] < half < n["closed"]["own"],
        "more-heads": all(
            ends[name]["worst"] < half and ends[name]["median"] > ends["2"]["median"]
            for name in ("4", "8")
        ),
        "one-lookup": ends["one_lookup"]["worst"] < half,
    }


FEW = {"1": "one head", "2": "two heads", "4": "four heads", "8": "eight heads"}
COLOURS = dict(zip(FEW, SERIES, strict=False))


def draw(figure: Figure, n: Numbers) -> None:
    figure.set_figheight(5.7)
    parts: Any = figure.subfigures(2, 1, height_ratios=(3.3, 2.3), hspace=0.0)
    left, right = parts[0].subplots(1, 2, width_ratios=(3, 2))
    _draw_curves(left, n)
    _draw_head_weights(right, n)
    _draw_maps(parts[1], n)


def _draw_curves(axes: Axes, n: Numbers) -> None:
    for name, colour in COLOURS.items():
        curve = n["curves"][name]
        axes.fill_between(n["at"], curve["best"], curve["worst"], color=colour, alpha=0.2, lw=0)
        axes.plot(n["at"], curve["median"], color=colour)
        end = (n["at"][-1], curve["median"][-1])
        drawing.label_point(axes, FEW[name], end, (6, 0), color=colour, va="center")
    axes.plot([0, n["steps"]], [n["half"]] * 2, color=INK, lw=0.8, ls=(0, (4, 3)))
    end = (n["steps"], n["half"])
    drawing.label_point(axes, "half of the error", end, (0, -7), ha="right", va="top", color=INK)
    axes.set(yscale="log", yticks=[10.0**-power for power in range(5)])
    axes.set(yticklabels=["100 %", "10 %", "1 %", "0.1 %", "0.01 %"])
    axes.set_ylim(top=2)
    axes.set(xlim=(0, 1.34 * n["steps"]), xticks=range(0, n["steps"] + 1, n["steps"] // 4))
    drawing.style_axes(axes, "Error during training", xlabel="training step", ylabel="error left")


def _draw_head_weights(axes: Axes, n: Numbers) -> None:
    axes.plot([0, 1], [1, 0], color=SOFT, lw=0.6, zorder=0)  # the two weights sum to 1
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
    heads = [(name, head) for name, maps in n["maps"].items() for head in range(len(maps))]
    # A narrow empty column separates the layers.
    columns = [part for pair in heads for part in ([None, pair] if pair[1] == 0 else [pair])][1:]
    widths = [0.2 if pair is None else 1.0 for pair in columns]
    maps = figure.subplots(1, len(columns), width_ratios=widths)
    for axes, pair in zip(maps, columns, strict=True):
        if pair is None:
            axes.set_axis_off()
            continue
        name, head = pair
        image = drawing.draw_weight_map(axes, n["maps"][name][head])
        # A small share is not shown as 0.
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
