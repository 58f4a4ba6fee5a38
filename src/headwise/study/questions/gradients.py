"""Question: where do the gradients of one head and of many differ?

A head computes, with W as torch stores it (a row for each output):

    q = x Wq.T    k = x Wk.T    v = x Wv.T    P = softmax(scale * q k.T)    o = P v

and the output is the sum of o Wo.T over the heads, with any biases. Let G = dL/doutput be the
gradient of the loss. Then, summed over the batch,

    dL/dWo = G.T o
    dL/dWv = (P.T dO).T x                        dO = G Wo
    dL/dWq = scale * (dS k).T x                  dP = dO v.T
    dL/dWk = scale * (dS.T q).T x                dS = P * (dP - rowsum(P * dP))

dP is the gradient of the weights, and dS that of the scores. The step from dP to dS is the
softmax's: the derivative of weight p_j by score s_i is p_j * ((i == j) - p_i), so a score's
gradient depends on how far its key exceeds the average of dP over the row. All other steps are
matrix products. Only G depends on the other heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from headwise.function import rounding, stages
from headwise.function.budget import Budget
from headwise.layers.attention import Attention
from headwise.study import measures
from headwise.study.drawing import INK, SERIES, SOFT, Axes, Figure, style_axes
from headwise.study.implementations import SharedWeights
from headwise.study.question import Numbers, Progress
from headwise.support.tracing import one_thread

EMBED_DIM, COUNTS = 64, (1, 2, 8)  # numbers of heads; the last is "many"
BATCH, LENGTH = 2, 96  # LENGTH > EMBED_DIM, so that only head_dim bounds the rank
LEARNING_RATE, STEPS = 0.05, (0, 1, *range(5, 101, 5))  # steps of the curve
VARIES = {"formula_difference", "formula_share", "merged", "rounding", "roundings", "softmax_share"}


@one_thread()  # small matrices
def measure(progress: Progress) -> dict[str, Any]:
    """Compare the gradients of layers with equal weights and different numbers of heads."""
    many, state = COUNTS[-1], initial_weights()
    x, upstream = random_tokens(), random_tokens()
    layers = {heads: make_layer(heads, state) for heads in COUNTS}
    shared = SharedWeights.of_linears(*projections(layers[many]))
    tensors = [tensor.detach() for tensor in shared.tensors]
    gradients, budgets = {}, {}
    for heads, layer in layers.items():
        weights = [projection.weight for projection in projections(layer)]
        gradients[heads] = torch.stack(torch.autograd.grad(layer(x), weights, upstream))
        formula = partial(projection_gradients, heads=heads)
        budgets[heads] = Budget.for_function(
            formula, x, upstream, *tensors, factor=rounding.BACKWARD
        )
    single, other = gradients[1].flatten(1), gradients[many].flatten(1)
    allowed = (budgets[1].allowed + budgets[many].allowed).flatten(1)
    return {
        "length": LENGTH,
        "many": many,
        "head_dim": {str(heads): EMBED_DIM // heads for heads in COUNTS},
        "formula_share": max(budgets[heads].check(gradients[heads]).ratio for heads in COUNTS),
        "formula_difference": max(
            float(measures.relative_difference(gradients[heads], budgets[heads].exact).max())
            for heads in COUNTS
        ),
        **compare_softmax_steps(tensors, x, upstream, many),
        "reach": {
            str(heads): score_gradient_pattern(layers[heads], x, blocks=many) for heads in (1, many)
        },
        "ranks": score_ranks(layers, x),
        # Similarity of the gradients, and the least difference over both error budgets.
        "cosine": dict(zip(WEIGHTS, cosine_similarity(single, other).tolist(), strict=True)),
        "roundings": float(((single - other).norm(dim=1) / allowed.norm(dim=1)).min()),
        **compare_training_by_head_count(state),
    }


def random_tokens() -> Tensor:
    return torch.randn(BATCH, LENGTH, EMBED_DIM)


def initial_weights() -> dict[str, Tensor]:
    layer = Attention(EMBED_DIM, COUNTS[-1])
    return {name: value.clone() for name, value in layer.state_dict().items()}


def make_layer(heads: int, state: Mapping[str, Tensor]) -> Attention:
    layer = Attention(EMBED_DIM, heads)
    layer.load_state_dict(state)
    return layer


def projections(layer: Attention) -> tuple[Any, ...]:
    """Return the four projections in the order of `WEIGHTS`."""
    return layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj


def softmax_gradient(weights: Tensor, of_weights: Tensor) -> Tensor:
    """Compute dS = P * (dP - rowsum(P * dP)) from P, the weights, and dP, their gradient."""
    return weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))


def projection_gradients(x: Tensor, upstream: Tensor, *tensors: Tensor, heads: int) -> Tensor:
    """Compute dL/dW of the four projections of a layer, by the formulas of this module.

    ``tensors`` are `SharedWeights.tensors`; the result is (4, embed_dim, embed_dim).
    """
    weights = SharedWeights.of_matrices(tensors[:4], tensors[4:])
    q, k, v = measures.Projected(*weights.project(x)).split(heads)
    scale, attended = stages.default_scale(q), stages.weights(q, k)
    of_outputs = stages.split_heads(upstream @ weights.out, heads=heads)
    of_scores = softmax_gradient(attended, of_outputs @ v.mT)
    pairs = (
        (scale * of_scores @ k, x),
        (scale * of_scores.mT @ q, x),
        (attended.mT @ of_outputs, x),
    )
    sums = [_sum_over_tokens(stages.merge_heads(gradient), tokens) for gradient, tokens in pairs]
    return torch.stack([*sums, _sum_over_tokens(upstream, stages.merge_heads(attended @ v))])


def _sum_over_tokens(gradient: Tensor, tokens: Tensor) -> Tensor:
    return gradient.flatten(0, 1).mT @ tokens.flatten(0, 1)


def compare_softmax_steps(
    tensors: list[Tensor], x: Tensor, upstream: Tensor, many: int
) -> dict[str, Any]:
    """Compare the softmax's step of a single head with that of many heads, added up over the heads.

    The sum of scores is divided by the root of the number of heads. "scores", "dP" and "dS" are
    the largest differences, in error budgets; "apart" is the relative difference of dS.
    """
    weights = SharedWeights.of_matrices(tensors[:4], tensors[4:])
    projected = measures.Projected(*weights.project(x))
    of_outputs, budgets, of_scores = upstream @ weights.out, {}, {}
    for heads in (1, many):
        q, k, v = projected.split(heads)
        gradient = stages.split_heads(of_outputs, heads=heads)
        budgets[heads] = Budget.for_gradients(
            q, k, v, grad_output=gradient, bias_gradient=lambda of_scores: of_scores
        )["score_bias"]
        of_scores[heads] = softmax_gradient(stages.weights(q, k), gradient @ v.mT)
    gap = of_scores[1] - of_scores[many].sum(1, keepdim=True)
    allowed = budgets[1].allowed + budgets[many].allowed.sum(1, keepdim=True)
    # Products like those of q and k: dP over the root of embed_dim.
    of_weights = measures.Projected(of_outputs, projected.v, projected.v)
    return {
        "softmax_share": max(budgets[h].check(of_scores[h]).ratio for h in (1, many)),
        "merged": {
            "scores": measures.score_sum_error(projected, many),
            "dP": measures.score_sum_error(of_weights, many),
            "dS": float((gap.abs() / allowed).max()),
            "apart": float(gap.norm() / of_scores[1].norm()),
        },
    }


def relative_differences(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> dict[str, float]:
    return {n: float((ours[n] - theirs[n]).norm() / theirs[n].norm()) for n in WEIGHTS}


def layer_scores(layer: Attention, x: Tensor) -> Tensor:
    matrix = layer.matrix(x)
    return stages.scores(matrix.q, matrix.k, scale=matrix.scale)


def score_gradient_pattern(layer: Attention, x: Tensor, *, blocks: int) -> list[list[int]]:
    """Return 1 if the scores of a head (rows) have a gradient in a part of the weights, else 0.

    The parts are blocks of the rows of Wq, Wk and Wv, and of the columns of Wo, in this order.
    """
    weights = [projection.weight for projection in projections(layer)]
    scores = layer_scores(layer, x)
    lines = []
    for head in range(layer.num_heads):
        squares = scores[:, head].square().sum()
        q, k, v, o = torch.autograd.grad(
            squares, weights, retain_graph=True, materialize_grads=True
        )
        parts = [block for part in (q, k, v, o.mT) for block in part.chunk(blocks)]
        lines.append([int(part.any()) for part in parts])
    return lines


@torch.no_grad()
def score_ranks(layers: Mapping[int, Attention], x: Tensor) -> dict[str, list[int]]:
    """Return the numerical rank of each head's scores over one text.

    A singular value counts if it exceeds length * eps * the largest, as in numpy.
    """
    ranks = {}
    for heads, layer in layers.items():
        values = torch.linalg.svdvals(layer_scores(layer, x[:1])[0])
        counted = values > LENGTH * torch.finfo(values.dtype).eps * values[:, :1]
        ranks[str(heads)] = counted.sum(-1).tolist()
    return ranks


def compare_training_by_head_count(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Train with one head and with many, from the same weights, towards the same random targets.

    The distance of the weights, and the change by training, are relative to the weights of many
    heads. To measure rounding, many heads are trained once more from weights that differ in the
    last digit.
    """
    x, target, many = random_tokens(), random_tokens(), COUNTS[-1]
    near = {name: value * (1 + torch.finfo(value.dtype).eps) for name, value in state.items()}
    single, reference, near_by = (
        train_layer(make_layer(heads, weights), x, target)
        for heads, weights in ((1, state), (many, state), (many, near))
    )
    distances = [relative_differences(*pair) for pair in zip(single, reference, strict=True)]
    return {
        "steps": list(STEPS),
        "distance": {name: [distance[name] for distance in distances] for name in WEIGHTS},
        "moved": relative_differences(reference[-1], reference[0]),
        "rounding": relative_differences(near_by[-1], reference[-1]),
    }


