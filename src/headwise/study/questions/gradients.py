"""Where do the gradients of one head and of eight differ?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from headwise import reference
from headwise.layers.native.attention import Attention
from headwise.study.charts import INK, SERIES, SOFT, Axes, Figure, plotted
from headwise.study.experiments.gradient_formulas import (
    Pass,
    WeightGradients,
    rounding_bounds,
    weight_gradients,
)
from headwise.study.question import Fact, FactTable, Numbers, Question
from headwise.support.progress import Progress
from headwise.support.thread_count import one_thread

EMBED_DIM, COUNTS = 64, (1, 2, 8)  # numbers of heads; the last one is the "eight" of the words
BATCH, LENGTH = 2, 96  # more tokens than embed_dim, so that nothing else bounds the rank
LEARNING_RATE, STEPS = 0.05, (0, 1, *range(5, 101, 5))  # steps of the curve


@one_thread()  # small matrices
def measure(progress: Progress) -> dict[str, Any]:
    """Compare the gradients of layers with the same weights and other numbers of heads."""
    many, state = COUNTS[-1], start()
    x, upstream = tokens(), tokens()
    found, bounds, formulas = {}, {}, {}
    layers = {heads: layer_of(heads, state) for heads in COUNTS}
    for heads, layer in layers.items():
        weights, forward = weights_of(layer), passed(layer, x, upstream)
        gradients = torch.autograd.grad(layer(x), list(weights.values()), upstream)
        found[heads] = dict(zip(weights, gradients, strict=True))
        bounds[heads] = whole(rounding_bounds(forward))
        formulas[heads] = whole(weight_gradients(forward))
    pairs = {n: (found[1][n], found[many][n]) for n in WEIGHTS}
    return {
        "length": LENGTH,
        "many": many,
        "head_dim": {str(heads): EMBED_DIM // heads for heads in COUNTS},
        "formula_share": max(
            float(((found[heads][n] - formulas[heads][n]).abs() / bounds[heads][n]).max())
            for heads in COUNTS
            for n in WEIGHTS
        ),
        "formula_difference": max(
            max(apart(found[heads], formulas[heads]).values()) for heads in COUNTS
        ),
        "reach": {str(heads): reach(layers[heads], x, blocks=many) for heads in (1, many)},
        "ranks": ranks(layers, x),
        # How alike the gradients are, and how many times its rounding the least difference is.
        "cosine": {
            n: float(cosine_similarity(one.flatten(), other.flatten(), dim=0))
            for n, (one, other) in pairs.items()
        },
        "roundings": min(
            float((one - other).norm() / (bounds[1][n] + bounds[many][n]).norm())
            for n, (one, other) in pairs.items()
        ),
        **parting(state),
    }


def tokens() -> Tensor:
    """A batch of random numbers, as wide as the layer: tokens, or what they should become."""
    return torch.randn(BATCH, LENGTH, EMBED_DIM).double()


# ---- layers ----------------------------------------------------------------------------------


def start() -> dict[str, Tensor]:
    """The weights that all layers start from, as torch draws them, in float64."""
    layer = Attention(EMBED_DIM, COUNTS[-1], dtype=torch.float64)
    return {name: value.clone() for name, value in layer.state_dict().items()}


def layer_of(heads: int, state: Mapping[str, Tensor]) -> Attention:
    """A layer of so many heads with these weights."""
    layer = Attention(EMBED_DIM, heads, dtype=torch.float64)
    layer.load_state_dict(state)
    return layer


def weights_of(layer: Attention) -> dict[str, Tensor]:
    """The four weights by their names here."""
    projections = (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    return {name: part.weight for name, part in zip(WEIGHTS, projections, strict=True)}


@torch.no_grad()
def passed(layer: Attention, x: Tensor, upstream: Tensor) -> Pass:
    """What the formulas need to know of the layer's forward pass."""
    matrix = layer.matrix(x)
    v = reference.split_heads(layer.v_proj(x), heads=layer.num_heads)
    wo = layer.out_proj.weight.detach().unflatten(1, (layer.num_heads, -1)).movedim(1, 0)
    return Pass(x, x, matrix.q, matrix.k, v, wo, upstream)


