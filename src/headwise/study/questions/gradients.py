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
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cosine_similarity

from headwise.function import rounding, stages
from headwise.function.rounding import Roundoff, sum_error_bound
from headwise.layers.attention import Attention
from headwise.study.drawing import INK, SERIES, SOFT, Axes, Figure, style_axes
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
    gradients_of, bounds, shares, apart = {}, {}, list[float](), list[float]()
    for heads, layer in layers.items():
        weights, forward = projection_weights(layer), forward_pass(layer, x, upstream)
        gradients = torch.autograd.grad(layer(x), list(weights.values()), upstream)
        made = gradients_of[heads] = dict(zip(weights, gradients, strict=True))
        bound = bounds[heads] = join_head_gradients(rounding_bounds(forward))
        formula = join_head_gradients(projection_gradients(forward))
        shares += [float(((made[n] - formula[n]).abs() / bound[n]).max()) for n in WEIGHTS]
        apart += relative_differences(made, formula).values()
    pairs = {n: (gradients_of[1][n], gradients_of[many][n]) for n in WEIGHTS}
    steps = {heads: softmax_step(forward_pass(layers[heads], x, upstream)) for heads in (1, many)}
    return {
        "length": LENGTH,
        "many": many,
        "head_dim": {str(heads): EMBED_DIM // heads for heads in COUNTS},
        "formula_share": max(shares),
        "formula_difference": max(apart),
        "softmax_share": max(
            float(((step.tensors["dS"] - step.by_autograd).abs() / step.rounding["dS"]).max())
            for step in steps.values()
        ),
        "merged": compare_with_merged_heads(steps[1], steps[many]),
        "reach": {
            str(heads): score_gradient_pattern(layers[heads], x, blocks=many) for heads in (1, many)
        },
        "ranks": score_ranks(layers, x),
        # Similarity of the gradients, and the least difference over its rounding.
        "cosine": {
            n: float(cosine_similarity(single.flatten(), other.flatten(), dim=0))
            for n, (single, other) in pairs.items()
        },
        "roundings": min(
            float((single - other).norm() / (bounds[1][n] + bounds[many][n]).norm())
            for n, (single, other) in pairs.items()
        ),
        **compare_training_by_head_count(state),
    }


def random_tokens() -> Tensor:
    return torch.randn(BATCH, LENGTH, EMBED_DIM).double()


def initial_weights() -> dict[str, Tensor]:
    layer = Attention(EMBED_DIM, COUNTS[-1], dtype=torch.float64)
    return {name: value.clone() for name, value in layer.state_dict().items()}


def make_layer(heads: int, state: Mapping[str, Tensor]) -> Attention:
    layer = Attention(EMBED_DIM, heads, dtype=torch.float64)
    layer.load_state_dict(state)
    return layer


def projection_weights(layer: Attention) -> dict[str, Tensor]:
    """Return the four weights by the names of `WEIGHTS`."""
    projections = (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    return {name: part.weight for name, part in zip(WEIGHTS, projections, strict=True)}


class ForwardPass(NamedTuple):
    """The tensors of a forward pass that the gradients need, and the gradient of the output."""

    x: Float[Tensor, "batch length embed_dim"]
    q: Float[Tensor, "batch heads length head_dim"]
    k: Float[Tensor, "batch heads length head_dim"]
    v: Float[Tensor, "batch heads length value_dim"]
    wo: Float[Tensor, "heads out_dim value_dim"]  # each head's part of the output projection
    upstream: Float[Tensor, "batch length out_dim"]  # dL/doutput


@torch.no_grad()
def forward_pass(layer: Attention, x: Tensor, upstream: Tensor) -> ForwardPass:
    matrix = layer.matrix(x)
    v = stages.split_heads(layer.v_proj(x), heads=layer.num_heads)
    wo = layer.out_proj.weight.detach().unflatten(1, (layer.num_heads, -1)).movedim(1, 0)
    return ForwardPass(x, matrix.q, matrix.k, v, wo, upstream)


def projection_gradients(forward: ForwardPass) -> dict[str, Tensor]:
    """Compute dL/dW of the four projections of each head, by the formulas of this module."""
    x, q, k, v, wo, upstream = forward
    scale, weights = stages.default_scale(q), stages.weights(q, k)
    of_outputs = upstream[:, None] @ wo
    of_scores = softmax_gradient(weights, of_outputs @ v.mT)
    return {
        "q": _sum_over_tokens(scale * (of_scores @ k), x),
        "k": _sum_over_tokens(scale * (of_scores.mT @ q), x),
        "v": _sum_over_tokens(weights.mT @ of_outputs, x),
        "o": _sum_over_tokens(weights @ v, upstream).mT,
    }


def softmax_gradient(
    weights: Float[Tensor, "batch heads queries keys"],
    of_weights: Float[Tensor, "batch heads queries keys"],
) -> Float[Tensor, "batch heads queries keys"]:
    """Compute dS = P * (dP - rowsum(P * dP)) from P, the weights, and dP, their gradient."""
    return weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))


