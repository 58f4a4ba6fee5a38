"""Random tensors, memory layouts, masks and score biases, each with its plain data for the oracle.

Everything is drawn from a `Chance`, which a case's kind, seed and index determine.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from headwise import Mask, ScoreBias
from tests.fuzz.oracle import Array, Clause, Shape

T = TypeVar("T")

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
ALIGNS = ("top-left", "bottom-right")
NAMES = ("batch", "heads", "queries", "keys")
AXES = (
    "batch heads queries keys",
    "batch keys",
    "queries keys",
    "heads queries keys",
    "batch queries",
    "heads keys",
    "heads",
    "keys",
)


def plain(x: Tensor) -> Array:
    """A tensor as the oracle takes it, in memory of its own."""
    x = x.detach().clone()
    return (x.double() if x.is_floating_point() else x).numpy()


class Chance:
    """One case's source of randomness."""

    def __init__(self, *key: object) -> None:
        self.random = random.Random(":".join(map(str, key)))
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(60))

    def choose(self, options: Sequence[T]) -> T:
        return self.random.choice(options)

    def maybe(self, share: float = 0.5) -> bool:
        return self.random.random() < share

    def between(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def normal(self, *sizes: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(sizes, generator=self.generator, dtype=torch.float64).to(dtype)

    def whole(self, low: int, high: int, *sizes: int) -> Tensor:
        """Integers from low to high, in any integer dtype that holds them."""
        fitting = [d for d in INTEGERS if torch.iinfo(d).min <= low and high <= torch.iinfo(d).max]
        drawn = torch.randint(low, high + 1, sizes, generator=self.generator)
        return drawn.to(self.choose(fitting))

    def bools(self, share: float, *sizes: int) -> Tensor:
        return torch.rand(sizes, generator=self.generator) < share

    def laid_out(self, x: Tensor, *, may_expand: bool = True) -> Tensor:
        """The same shape in another memory layout: strided, with axes swapped, offset, expanded."""
        kind = self.choose(("as it is", "swapped", "strided", "offset", "expanded", "as it is"))
        if kind == "swapped" and x.dim() > 1:
            a, b = self.random.sample(range(x.dim()), 2)
            return x.transpose(a, b).contiguous().transpose(a, b)
        if kind == "strided" and x.dim():
            axis = self.between(0, x.dim() - 1)
            return torch.stack([x, torch.full_like(x, 7)], axis + 1).flatten(axis, axis + 1)[
                (slice(None),) * axis + (slice(None, None, 2),)
            ]
        if kind == "offset":
            flat = torch.cat([x.new_zeros(3), x.flatten()])
            return flat[3:].view(x.shape)
        if kind == "expanded" and x.dim() and x.numel() and may_expand:
            axis = self.between(0, x.dim() - 1)
            return x.narrow(axis, 0, 1).expand(x.shape)
        return x


@dataclass
class Shaping:
    """A mask and a score bias, for the library and for the oracle."""

    mask: Mask | None = None
    clauses: list[Clause] = field(default_factory=list)
    score_bias: ScoreBias | None = None
    parts: list[Clause] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)  # the tensor of each part
    tensors: list[Tensor] = field(default_factory=list)  # those of the mask
    words: list[str] = field(default_factory=list)

    def also(self, mask: Mask, clause: Clause, *tensors: Tensor) -> None:
        self.mask = mask if self.mask is None else self.mask & mask
        self.clauses.append(clause)
        self.tensors += tensors
        self.words.append(str(mask) + "".join(f":{t.dtype}"[7:] for t in tensors))

    def add(self, score_bias: ScoreBias, part: Clause, leaf: Tensor) -> None:
        self.score_bias = score_bias if self.score_bias is None else self.score_bias + score_bias
        self.parts.append(part)
        self.leaves.append(leaf)
        self.words.append(f"bias {score_bias}:{leaf.dtype}")


def some_axes(chance: Chance, shape: Shape) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Names of axes, their sizes, and the four sizes with 1 for what is not named."""
    axes = chance.choose(AXES)
    named = axes.split()
    sizes = tuple(n for name, n in zip(NAMES, shape, strict=True) if name in named)
    four = tuple(n if name in named else 1 for name, n in zip(NAMES, shape, strict=True))
    return axes, sizes, four


def add_masks(chance: Chance, shaping: Shaping, shape: Shape, most: int = 3) -> None:
    """Up to so many clauses of any kind."""
    kinds = (_window, _window, _lengths, _lengths, _segments, _dense, _convention)
    for _ in range(chance.choose((0, 1, 1, 2, most))):
        chance.choose(kinds)(chance, shaping, shape)


def _side(chance: Chance, length: int) -> int | None:
    return chance.choose((None, 0, 0, 1, 3, length, length + 5))


def _align(chance: Chance, shape: Shape) -> str | None:
    return chance.choose(ALIGNS if shape[2] != shape[3] else (*ALIGNS, None))


def _window(chance: Chance, shaping: Shaping, shape: Shape) -> None:
    align, sides = _align(chance, shape), (_side(chance, shape[3]), _side(chance, shape[3]))
    if chance.maybe():
        shaping.also(Mask.causal(align=align), ("window", None, 0, align))
    else:
        shaping.also(Mask.window(*sides, align=align), ("window", *sides, align))


def _lengths(chance: Chance, shaping: Shaping, shape: Shape) -> None:
    batch, _, queries, keys = shape
    n_keys, n_queries = chance.whole(0, keys, batch), chance.whole(0, queries, batch)
    if queries == keys and chance.maybe():
        n_queries = n_keys
    which = chance.choose(("keys", "queries", "both"))
    if which != "queries":
        shaping.also(Mask.lengths(keys=n_keys), ("keys", plain(n_keys)), n_keys)
    if which != "keys":
        shaping.also(Mask.lengths(queries=n_queries), ("queries", plain(n_queries)), n_queries)


def _segments(chance: Chance, shaping: Shaping, shape: Shape) -> None:
    batch, _, queries, keys = shape
    rows = chance.choose((batch, 1))
    low = chance.choose((-1, 0))
    ids, key_ids = chance.whole(low, 2, rows, queries), chance.whole(low, 2, rows, keys)
    if chance.maybe():
        ids, key_ids = ids.sort(-1).values, key_ids.sort(-1).values
    if queries == keys and chance.maybe():
        shaping.also(Mask.segments(ids), ("segments", plain(ids), plain(ids)), ids)
        return
    shaping.also(
        Mask.segments(ids, key_ids), ("segments", plain(ids), plain(key_ids)), ids, key_ids
    )


def _dense(chance: Chance, shaping: Shaping, shape: Shape) -> None:
    axes, sizes, four = some_axes(chance, shape)
    may = chance.laid_out(chance.bools(chance.choose((0.7, 0.2, 1.0)), *sizes))
    shaping.also(Mask.may_attend(may, axes=axes), ("allowed", plain(may).reshape(four)), may)


def _convention(chance: Chance, shaping: Shaping, shape: Shape) -> None:
    """torch's own masks, bool of both polarities, or 0 and -inf."""
    batch, heads, queries, keys = shape
    kind = chance.choose(("from_torch", "from_torch 3-D", "padding", "from_sdpa", "from_sdpa 4-D"))
    sizes = {
        "from_torch 3-D": (batch * heads, queries, keys),
        "padding": (batch, keys),
        "from_sdpa 4-D": (chance.choose((1, batch)), chance.choose((1, heads)), queries, keys),
    }.get(kind, (queries, keys))
    may = chance.bools(0.6, *sizes)
    given = may if kind.startswith("from_sdpa") else ~may
    if chance.maybe(0.3):
        given = torch.zeros(sizes, dtype=chance.choose(DTYPES)).masked_fill(~may, -torch.inf)
    given = given.clone()
    four = plain(may)
    if kind == "padding":
        mask, four = Mask.from_torch_padding(given), four[:, None, None, :]
    elif kind == "from_torch 3-D":
        mask = Mask.from_torch(given, num_heads=heads)
        four = four.reshape(shape)
    elif kind == "from_torch":
        mask = Mask.from_torch(given)
    else:
        mask = Mask.from_sdpa(given)
    shaping.also(mask, ("allowed", four), given)


def add_biases(
    chance: Chance, shaping: Shaping, shape: Shape, dtype: torch.dtype, *, grad: bool = False
) -> None:
    """Up to two biases, dense or by distance, some with -inf; ``grad`` makes leaves of them."""
    heads = shape[1]
    for _ in range(chance.choose((0, 0, 1, 2))):
        kind, align = chance.choose(("dense", "alibi", "relative")), _align(chance, shape)
        own = torch.promote_types(dtype, torch.float32) if chance.maybe(0.3) else dtype
        if not grad and chance.maybe(0.2):
            own = torch.float32
        if kind == "alibi":
            slopes = (chance.normal(heads).abs() / 4).to(own).requires_grad_(grad)
            shaping.add(
                ScoreBias.alibi(slopes, align=align), ("alibi", plain(slopes), align), slopes
            )
            continue
        axes, sizes, four = some_axes(chance, shape)
        if kind == "relative":
            sizes = (heads, 2 * chance.choose((0, 3, 40)) + 1)
        values = chance.normal(*sizes, dtype=own)
        if chance.maybe(0.3):
            values = values.masked_fill(chance.bools(0.2, *sizes), -torch.inf)
        values = chance.laid_out(values).requires_grad_(grad)
        if kind == "relative":
            bias, part = ScoreBias.relative(values, align=align), ("relative", plain(values), align)
        else:
            bias = ScoreBias.dense(values, axes=axes)
            part = ("dense", np.broadcast_to(plain(values).reshape(four), four))
        shaping.add(bias, part, values)