def whole(of_heads: WeightGradients) -> dict[str, Tensor]:
    """The heads' gradients in the shapes of the layer's weights."""
    rows = [part.flatten(0, 1) for part in of_heads[:3]]
    return dict(zip(WEIGHTS, (*rows, of_heads.wo.movedim(0, 1).flatten(1)), strict=True))


# ---- what is measured ------------------------------------------------------------------------


def apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, float]:
    """The difference of each of the four, relative to the second."""
    return {n: float((ours[n] - theirs[n]).norm() / theirs[n].norm()) for n in WEIGHTS}


def scores_of(layer: Attention, x: Tensor) -> Tensor:
    """Return the scores (batch, heads, queries, keys) of a layer that reads ``x``."""
    matrix = layer.matrix(x)
    return reference.scores(matrix.q, matrix.k, scale=matrix.scale)


def reach(layer: Attention, x: Tensor, *, blocks: int) -> list[list[int]]:
    """Whether the scores of each head (rows) have a gradient in each part of the weights: 1 or 0.

    The parts are blocks of the rows of Wq, Wk and Wv, and of the columns of Wo, in this order.
    """
    weights, scores = weights_of(layer), scores_of(layer, x)
    lines = []
    for head in range(layer.num_heads):
        q, k, v, o = torch.autograd.grad(
            scores[:, head].square().sum(),
            list(weights.values()),
            retain_graph=True,
            materialize_grads=True,
        )
        parts = [block for part in (q, k, v, o.mT) for block in part.chunk(blocks)]
        lines.append([int(part.any()) for part in parts])
    return lines


@torch.no_grad()
def ranks(layers: Mapping[int, Attention], x: Tensor) -> dict[str, list[int]]:
    """The numerical rank of each head's scores over one text.

    A singular value counts if it exceeds length * eps * the largest: what numpy takes for nonzero.
    """
    found = {}
    for heads, layer in layers.items():
        values = torch.linalg.svdvals(scores_of(layer, x[:1])[0])
        counted = values > LENGTH * torch.finfo(values.dtype).eps * values[:, :1]
        found[str(heads)] = counted.sum(-1).tolist()
    return found


