"""Cases of `AttentionMatrix`: every reading against the oracle."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from headwise import AttentionMatrix
from headwise.matrix.kernels import tiles, varlen
from headwise.testing import Budget
from tests.fuzz import oracle
from tests.fuzz.draw import DTYPES, Chance, Shaping, add_biases, add_masks, plain
from tests.fuzz.findings import DifferenceError, same, within
from tests.fuzz.oracle import Array, Shape


@dataclass
class Problem:
    """Operands of one matrix, the library's matrix and the oracle's."""

    chance: Chance
    q: Tensor
    k: Tensor
    options: dict[str, Any]  # of the library and of its budgets
    shaping: Shaping
    truth: oracle.Matrix

    @property
    def shape(self) -> Shape:
        return (*self.q.shape[:3], self.k.shape[2])

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors with a gradient, by the oracle's names."""
        found = {"q": self.q, "k": self.k}
        if self.options["sink"] is not None:
            found["sink"] = self.options["sink"]
        return found | {f"bias {n}": leaf for n, leaf in enumerate(self.shaping.leaves)}

    def matrix(self) -> AttentionMatrix:
        return AttentionMatrix(self.q, self.k, **self.options)

    def detached(self) -> dict[str, Any]:
        """The options for a budget, in which nothing requires a gradient."""
        sink = self.options["sink"]
        return {**self.options, "sink": None if sink is None else sink.detach()}

    def __str__(self) -> str:
        batch, heads, queries, keys = self.shape
        options = {n: self.options[n] for n in ("scale", "softcap") if self.options[n] is not None}
        sink = [] if self.options["sink"] is None else ["sink"]
        return (
            f"batch={batch} heads={heads} kv_heads={self.k.shape[1]} queries={queries} keys={keys} "
            f"head_dim={self.q.shape[3]} {self.q.dtype} strides q{self.q.stride()} "
            f"k{self.k.stride()} {options} {sink} {self.shaping.words}"
        )


def draw(chance: Chance, *, grad: bool = False) -> Problem:
    """Operands, options, mask and score bias of one matrix."""
    dtype = chance.choose(DTYPES)
    batch, kv_heads = chance.choose((1, 2, 3)), chance.choose((1, 2, 3))
    heads = kv_heads * chance.choose((1, 2, 3))
    long = (140, 300) if chance.maybe(0.1) and not grad else (1, 24)
    queries, keys = chance.between(1, 24), chance.between(*long)
    if chance.maybe(0.4):
        queries = keys = min(queries, keys)
    if chance.maybe(0.03):
        queries, keys = chance.choose(((0, keys), (queries, 0)))
    width = chance.choose((10, 1, 3, 16))
    loud = chance.choose((1.0, 0.0, 0.3, 3.0, 100.0))
    q = chance.laid_out((chance.normal(batch, heads, queries, width) * loud).to(dtype))
    k = chance.laid_out(chance.normal(batch, kv_heads, keys, width, dtype=dtype))
    sink = (chance.normal(heads) * 2).to(dtype) if chance.maybe(0.3) else None
    for leaf in (q, k, sink) if grad else ():
        if leaf is not None:
            leaf.requires_grad_()
    shaping, shape = Shaping(), (batch, heads, queries, keys)
    add_masks(chance, shaping, shape)
    add_biases(chance, shaping, shape, dtype, grad=grad)
    numbers = {
        "scale": chance.choose((None, None, 0.3, 1.0, -0.3, 0.0)),
        "softcap": chance.choose((None, None, 2.0, 30.0)),
    }
    truth = oracle.Matrix(
        plain(q),
        plain(k),
        shaping.clauses,
        shaping.parts,
        sink=None if sink is None else plain(sink),
        **numbers,
    )
    options = {"mask": shaping.mask, "score_bias": shaping.score_bias, "sink": sink, **numbers}
    return Problem(chance, q, k, options, shaping, truth)


@contextmanager
def tiled(chance: Chance) -> Iterator[None]:
    """Tiles and pieces of another size, in some cases."""
    size = chance.choose((None, None, 1, 40, 300))
    patches = [mock.patch.object(varlen, "CALL", 1)] if chance.maybe(0.3) else []
    if size is not None:
        patches.append(mock.patch.object(tiles, "TILE_ELEMENTS", size))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


