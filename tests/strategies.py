"""Attention problems: small, odd, and of every kind the contract speaks of.

`problem(seed)` draws one from a seed; `problems()` is the hypothesis strategy, which also shrinks.
Both go through the same choices, so that a failure of one is a case for the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INFINITY = float("inf")
Choose = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Problem:
    """One attention matrix and values to multiply it with."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None = None
    score_bias: ScoreBias | None = None
    scale: float | None = None
    softcap: float | None = None
    sink: Tensor | None = None

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of AttentionMatrix, of functional and of Budget."""
        names = ("mask", "score_bias", "scale", "softcap", "sink")
        return {name: getattr(self, name) for name in names}

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, queries, keys)."""
        return (*self.q.shape[:3], self.k.shape[2])

    def to(self, dtype: torch.dtype) -> Problem:
        """The same problem with every tensor rounded to ``dtype``, but for tables of distances."""
        bias = self.score_bias
        if bias is not None:
            bias = replace(bias, tensors=tuple(t.to(dtype) for t in bias.tensors))
        sink = None if self.sink is None else self.sink.to(dtype)
        q, k, v = (x.to(dtype) for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, score_bias=bias, sink=sink)

    def allowed(self) -> Tensor:
        """Who may attend by the mask alone: bool (batch, heads, queries, keys)."""
        return allowed(self.mask, self.shape)

    def dense_bias(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Score bias and mask as one float tensor of (batch, heads, queries, keys)."""
        batch, heads, queries, keys = self.shape
        total = torch.zeros(self.shape, dtype=dtype)
        if self.score_bias is not None:
            bound = self.score_bias.bind(
                batch=batch, heads=heads, queries=queries, keys=keys, device=self.q.device
            )
            for part in bound.parts_at_rows(torch.arange(queries)):
                total = total + part.to(dtype)
        return total.masked_fill(~self.allowed(), -torch.inf)

    def __repr__(self) -> str:
        batch, heads, queries, keys = self.shape
        return (
            f"Problem(batch={batch}, heads={heads}, kv_heads={self.k.shape[1]}, queries={queries}, "
            f"keys={keys}, head_dim={self.q.shape[3]}, value_dim={self.v.shape[3]}, "
            f"{self.q.dtype}, mask={self.mask!r}, score_bias={self.score_bias!r}, "
            f"scale={self.scale}, softcap={self.softcap}, sink={self.sink})"
        )


def allowed(mask: Mask | None, shape: tuple[int, int, int, int]) -> Tensor:
    """A mask written down, (batch, heads, queries, keys)."""
    batch, heads, queries, keys = shape
    if mask is None:
        return torch.ones(shape, dtype=torch.bool)
    bound = mask.bind(
        batch=batch, heads=heads, queries=queries, keys=keys, device=torch.device("cpu")
    )
    return bound.evaluate_rows(torch.arange(queries)).expand(shape)


def problem(
    seed: int, *, dtype: torch.dtype = torch.float64, longest: int = 33, **fixed: Any
) -> Problem:
    """A problem drawn from a seed. ``fixed`` sets options, e.g. ``softcap=None`` or ``mask=None``.

    ``value_dim="head_dim"`` gives values as wide as the keys.
    """
    source = random.Random(seed)
    return _draw(source.choice, longest, fixed).to(dtype)


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[torch.dtype] = (torch.float64,),
    longest: int = 33,
    **fixed: Any,
) -> Problem:
    """The same as a hypothesis strategy, over ``dtypes``."""

    def choose(options: Sequence[Any]) -> Any:
        return draw(st.sampled_from(options))

    return _draw(choose, longest, fixed).to(choose(dtypes))


def _draw(choose: Choose, longest: int, fixed: dict[str, Any]) -> Problem:
    batch, kv_heads, group = choose((3, 1, 2)), choose((2, 1, 3)), choose((1, 3, 2))
    queries, keys = choose(range(1, longest + 1)), choose(range(1, longest + 1))
    head_dim = choose((10, 1, 3, 16))
    value_dim = choose((7, 1, 4, 16))
    if fixed.get("value_dim") == "head_dim":
        value_dim = head_dim
    heads = kv_heads * group
    generator = torch.Generator().manual_seed(choose(range(2**16)))
    normal = _normal(generator)
    loud = choose((1.0, 0.0, 0.3, 3.0))
    shape = (batch, heads, queries, keys)
    options: dict[str, Callable[[], Any]] = {
        "mask": lambda: masks(choose, shape, generator),
        "score_bias": lambda: score_biases(choose, shape, generator),
        "scale": lambda: choose((None, 0.3, 1.0, -0.3, 0.0)),
        "softcap": lambda: choose((None, 2.0, 30.0)),
        "sink": lambda: normal(heads) * 2 if choose((False, True)) else None,
    }
    return Problem(
        q=normal(batch, heads, queries, head_dim) * loud,
        k=normal(batch, kv_heads, keys, head_dim),
        v=normal(batch, kv_heads, keys, value_dim),
        **{name: fixed[name] if name in fixed else make() for name, make in options.items()},
    )


def masks(
    choose: Choose, shape: tuple[int, int, int, int], generator: torch.Generator
) -> Mask | None:
    """None, one clause, or a conjunction of up to three; rows and whole samples may be empty."""
    batch, _, queries, keys = shape
    clauses: dict[str, Callable[[], Mask]] = {
        "causal": lambda: Mask.causal(align=choose(("top-left", "bottom-right"))),
        "window": lambda: Mask.window(
            choose((None, 0, 1, 4, 40)),
            choose((None, 0, 1, 3, 40)),
            align=choose(("top-left", "bottom-right")),
        ),
        "key lengths": lambda: Mask.lengths(keys=_integers(generator, 0, keys, batch)),
        "query lengths": lambda: Mask.lengths(queries=_integers(generator, 0, queries, batch)),
        "left-padded": lambda: Mask.lengths(keys=_integers(generator, 0, keys, batch), side="left"),
        "query starts": lambda: Mask.starts(queries=_integers(generator, 0, queries, batch)),
        "prefix": lambda: Mask.prefix(
            choose((0, 2, _integers(generator, 0, keys, batch))),
            align=choose(("top-left", "bottom-right")),
        ),
        "where": lambda: Mask.where(_diagonals(choose((2, 3)))),
        "segments": lambda: _segments(generator, choose((batch, 1)), queries, keys),
        "dense": lambda: _may_attend(choose, shape, generator),
    }
    if batch == 1:
        clauses["packed"] = lambda: _packed(generator, queries, keys)
    mask: Mask | None = None
    for _ in range(choose((1, 0, 2, 3))):
        clause = clauses[choose(tuple(clauses))]()
        mask = clause if mask is None else mask & clause
    return mask


def score_biases(
    choose: Choose, shape: tuple[int, int, int, int], generator: torch.Generator
) -> ScoreBias | None:
    """None, one bias, or a sum of two; a dense one may hold -inf."""
    heads = shape[1]
    normal = _normal(generator)
    aligns = ("top-left", "bottom-right")
    kinds: dict[str, Callable[[], ScoreBias]] = {
        "alibi": lambda: ScoreBias.alibi(normal(heads).abs(), align=choose(aligns)),
        "relative": lambda: ScoreBias.relative(
            normal(heads, 2 * choose((0, 3, 40)) + 1), align=choose(aligns)
        ),
        "dense": lambda: _dense_bias(choose, shape, generator),
    }
    bias: ScoreBias | None = None
    for _ in range(choose((0, 1, 2))):
        part = kinds[choose(tuple(kinds))]()
        bias = part if bias is None else bias + part
    return bias


def _segments(generator: torch.Generator, batch: int, queries: int, keys: int) -> Mask:
    ids, key_ids = (_integers(generator, -1, 2, batch, n) for n in (queries, keys))
    return Mask.segments(ids, key_ids)


def _packed(generator: torch.Generator, queries: int, keys: int) -> Mask:
    """Up to three sequences, with some positions behind them that are none."""
    ends = (_integers(generator, 0, n, 3).sort().values for n in (queries, keys))
    return Mask.packed(*(torch.cat([end.new_zeros(1), end]) for end in ends))


def _diagonals(step: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Every so many diagonals are hidden: others in each sequence and head."""
    return lambda batch, head, query, key: (key - query + head + 2 * batch) % step > 0


def _may_attend(
    choose: Choose, shape: tuple[int, int, int, int], generator: torch.Generator
) -> Mask:
    axes, sizes = _some_axes(choose, shape)
    dense = torch.rand(sizes, generator=generator) < choose((0.7, 0.2, 1.0))
    if choose((False, True)):
        dense[0] = False  # a whole sample, head, query or key
    return Mask.may_attend(dense, axes=axes)


def _dense_bias(
    choose: Choose, shape: tuple[int, int, int, int], generator: torch.Generator
) -> ScoreBias:
    axes, sizes = _some_axes(choose, shape)
    bias = _normal(generator)(*sizes)
    if choose((False, True)):
        bias[torch.rand(sizes, generator=generator) < 0.3] = -torch.inf
    return ScoreBias.dense(bias, axes=axes)


def _some_axes(choose: Choose, shape: tuple[int, int, int, int]) -> tuple[str, tuple[int, ...]]:
    axes = choose(
        ("batch heads queries keys", "batch keys", "queries keys", "heads queries keys", "heads")
    )
    names = ("batch", "heads", "queries", "keys")
    return axes, tuple(shape[names.index(axis)] for axis in axes.split())


def _normal(generator: torch.Generator) -> Callable[..., Tensor]:
    return lambda *sizes: torch.randn(*sizes, generator=generator, dtype=torch.float64)


def _integers(generator: torch.Generator, low: int, high: int, *sizes: int) -> Tensor:
    return torch.randint(low, high + 1, sizes, generator=generator)