def train_layer(layer: Attention, x: Tensor, target: Tensor) -> list[dict[str, Tensor]]:
    optimizer = torch.optim.SGD(layer.parameters(), lr=LEARNING_RATE)
    snapshots = []
    for step in range(STEPS[-1] + 1):
        if step in STEPS:
            pairs = zip(WEIGHTS, projections(layer), strict=True)
            snapshots.append({name: each.weight.detach().clone() for name, each in pairs})
        optimizer.zero_grad()
        (layer(x) - target).square().sum(-1).mean().backward()
        optimizer.step()
    return snapshots


def depends_on_own_rows_only(lines: list[list[int]], blocks: int) -> bool:
    per_head = blocks // len(lines)
    return all(
        reached == (block // per_head % len(lines) == head and block < 2 * blocks)
        for head, line in enumerate(lines)
        for block, reached in enumerate(line)
    )


def facts(n: Numbers) -> dict[str, bool]:
    cosine, distance, many = n["cosine"], n["distance"], str(n["many"])
    return {
        "formulas": n["formula_share"] <= 1,
        "softmax": n["softmax_share"] <= 1,
        "sums": max(n["merged"]["scores"], n["merged"]["dP"]) <= 1 < n["merged"]["dS"],
        "rows": all(depends_on_own_rows_only(n["reach"][k], n["many"]) for k in ("1", many)),
        "ranks": all({*ranks} == {n["head_dim"][heads]} for heads, ranks in n["ranks"].items()),
        "cosines": (
            n["roundings"] > 1 and max(cosine["q"], cosine["k"]) < min(cosine["v"], cosine["o"])
        ),
        "training": all(
            line[0] == 0 < line[1] < line[-1] and line[1] > n["rounding"][name]
            for name, line in distance.items()
        ),
        "largest": (
            max(n["moved"], key=n["moved"].get) == "o"
            and max(distance, key=lambda name: float(distance[name][-1])) == "o"
        ),
    }


WEIGHTS = {"q": "queries", "k": "keys", "v": "values", "o": "output"}


def draw(figure: Figure, n: Numbers) -> None:
    figure.set_figheight(6.4)
    parts: Any = figure.subfigures(2, 1, height_ratios=(1.35, 1), hspace=0.06)
    above, below = parts
    _draw_score_dependencies(above.subplots(), n)
    left, right = below.subplots(1, 2, width_ratios=(1, 1.25), gridspec_kw={"wspace": 0.12})
    names, cosines = [f"w{name}" for name in WEIGHTS], [n["cosine"][name] for name in WEIGHTS]
    bars = left.bar(names, cosines, 0.6, color=SERIES[: len(WEIGHTS)])
    left.bar_label(bars, [f"{cosine:.2f}" for cosine in cosines], padding=3, color=INK)
    title = f"Gradients of the loss:\none head against {n['many']}"
    style_axes(left, title, ylim=(0, 1), ylabel="cosine (the same: 1)")
    _draw_distances(right, n)


def _draw_score_dependencies(axes: Axes, n: Numbers) -> None:
    many, gap = n["many"], 1.5
    lines = [*n["reach"]["1"], *n["reach"][str(many)]]
    heights = [0.0, *(row + 1.7 for row in range(many))]
    for line, y in zip(lines, heights, strict=True):
        for position, reached in enumerate(line):
            part = position // many
            look = {"color": SERIES[part]} if reached else {"color": SOFT, "alpha": 0.3}
            axes.bar(position + gap * part, 0.86, 0.86, y, align="edge", linewidth=0, **look)
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


def _draw_distances(axes: Axes, n: Numbers) -> None:
    last, top = n["steps"][-1], max(max(line) for line in n["distance"].values())
    label_y = -top
    for name, line in sorted(n["distance"].items(), key=lambda named: float(named[1][-1])):
        colour = SERIES[list(WEIGHTS).index(name)]
        # Labels of lines that end together.
        label_y = max(line[-1] - 0.05 * top, label_y + 0.12 * top)
        axes.plot(n["steps"], line, color=colour)
        axes.plot([1.01 * last, 1.09 * last], [line[-1], label_y], color=colour, linewidth=0.8)
        words = f"w{name} {100 * line[-1]:.0f} %"
        axes.text(1.11 * last, label_y, words, color=colour, va="center")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    style_axes(
        axes,
        f"Weights during training:\none head against {n['many']}",
        xlim=(0, 1.42 * last),
        xticks=[step for step in n["steps"] if step % 25 == 0],
        ylim=(0, 1.08 * top),
        xlabel="training step",
        ylabel="relative difference",
    )