def rounding_bounds(forward: ForwardPass) -> dict[str, Tensor]:
    """Return the largest difference that rounding can make between two computations.

    The bound has three parts: the floors of `function.rounding` for dq, dk and dv in the dtype
    of ``q``; the rounding of dO, in which the gradients are linear; and the sum over the tokens.
    ``q``, ``k`` and ``v`` count as exact.
    """
    x, q, k, v, wo, upstream = (part.detach().double() for part in forward)
    r, scale = Roundoff.of(forward.q.dtype), stages.default_scale(q)
    rows = rounding.row_rounding(q, k, r, scale=scale)
    weights = rows.weights
    of_outputs = upstream[:, None] @ wo
    error = r.u * sum_error_bound(wo.shape[1]) * (upstream.abs()[:, None] @ wo.abs())
    error += r.U * of_outputs.abs()
    floors = rounding.gradient_floors(rows, q, k, v, of_outputs, scale=scale, bias_gradient=None)
    of_scores, weights_error = softmax_gradient(weights, of_outputs @ v.mT), error @ v.abs().mT
    scores_error = weights * (weights_error + (weights * weights_error).sum(-1, keepdim=True))
    over_tokens = r.u * sum_error_bound(x.shape[0] * x.shape[1]) + 2 * r.U  # inputs and result

    def summed(gradient: Tensor, error: Tensor, tokens: Tensor) -> Tensor:
        return _sum_over_tokens(error + over_tokens * gradient.abs(), tokens.abs())

    q_error = floors["q"] + scale * scores_error @ k.abs()
    k_error = floors["k"] + scale * scores_error.mT @ q.abs()
    return {
        "q": summed(scale * of_scores @ k, q_error, x),
        "k": summed(scale * of_scores.mT @ q, k_error, x),
        "v": summed(weights.mT @ of_outputs, floors["v"] + weights.mT @ error, x),
        "o": summed(weights @ v, rounding.product_floor(rows, v), upstream).mT,
    }


def _sum_over_tokens(
    gradient: Float[Tensor, "batch heads length width"], tokens: Float[Tensor, "batch length dim"]
) -> Float[Tensor, "heads width dim"]:
    """Return a weight's gradient from its outputs' gradient and its inputs, summed over tokens."""
    return torch.einsum("bhlw,bld->hwd", gradient, tokens)


def join_head_gradients(of_heads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    joined = {name: of_heads[name].flatten(0, 1) for name in "qkv"}
    return joined | {"o": of_heads["o"].movedim(0, 1).flatten(1)}


class SoftmaxStep(NamedTuple):
    """The softmax of every head of a layer, forward and backward."""

    tensors: dict[str, Tensor]  # scores; dP, of the weights; dS, of the scores, by the formula
    rounding: dict[str, Tensor]  # the largest error that rounding makes in each of these
    by_autograd: Tensor  # dS as autograd computes it


def softmax_step(forward: ForwardPass) -> SoftmaxStep:
    """Compute the softmax's step of a layer, with its gradient by the formula and by autograd."""
    q, k, v, scale = forward.q, forward.k, forward.v, stages.default_scale(forward.q)
    scores = stages.scores(q, k, scale=scale).requires_grad_()
    weights = stages.weights_from_scores(scores)
    of_outputs = forward.upstream[:, None] @ forward.wo
    (by_autograd,) = torch.autograd.grad(weights @ v, scores, of_outputs)
    of_weights = of_outputs @ v.mT
    r = Roundoff.of(q.dtype)
    rows = rounding.row_rounding(q, k, r, scale=scale)
    floors = rounding.gradient_floors(
        rows, q, k, v, of_outputs, scale=scale, bias_gradient=lambda gradient: gradient
    )
    # Of a sum of products, of its factor, and of a sum over heads.
    error = r.u * (sum_error_bound(EMBED_DIM) + 4)
    tensors = {"scores": scores.detach(), "dP": of_weights}
    tensors["dS"] = softmax_gradient(weights.detach(), of_weights)
    errors = {
        "scores": error * scale * (q.abs() @ k.abs().mT),
        "dP": error * (of_outputs.abs() @ v.abs().mT),
        "dS": floors["score_bias"],
    }
    return SoftmaxStep(tensors, errors, by_autograd)


def compare_with_merged_heads(single: SoftmaxStep, many: SoftmaxStep) -> dict[str, float]:
    """Compare the tensors of a single head with those of many heads, added up over the heads.

    The sum of scores is divided by the root of the number of heads. "scores", "dP" and "dS" are
    the largest differences, over the largest that rounding allows; "apart" is the relative
    difference of dS.
    """
    root = many.by_autograd.shape[1] ** 0.5
    factors = {"scores": 1 / root, "dP": 1.0, "dS": 1.0}
    ratios, gap = {}, torch.empty(0)
    for name, factor in factors.items():
        gap = single.tensors[name][:, 0] - factor * many.tensors[name].sum(1)
        allowed = single.rounding[name][:, 0] + factor * many.rounding[name].sum(1)
        ratios[name] = float((gap.abs() / allowed).max())
    return ratios | {"apart": float(gap.norm() / single.tensors["dS"].norm())}


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
    weights, scores = list(projection_weights(layer).values()), layer_scores(layer, x)
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
            weights = projection_weights(layer).items()
            snapshots.append({name: weight.detach().clone() for name, weight in weights})
        optimizer.zero_grad()
        (layer(x) - target).square().sum(-1).mean().backward()
        optimizer.step()
    return snapshots


def depends_on_own_rows_only(lines: list[list[int]], blocks: int) -> bool:
    """Check that each head's scores depend on its own rows of Wq and Wk and no other weight."""
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
    """Draw a square for each part of the weights and each head, coloured if it has a gradient."""
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