def parting(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Train with one head and with many, from the same weights, towards the same random targets.

    The distance of the weights is relative to those of many heads, and so is how far training has
    moved these in the end. To tell the distance from rounding, many heads are trained once more,
    from weights that are one rounding away.
    """
    x, target, many = tokens(), tokens(), COUNTS[-1]
    near = {name: value * (1 + torch.finfo(value.dtype).eps) for name, value in state.items()}
    one, reference, near_by = (
        trained(layer_of(heads, begun), x, target)
        for heads, begun in ((1, state), (many, state), (many, near))
    )
    distances = [apart(*pair) for pair in zip(one, reference, strict=True)]
    return {
        "steps": list(STEPS),
        "distance": {name: [distance[name] for distance in distances] for name in WEIGHTS},
        "moved": apart(reference[-1], reference[0]),
        "rounding": apart(near_by[-1], reference[-1]),
    }


def trained(layer: Attention, x: Tensor, target: Tensor) -> list[dict[str, Tensor]]:
    """The weights at the chosen steps of plain gradient descent on the squared error of a token."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=LEARNING_RATE)
    found = []
    for step in range(STEPS[-1] + 1):
        if step in STEPS:
            now = weights_of(layer).items()
            found.append({name: weight.detach().clone() for name, weight in now})
        optimizer.zero_grad()
        (layer(x) - target).square().sum(-1).mean().backward()
        optimizer.step()
    return found


def own_rows_alone(lines: list[list[int]], blocks: int) -> bool:
    """Whether exactly the head's own rows of Wq and Wk reach its scores, for each head."""
    own = blocks // len(lines)
    return all(
        line
        == [
            int(place // own % len(lines) == head and place < 2 * blocks)
            for place in range(4 * blocks)
        ]
        for head, line in enumerate(lines)
    )


# ---- the picture -------------------------------------------------------------------------------

WEIGHTS = {"q": "queries", "k": "keys", "v": "values", "o": "output"}


def draw(figure: Figure, n: Numbers) -> None:
    """Above: which weights reach which scores. Below: how alike gradients and weights are."""
    figure.set_figheight(6.4)
    parts: Any = figure.subfigures(2, 1, height_ratios=(1.35, 1), hspace=0.06)
    above, below = parts
    _draw_reach(above.subplots(), n)
    left, right = below.subplots(1, 2, width_ratios=(1, 1.25), gridspec_kw={"wspace": 0.12})
    _draw_cosines(left, n)
    _draw_distances(right, n)


def _draw_reach(axes: Axes, n: Numbers) -> None:
    """A square for each part of the weights and each head; coloured where there is a gradient."""
    many, gap = n["many"], 1.5
    lines = [*n["reach"]["1"], *n["reach"][str(many)]]
    heights = [0.0, *(row + 1.7 for row in range(many))]
    for line, y in zip(lines, heights, strict=True):
        for place, reached in enumerate(line):
            part = place // many
            look = {"color": SERIES[part]} if reached else {"color": SOFT, "alpha": 0.3}
            axes.bar(place + gap * part, 0.86, 0.86, y, align="edge", linewidth=0, **look)
    for part, (name, word) in enumerate(WEIGHTS.items()):
        x = part * (many + gap) + many / 2
        axes.text(x, -0.35, f"w{name} ({word})", ha="center", va="bottom", color=SERIES[part])
    axes.text(-0.6, 0.43, "scores of the only head", ha="right", va="center")
    for head in range(many):
        text = "scores of head 0" if head == 0 else f"head {head}"
        axes.text(-0.6, head + 2.13, text, ha="right", va="center", color=SOFT if head else INK)
    axes.set_title("What a head's scores (not the loss) depend on", loc="left")
    axes.set(xlim=(-11.4, len(lines[0]) + 3 * gap), ylim=(heights[-1] + 1, -1.4))
    axes.set_axis_off()


def _draw_cosines(axes: Axes, n: Numbers) -> None:
    """How alike the gradients of the loss are, a bar for each of the four."""
    names, cosines = [f"w{name}" for name in WEIGHTS], [n["cosine"][name] for name in WEIGHTS]
    bars = axes.bar(names, cosines, 0.6, color=SERIES[: len(WEIGHTS)])
    axes.bar_label(bars, [f"{cosine:.2f}" for cosine in cosines], padding=3, color=INK)
    title = f"Gradients of the loss:\none head against {n['many']}"
    plotted(axes, title, ylim=(0, 1), ylabel="cosine (the same: 1)")


def _draw_distances(axes: Axes, n: Numbers) -> None:
    """How far the weights of one head and of many are from each other over the steps."""
    last, top = n["steps"][-1], max(max(line) for line in n["distance"].values())
    place = -top
    for name, line in sorted(n["distance"].items(), key=lambda item: float(item[1][-1])):
        colour = SERIES[list(WEIGHTS).index(name)]
        place = max(line[-1] - 0.05 * top, place + 0.12 * top)  # labels of lines that end together
        axes.plot(n["steps"], line, color=colour)
        axes.plot([1.01 * last, 1.09 * last], [line[-1], place], color=colour, linewidth=0.8)
        axes.text(1.11 * last, place, f"w{name} {100 * line[-1]:.0f} %", color=colour, va="center")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    plotted(
        axes,
        f"Weights during training:\none head against {n['many']}",
        xlim=(0, 1.42 * last),
        xticks=[step for step in n["steps"] if step % 25 == 0],
        ylim=(0, 1.08 * top),
        xlabel="training step",
        ylabel="relative difference",
    )


QUESTION = Question(
    id="gradients",
    asks="Where do the gradients of one head and of many differ?",
    claim="In all four weight matrices, though the formulas are the same: the scores of a head "
    "depend on its own rows of wq and wk alone, and their rank is at most head_dim. So layers with "
    "equal weights differ from the first step of training.",
    measure=measure,
    facts=(
        Fact(
            "the closed formulas agree with autograd through headwise.Attention: the largest "
            "relative difference is {formula_difference:sci}, and nowhere is it more than "
            "{formula_share:sci} of what rounding allows",
            lambda n: n["formula_share"] <= 1,
        ),
        Fact(
            "the scores of each of {many} heads have a gradient in its own rows of wq and wk, and "
            "exactly zero in all other weights; those of a single head have one in all rows of "
            "both",
            lambda n: (
                own_rows_alone(n["reach"]["1"], n["many"])
                and own_rows_alone(n["reach"][str(n["many"])], n["many"])
            ),
        ),
        Fact(
            "over {length} tokens the scores have rank {ranks[1]:list} with one head, "
            "{ranks[2]:list} with two and {ranks[8]:list} with {many}: each time head_dim",
            lambda n: all(
                rank == n["head_dim"][heads]
                for heads, found in n["ranks"].items()
                for rank in found
            ),
        ),
        Fact(
            "for the same weights, input and gradient of the output, the gradients of one head and "
            "of {many} are least alike in wq and wk: their cosines are {cosine[q]:.2f} and "
            "{cosine[k]:.2f}, against {cosine[v]:.2f} in wv and {cosine[o]:.2f} in wo, and each "
            "difference is over {roundings:sci} times what rounding allows",
            lambda n: (
                n["roundings"] > 1
                and max(n["cosine"]["q"], n["cosine"]["k"])
                < min(n["cosine"]["v"], n["cosine"]["o"])
            ),
        ),
        Fact(
            "trained from the same weights, wq of one head and of {many} have a relative "
            "difference of {distance[q][1]:percent} after one step and {distance[q][-1]:percent} "
            "after {steps[-1]}, and the others likewise (from a start that differs in the last "
            "digit alone it is {rounding[q]:sci})",
            lambda n: all(
                distance[0] == 0 < distance[1] < distance[-1] and distance[1] > n["rounding"][name]
                for name, distance in n["distance"].items()
            ),
        ),
        Fact(
            "in the end wo differs most, and it has moved furthest: by {moved[o]:percent} of its "
            "size at the start, wq by {moved[q]:percent}",
            lambda n: (
                max(n["moved"], key=n["moved"].get) == "o"
                and max(n["distance"], key=lambda name: float(n["distance"][name][-1])) == "o"
            ),
        ),
    ),
    verdict="In all four weight matrices, in direction most in wq and wk: with one head a single "
    "softmax shapes the gradient of every row, with {many} each softmax shapes only its head's "
    "rows, and the two gradients' cosine is {cosine[q]:.2f} in wq but {cosine[v]:.2f} in wv.",
    why="wq and wk act through the scores alone; wv and wo act on the averages that the heads "
    "take, and differ less. Narrower heads also have simpler scores: over {length} tokens their "
    "rank is {ranks[1][0]} with one head, {ranks[2][0]} with two and {ranks[8][0]} with {many}, "
    "the head_dim. In the table's formulas x is the input, P a head's attention weights, o = P v "
    "its output, G the loss's gradient in the layer's output and dS that in the head's scores.",
    caption="Above: the columns are parts of the four weight matrices (of wq, wk and wv the rows "
    "that belong to one of {many} heads, of wo the columns). Coloured: the head's scores have a "
    "gradient there; grey: it is exactly zero. Below, left: the cosine between the gradients of "
    "the same loss in layers with one head and with {many} and equal weights. Right: both trained "
    "from these weights by gradient descent towards the same random targets, the difference "
    "relative to the weights with {many} heads. wo differs most there since training moves it "
    "furthest: by {moved[o]:percent} of its size at the start, wq by {moved[q]:percent}.",
    draw=draw,
    table=FactTable(
        columns=("matrix", "gradient per head", "cosine", "difference, first step", "last step"),
        rows=tuple(
            (
                f"w{name} ({word})",
                formula,
                f"{{cosine[{name}]:.2f}}",
                f"{{distance[{name}][1]:percent}}",
                f"{{distance[{name}][-1]:percent}}",
            )
            for (name, word), formula in zip(
                WEIGHTS.items(),
                ("scale × (dS k)ᵀ x", "scale × (dSᵀ q)ᵀ x", "(Pᵀ G wo)ᵀ x", "Gᵀ o"),
                strict=True,
            )
        ),
    ),
    varies=frozenset({"formula_share", "formula_difference", "roundings", "rounding"}),
)