# ---- readings ----------------------------------------------------------------------------------


def values_for(p: Problem) -> Tensor:
    """Values of kv_heads, of all heads or of one, for each sequence or for all."""
    chance, (batch, heads, _, keys) = p.chance, p.shape
    own = chance.choose((p.k.shape[1], p.k.shape[1], heads, 1))
    sizes = (chance.choose((batch, batch, 1)), own, keys, chance.choose((7, 1, 4, 16)))
    return chance.laid_out(chance.normal(*sizes, dtype=p.q.dtype))


def product(p: Problem) -> None:
    v = values_for(p)
    budget = Budget.for_head_outputs(p.q, p.k, whole(v, p), **p.detached())
    within("A @ v", budget, p.matrix() @ v, p.truth.outputs(plain(v)))
    outputs, average = p.matrix().outputs_and_average(v)
    within("outputs_and_average", budget, outputs, p.truth.outputs(plain(v)))
    of_weights(p, "its average", lambda w: w.mean(1), average, p.truth.weights.mean(1))


def whole(v: Tensor, p: Problem) -> Tensor:
    """Values of one sequence, or of one head, as the reference takes them."""
    heads = v.shape[1] if v.shape[1] == p.k.shape[1] else p.shape[1]
    return v.expand(p.shape[0], heads, *v.shape[2:])


def transposed(p: Problem) -> None:
    batch, heads, queries, _ = p.shape
    y = p.chance.laid_out(p.chance.normal(batch, heads, queries, 5, dtype=p.q.dtype))
    budget = Budget.for_transposed(p.q, p.k, y, **p.detached())
    within("A.mT @ y", budget, p.matrix().mT @ y, p.truth.transposed(plain(y)))


def of_weights(
    p: Problem, name: str, read: Callable[[Tensor], Tensor], found: Tensor, expected: Array
) -> None:
    budget = Budget.for_weights(p.q, p.k, read=read, **p.detached())
    within(name, budget, found, expected)


def rows(p: Problem) -> None:
    index = p.chance.whole(0, max(0, p.shape[2] - 1), p.chance.between(0, 5)).long()
    index = index if p.shape[2] else index[:0]
    found = p.matrix().rows(index)
    of_weights(p, "rows", lambda w: w[:, :, index], found, p.truth.weights[:, :, plain(index)])


def dense(p: Problem) -> None:
    of_weights(p, "dense", lambda w: w, p.matrix().dense(), p.truth.weights)


def diagonal(p: Problem) -> None:
    offset = p.chance.between(-p.shape[2] - 1, p.shape[3] + 1)
    expected = p.truth.diagonal(offset)
    if not expected.size:  # NumPy has no diagonal beyond the matrix
        expected = np.zeros((*p.shape[:2], 0))
    read = partial(torch.diagonal, offset=offset, dim1=2, dim2=3)
    found = p.matrix().diagonal(offset)
    if not expected.size:
        same(f"diagonal({offset})", found, expected)
        return
    of_weights(p, f"diagonal({offset})", read, found, expected)


def pool(p: Problem) -> None:
    cells = [p.chance.between(1, max(1, n)) for n in p.shape[2:]]
    of_weights(
        p,
        f"pool{tuple(cells)}",
        lambda w: pooled(w, *cells),
        p.matrix().pool(*cells),
        p.truth.pool(*cells),
    )


