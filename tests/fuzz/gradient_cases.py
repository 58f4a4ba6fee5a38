"""Cases of gradients: every differentiable reading of a matrix against closed forms.

Two readings of one matrix are differentiated one after the other. A reading that is a sum of
weights has the gradient of ``A @ v`` with the identity as its values; that is its budget.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise import AttentionMatrix
from headwise.function import stages
from headwise.function.rounding import BACKWARD
from headwise.testing import Budget
from tests.fuzz import oracle
from tests.fuzz.draw import Chance, plain
from tests.fuzz.findings import within
from tests.fuzz.matrix_cases import Problem, describing, draw, tiled, values_for, whole
from tests.fuzz.oracle import Array


def gradient_case(chance: Chance) -> str:
    """The gradients of one reading, or of two readings of the same matrix one after the other."""
    p = draw(chance, grad=True)
    names = chance.random.sample(sorted(GRADIENTS), chance.choose((1, 1, 2)))
    said = f"gradients of {names} of {p}"
    with describing(said), tiled(chance):
        a = p.matrix()
        for name in names:
            check_gradient(p, a, name)
    return said


def check_gradient(p: Problem, a: AttentionMatrix, name: str) -> None:
    read = GRADIENTS[name](p)
    found = read.of(a)
    if not found.numel():
        return
    g = p.chance.normal(*found.shape, dtype=found.dtype)
    leaves = p.leaves
    grads = torch.autograd.grad(found, list(leaves.values()), g, allow_unused=True)
    truth = read.truth(plain(g))
    budgets = read.budgets(g)
    for (leaf, tensor), grad in zip(leaves.items(), grads, strict=True):
        expected = truth[leaf].reshape(tensor.shape) if leaf.startswith("bias") else truth[leaf]
        grad = torch.zeros_like(tensor) if grad is None else grad
        budget = budgets(leaf)
        if budget is not None:
            within(f"gradient of {leaf} of {name}", budget, grad, expected)


@dataclass
class Reading:
    """A differentiable reading: of the library, of the oracle, and its budget."""

    of: Callable[[AttentionMatrix], Tensor]
    truth: Callable[[Array], dict[str, Array]]
    budgets: Callable[[Tensor], Callable[[str], Budget | None]]


def linear_in_weights(
    p: Problem, of: Callable[[Any], Any], back: Callable[[Array], Array]
) -> Reading:
    """A reading that is a sum of weights; ``back`` gives the weights' gradient from its own."""

    def budgets(g: Tensor) -> Callable[[str], Budget | None]:
        d_weights = torch.from_numpy(np.ascontiguousarray(back(plain(g)))).to(p.q.dtype)
        eye = torch.eye(p.shape[3], dtype=p.q.dtype).expand(*p.k.shape[:2], -1, -1)
        return bias_budgets(p, eye, d_weights)

    return Reading(of, lambda g: p.truth.through_weights(back(g)), budgets)


def bias_budgets(p: Problem, v: Tensor, g: Tensor) -> Callable[[str], Budget | None]:
    """The budget of each leaf of ``A @ v``, given the gradient of the product."""

    def of(leaf: str) -> Budget | None:
        q, k, v_, options = p.q.detach(), p.k.detach(), v.detach(), p.detached()
        read = None
        if leaf.startswith("bias"):
            number = int(leaf.split()[1])
            read = partial(summed, part=p.shaping.parts[number], like=p.shaping.leaves[number])
        found = Budget.for_gradients(q, k, v_, grad_output=g, bias_gradient=read, **options)
        return found["score_bias" if read else leaf]

    return of


def summed(d_scores: Tensor, part: oracle.Clause, like: Tensor) -> Tensor:
    """The gradient of the scores, or a bound of it, added up to that of a bias."""
    kind, values, *align = part
    if kind == "dense":
        axes = [i for i, n in enumerate(values.shape) if n == 1]
        total = d_scores.sum(axes, keepdim=True) if axes else d_scores
        return total.reshape(like.shape)
    d = torch.from_numpy(oracle.distances(align[0], *d_scores.shape[2:]))
    by_pair = d_scores.sum(0)
    if kind == "alibi":
        return -(by_pair * d.abs()).sum((1, 2))
    column = torch.from_numpy(oracle.clipped(values, d.numpy())).flatten()
    out = d_scores.new_zeros(d_scores.shape[1], like.shape[1])
    return out.index_add(1, column, by_pair.flatten(1))


# ---- which readings ----------------------------------------------------------------------------


def of_product(p: Problem) -> Reading:
    v = values_for(p).requires_grad_()

    def truth(g: Array) -> dict[str, Array]:
        values = oracle.shared(np.broadcast_to(plain(v), (p.shape[0], *v.shape[1:])), p.shape[1])
        return p.truth.through_weights(g @ oracle.mT(values))

    return Reading(lambda a: a @ v, truth, lambda g: bias_budgets(p, whole(v, p), g))


def of_transposed(p: Problem) -> Reading:
    y = p.chance.normal(*p.shape[:3], 5, dtype=p.q.dtype)
    return linear_in_weights(p, lambda a: a.mT @ y, lambda g: plain(y) @ oracle.mT(g))


def of_rows(p: Problem) -> Reading:
    index = torch.randperm(p.shape[2], generator=p.chance.generator)[:4]

    def back(g: Array) -> Array:
        d = np.zeros(p.shape)
        d[:, :, plain(index)] = g
        return d

    return linear_in_weights(p, lambda a: a.rows(index), back)


