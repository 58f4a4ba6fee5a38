"""Attention in NumPy float64, from the definitions: the oracle of the fuzz.

This module imports NumPy and nothing else, so that no mistake of the library can be in it. Masks
and score biases are plain data:

    mask clauses   ("window", left, right, align)  ("keys", n)  ("queries", n)
                   ("segments", query_ids, key_ids)  ("allowed", bool array)
    bias parts     ("dense", array)  ("alibi", slopes, align)  ("relative", table, align)

Arrays of a clause broadcast to (batch, heads, queries, keys). All functions also take complex
arrays, so that ``f(x + 1e-100j * d).imag / 1e-100`` is a derivative to the last bit.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Clause = tuple[Any, ...]
Shape = tuple[int, int, int, int]
STEP = 1e-100


def distances(align: str | None, queries: int, keys: int) -> Array:
    """Return ``key - query``, (queries, keys), counted from the alignment."""
    shift = keys - queries if align == "bottom-right" else 0
    return np.arange(keys)[None, :] - (np.arange(queries)[:, None] + shift)


def allowed(clauses: list[Clause], shape: Shape) -> Array:
    """Return who may attend, bool (batch, heads, queries, keys)."""
    _, _, queries, keys = shape
    result = np.ones(shape, dtype=bool)
    for kind, *data in clauses:
        if kind == "window":
            left, right, align = data
            d = distances(align, queries, keys)
            if left is not None:
                result &= d >= -left
            if right is not None:
                result &= d <= right
        elif kind == "keys":
            result &= (np.arange(keys) < data[0].astype(int)[:, None])[:, None, None, :]
        elif kind == "queries":
            result &= (np.arange(queries) < data[0].astype(int)[:, None])[:, None, :, None]
        elif kind == "segments":
            ids, key_ids = (x.astype(int) for x in data)
            same = ids[:, None, :, None] == key_ids[:, None, None, :]
            result &= same & (key_ids >= 0)[:, None, None, :]
        else:
            result &= data[0]
    return result


def bias(parts: list[Clause], shape: Shape) -> Array:
    """Return what is added to the scores, (batch, heads, queries, keys)."""
    _, _, queries, keys = shape
    total = np.zeros(shape, dtype=complex if any(np.iscomplexobj(p[1]) for p in parts) else float)
    for kind, values, *align in parts:
        if kind == "dense":
            total = total + values
            continue
        d = distances(align[0], queries, keys)
        if kind == "alibi":
            total = total - values[:, None, None] * np.abs(d)
        else:
            total = total + values[:, clipped(values, d)]
    return total


def clipped(table: Array, d: Array) -> Array:
    """Return the column of a relative table for each distance."""
    reach = table.shape[1] // 2
    return np.clip(d, -reach, reach) + reach


def shared(kv: Array, heads: int) -> Array:
    """Give each query head its kv head."""
    return np.repeat(kv, heads // kv.shape[1], axis=1)


def mT(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


@dataclass
class Matrix:
    """One attention matrix, written down: scores, weights, the sink's share."""

    q: Array
    k: Array
    clauses: list[Clause] = field(default_factory=list)
    parts: list[Clause] = field(default_factory=list)
    scale: float | None = None
    softcap: float | None = None
    sink: Array | None = None

    def __post_init__(self) -> None:
        heads, width = self.q.shape[1], self.q.shape[3]
        self.factor = 1 / np.sqrt(width) if self.scale is None else self.scale
        raw = self.factor * (self.q @ mT(shared(self.k, heads)))
        self.slope = np.ones(1)
        if self.softcap is not None:
            tanh = np.tanh(raw / self.softcap)
            raw, self.slope = self.softcap * tanh, 1 - tanh**2
        added = bias(self.parts, raw.shape)
        self.allowed = allowed(self.clauses, raw.shape) & (added.real > -np.inf)
        self.scores = np.where(self.allowed, raw + np.where(self.allowed, added, 0), -np.inf)
        highest = self.scores.real.max(-1, keepdims=True, initial=-np.inf)
        if self.sink is not None:
            highest = np.maximum(highest, self.sink.real[:, None, None])
        self.peak = np.where(highest > -np.inf, highest, 0)
        e = np.where(self.allowed, np.exp(np.where(self.allowed, self.scores, 0) - self.peak), 0)
        of_sink = np.zeros((*e.shape[:3], 1))
        if self.sink is not None:
            of_sink = np.broadcast_to(np.exp(self.sink[:, None, None] - self.peak), of_sink.shape)
        self.total = e.sum(-1, keepdims=True) + of_sink
        divisor = np.where(self.total == 0, 1, self.total)
        self.weights, self.of_sink = e / divisor, of_sink / divisor

    # ---- readings ---------------------------------------------------------------------------

    def outputs(self, v: Array) -> Array:
        return self.weights @ shared(np.broadcast_to(v, (len(self.q), *v.shape[1:])), self.heads)

    def transposed(self, y: Array) -> Array:
        return mT(self.weights) @ y

    def diagonal(self, offset: int) -> Array:
        return np.diagonal(self.weights, offset, 2, 3)

    def pool(self, queries: int, keys: int) -> Array:
        by_query, by_key = (
            np.arange(n) * blocks // max(1, n) == np.arange(blocks)[:, None]
            for n, blocks in zip(self.weights.shape[2:], (queries, keys), strict=True)
        )
        mean = by_query / np.maximum(1, by_query.sum(1, keepdims=True))
        return mean @ self.weights @ by_key.T

    def logsumexp(self) -> Array:
        with np.errstate(divide="ignore"):
            return (self.peak + np.log(self.total))[..., 0]

    def entropy(self) -> Array:
        outcomes = np.concatenate([self.weights, self.of_sink], -1)
        return -(outcomes * np.log(np.where(outcomes == 0, 1, outcomes))).sum(-1)

    def maximum(self) -> Array:
        return self.weights.max(-1, initial=0)

    def seen_by(self, chosen: Array) -> Array:
        return (self.allowed & chosen[:, None, :, None]).sum(2)

    # ---- gradients --------------------------------------------------------------------------

    def through_weights(self, d_weights: Array) -> dict[str, Array]:
        """Gradients of ``(weights * d_weights).sum()``."""
        mean = (self.weights * d_weights).sum(-1, keepdims=True)
        return self._gradients(self.weights * (d_weights - mean), -self.of_sink * mean)

    def through_logsumexp(self, g: Array) -> dict[str, Array]:
        return self._gradients(self.weights * g[..., None], self.of_sink * g[..., None])

    def through_entropy(self, g: Array) -> dict[str, Array]:
        h = self.entropy()[..., None]
        surprise = [
            -p * (np.log(np.where(p == 0, 1, p)) + h) * g[..., None]
            for p in (self.weights, self.of_sink)
        ]
        return self._gradients(*surprise)

    def rounding_of(self, name: str, g: Array) -> dict[str, Array]:
        """How large the terms of a gradient are, for one unit of rounding in each of them."""
        outcomes = [p * np.abs(g)[..., None] for p in (self.weights, self.of_sink)]
        if name == "entropy":
            h = 1 + self.entropy()[..., None]
            parts = zip(outcomes, (self.weights, self.of_sink), strict=True)
            outcomes = [x * (h - np.log(np.where(p == 0, 1, p))) for x, p in parts]
        sizes = Matrix(np.abs(self.q), np.abs(self.k), [], self.parts, abs(self.factor))
        sizes.sink, sizes.slope = self.sink, self.slope
        return sizes._gradients(*outcomes)

    def _gradients(self, d_scores: Array, d_sink: Array) -> dict[str, Array]:
        batch, heads, queries, keys = d_scores.shape
        raw = self.factor * d_scores * self.slope
        by_head = mT(raw) @ self.q
        kv_heads = self.k.shape[1]
        found = {
            "q": raw @ shared(self.k, heads),
            "k": by_head.reshape(batch, kv_heads, heads // kv_heads, *by_head.shape[2:]).sum(2),
        }
        if self.sink is not None:
            found["sink"] = d_sink[..., 0].sum((0, 2))
        for number, (kind, values, *align) in enumerate(self.parts):
            if kind == "dense":
                axes = tuple(i for i, n in enumerate(values.shape) if n == 1)
                found[f"bias {number}"] = d_scores.sum(axes, keepdims=True)
                continue
            d, by_pair = distances(align[0], queries, keys), d_scores.sum(0)
            if kind == "alibi":
                found[f"bias {number}"] = -(by_pair * np.abs(d)).sum((1, 2))
            else:
                table = np.zeros((heads, values.shape[1]))
                for head in range(heads):
                    np.add.at(table[head], clipped(values, d), by_pair[head])
                found[f"bias {number}"] = table
        return found

    @property
    def heads(self) -> int:
        return self.q.shape[1]