def pooled(w: Tensor, queries: int, keys: int) -> Tensor:
    """The pooled map of written weights."""
    by_query, by_key = (
        (torch.arange(n) * blocks // max(1, n) == torch.arange(blocks)[:, None]).to(w.dtype)
        for n, blocks in zip(w.shape[2:], (queries, keys), strict=True)
    )
    return (by_query / by_query.sum(1, keepdim=True).clamp(min=1)) @ w @ by_key.mT


def topk(p: Problem) -> None:
    k = p.chance.between(0, min(5, p.shape[3]))
    values, index = p.matrix().topk(k)
    best = -np.sort(-p.truth.weights, -1)[..., :k]
    of_weights(p, "topk", lambda w: w.topk(k, -1).values, values, best)
    at = np.take_along_axis(p.truth.weights, plain(index), -1)
    of_weights(p, "weights at topk", lambda w: w.topk(k, -1).values, values, at)
    if k and np.sort(plain(index), -1).shape[-1] > 1:
        repeated = (np.diff(np.sort(plain(index), -1)) == 0).any()
        if repeated:
            raise DifferenceError("topk: a key is named twice")


def reductions(p: Problem) -> None:
    found = p.matrix().statistics()
    alone = p.matrix()
    numbers = {
        "logsumexp": (Budget.for_logsumexp, p.truth.logsumexp(), alone.logsumexp()),
        "entropy": (Budget.for_entropy, p.truth.entropy(), alone.entropy()),
    }
    for name, (budget_for, expected, single) in numbers.items():
        budget = budget_for(p.q, p.k, **p.detached())
        within(f"statistics().{name}", budget, getattr(found, name), expected)
        within(name, budget, single, expected)
    if p.shape[3]:
        of_weights(p, "maximum", lambda w: w.amax(-1), found.maximum, p.truth.maximum())
        of_weights(p, "maximum", lambda w: w.amax(-1), alone.maximum(), p.truth.maximum())
    received = p.truth.weights.sum(2)
    of_weights(p, "received", lambda w: w.sum(2), found.received, received)
    of_weights(p, "received", lambda w: w.sum(2), alone.received(), received)
    of_weights(
        p, "head_average", lambda w: w.mean(1), alone.head_average(), p.truth.weights.mean(1)
    )


def seen_by(p: Problem) -> None:
    chosen = p.chance.bools(0.6, p.shape[0], p.shape[2])
    found = p.matrix().seen_by(chosen)
    expected = p.truth.seen_by(plain(chosen))
    if found.shape[1] not in (1, p.shape[1]):
        raise DifferenceError(f"seen_by: shape {tuple(found.shape)}")
    same("seen_by", found.expand(expected.shape), expected)


def observed(p: Problem) -> None:
    """Tiles, put together; what no tile holds attends to nothing."""
    weights = torch.zeros(p.shape, dtype=torch.float64)
    counts = torch.zeros(p.shape[:3], dtype=torch.int64)
    entropy = torch.zeros(p.shape[:3], dtype=torch.float64)
    lowest = torch.full(p.shape[:3], torch.inf, dtype=torch.float64)
    seen = torch.zeros(p.shape[:3], dtype=torch.bool)
    for part in p.matrix().tiles(with_scores=True, with_lowest=True):
        place = part.place
        at = (place.batches, place.heads, place.rows)
        seen[at] = True
        weights[(*at, place.columns)] = part.weights.double()
        counts[at], entropy[at] = part.allowed.long(), part.entropy.double()
        assert part.lowest is not None
        lowest[at] = part.lowest.double()
    same("tiles().allowed", counts, p.truth.allowed.sum(-1))
    of_weights(p, "tiles().weights", lambda w: w, weights, p.truth.weights)
    own = np.where(seen.numpy(), p.truth.entropy(), 0)
    within("tiles().entropy", Budget.for_entropy(p.q, p.k, **p.detached()), entropy, own)
    least = np.where(p.truth.allowed, p.truth.scores, np.inf).min(-1, initial=np.inf)
    same("tiles().lowest is finite", lowest.isfinite(), np.isfinite(least))


READINGS = {
    f.__name__: f
    for f in (
        product, transposed, rows, dense, diagonal, pool, topk, reductions, seen_by, observed,
    )
}  # fmt: skip


def reading_case(chance: Chance) -> str:
    """Three readings of one matrix."""
    p = draw(chance)
    names = chance.random.sample(sorted(READINGS), 3)
    said = f"{names} of {p}"
    with describing(said), tiled(chance), torch.set_grad_enabled(chance.maybe()):
        for name in names:
            READINGS[name](p)
    return said


@contextmanager
def describing(case: str | list[str]) -> Iterator[None]:
    """Put the case into what goes wrong within it."""
    try:
        yield
    except Exception as error:
        error.add_note(case if isinstance(case, str) else " ".join(case))
        raise