def of_diagonal(p: Problem) -> Reading:
    offset = p.chance.between(-3, 3)

    def back(g: Array) -> Array:
        d = np.zeros(p.shape)
        first = max(0, -offset)
        at = first + np.arange(g.shape[-1])
        d[:, :, at, at + offset] = g
        return d

    return linear_in_weights(p, lambda a: a.diagonal(offset), back)


def of_pool(p: Problem) -> Reading:
    cells = [p.chance.between(1, max(1, n)) for n in p.shape[2:]]

    def back(g: Array) -> Array:
        by_query, by_key = (
            np.arange(n) * blocks // max(1, n) == np.arange(blocks)[:, None]
            for n, blocks in zip(p.shape[2:], cells, strict=True)
        )
        mean = by_query / np.maximum(1, by_query.sum(1, keepdims=True))
        return mean.T @ g @ by_key

    return linear_in_weights(p, lambda a: a.pool(*cells), back)


def of_received(p: Problem) -> Reading:
    return linear_in_weights(
        p, lambda a: a.received(), lambda g: np.broadcast_to(g[:, :, None], p.shape)
    )


def of_average(p: Problem) -> Reading:
    return linear_in_weights(
        p,
        lambda a: a.head_average(),
        lambda g: np.broadcast_to(g[:, None], p.shape) / p.shape[1],
    )


def of_dense(p: Problem) -> Reading:
    return linear_in_weights(p, lambda a: a.dense(), lambda g: g)


def of_topk(p: Problem) -> Reading:
    k, index = p.chance.between(1, max(1, min(4, p.shape[3]))), []

    def of(a: AttentionMatrix) -> Tensor:
        values, found = a.topk(min(k, p.shape[3]))
        index.append(plain(found))
        return values

    def back(g: Array) -> Array:
        d = np.zeros(p.shape)
        np.put_along_axis(d, index[-1], g, -1)
        return d

    return linear_in_weights(p, of, back)


def of_maximum(p: Problem) -> Reading:
    """The largest weight; where two are as large, either may have the gradient: no case."""
    best = np.sort(p.truth.weights, -1)[..., -2:]
    apart = best.shape[-1] < 2 or bool((best[..., 1] > 1.01 * best[..., 0]).all())

    def back(g: Array) -> Array:
        d = np.zeros(p.shape)
        np.put_along_axis(d, p.truth.weights.argmax(-1)[..., None], g[..., None], -1)
        return d

    def of(a: AttentionMatrix) -> Tensor:
        return a.maximum() if apart and p.shape[3] else p.q.sum((1, 2, 3))[:0]

    return linear_in_weights(p, of, back)


def of_logsumexp(p: Problem) -> Reading:
    if not p.shape[3] or not np.isfinite(p.truth.logsumexp()).all():
        return Reading(lambda a: p.q.flatten()[:0], lambda g: {}, lambda g: lambda leaf: None)
    return Reading(
        lambda a: a.logsumexp(), p.truth.through_logsumexp, partial(plain_budgets, p, "logsumexp")
    )


def of_entropy(p: Problem) -> Reading:
    return Reading(
        lambda a: a.entropy(), p.truth.through_entropy, partial(plain_budgets, p, "entropy")
    )


def plain_budgets(p: Problem, name: str, g: Tensor) -> Callable[[str], Budget | None]:
    """The budget of a gradient from plain torch's own; biases by distance have none."""
    names = [n for n in ("q", "k", "sink") if n in p.leaves]

    def of(leaf: str) -> Budget | None:
        if leaf not in names:
            return None

        def gradient(g: Tensor, *given: Tensor) -> Tensor:
            leaves = [x.detach().requires_grad_() for x in given]
            options = p.detached()
            if len(leaves) == 3:
                options["sink"] = leaves[2]
            with torch.enable_grad():
                s = stages.scores(*leaves[:2], **{n: x for n, x in options.items() if n != "sink"})
                found = plain_reading(name, s, options["sink"])
            grads = torch.autograd.grad(found, leaves, g)
            return grads[names.index(leaf)]

        given = [p.leaves[n].detach() for n in names]
        # What is 0 by symmetry is exactly 0 in plain torch, and in no other order of the sums.
        unit = torch.finfo(torch.promote_types(g.dtype, torch.float32)).eps
        floor = torch.from_numpy(16 * unit * p.truth.rounding_of(name, plain(g))[leaf])
        found = Budget.for_function(gradient, g, *given, factor=BACKWARD, name=name)
        return replace(found, allowed=found.allowed + floor)

    return of


def plain_reading(name: str, s: Tensor, sink: Tensor | None) -> Tensor:
    """Logsumexp or entropy of written scores."""
    if sink is not None:
        s = torch.cat([s, sink.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)], -1)
    if s.shape[-1] == 0:
        s = torch.nn.functional.pad(s, (0, 1), value=-torch.inf)  # no maximum of nothing
    peak = s.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(s.dtype).min)
    e = torch.exp(s - peak)
    total = e.sum(-1, keepdim=True)
    if name == "logsumexp":
        return (peak + total.log())[..., 0]
    below = (peak - s).where(e > 0, 0.0)
    return total.clamp(min=1.0).log()[..., 0] + (e * below).sum(-1) / total.clamp(min=1.0)[..., 0]


GRADIENTS: dict[str, Callable[[Problem], Reading]] = {
    f.__name__.removeprefix("of_"): f
    for f in (
        of_product, of_product, of_transposed, of_rows, of_diagonal, of_pool, of_received,
        of_average, of_dense, of_topk, of_maximum, of_logsumexp, of_entropy,
    )
}  # fmt: skip
