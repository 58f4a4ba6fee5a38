"""Equality of layouts, and of sets of canonical tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Self

import torch
from torch import Tensor

from headwise.function.weights import AXES, HEADS, State
from headwise.layouts._layout import Layout
from headwise.layouts.pattern import Sizes
from headwise.support.tensors import is_positive_zero, same_bytes, view_as_bits

LISTED = 6  # heads that are named
# canonical tensor -> the words for it in messages
PARTS = {
    "wq": "queries",
    "wk": "keys",
    "wv": "values",
    "wo": "output projection",
    "bq": "query bias",
    "bk": "key bias",
    "bv": "value bias",
    "bo": "output bias",
    "q_norms": "query norms",
    "k_norms": "key norms",
    "wg": "gate",
    "bg": "gate bias",
}
_NARROW = {"embed_dim": 2, "source_dim": 2, "out_dim": 3}


def mark_differing_entries(a: Tensor, b: Tensor) -> Tensor:
    differ = view_as_bits(a) != view_as_bits(b)
    return differ.any(-1) if a.is_complex() else differ


def list_differing_tensors(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the canonical tensors that differ; a bias of +0 may be absent."""
    names = []
    for name in AXES:
        x, y = a.get(name), b.get(name)
        if x is not None and y is not None:
            if not same_bytes(x, y):
                names.append(name)
        elif (alone := y if x is None else x) is not None and not is_positive_zero(alone):
            names.append(name)
    return names


def describe_difference(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], *, names_heads: bool = True
) -> str:
    """Return the parts of a module where canonical tensors differ; "" where all are equal."""
    names = list_differing_tensors(a, b)
    parts = (_describe_part(n, a.get(n), b.get(n), names_heads=names_heads) for n in names)
    return "; ".join(parts)


def _describe_part(name: str, x: Tensor | None, y: Tensor | None, *, names_heads: bool) -> str:
    """Return the part of a module where two canonical tensors differ: "values of kv head 3".

    Heads are numbered from 0; of keys and values they are kv heads. They are not named where the
    two tensors have no heads, other shapes or dtypes, or where one is missing; nor without
    ``names_heads``, for weights whose number of heads is not known.
    """
    part, (axis, kind) = PARTS.get(name, name), HEADS.get(name, (0, ""))
    is_alike = x is not None and y is not None and x.shape == y.shape and x.dtype == y.dtype
    if x is None or y is None or not (kind and is_alike and names_heads):
        return part
    heads = [
        head
        for head in range(x.shape[axis])
        if not same_bytes(x.select(axis, head), y.select(axis, head))
    ]
    word = "kv head" if kind == "kv_heads" else "head"
    if len(heads) == 1:
        return f"{part} of {word} {heads[0]}"
    if len(heads) == x.shape[axis]:
        return f"{part} of all {len(heads)} {word}s"
    *most, last = map(str, heads[:LISTED])
    if len(heads) > LISTED:
        return f"{part} of {word}s {', '.join([*most, last])} and {len(heads) - LISTED} more"
    return f"{part} of {word}s {', '.join(most)} and {last}"


@dataclass(frozen=True)
class LayoutReading:
    """Some tensors of a module in one layout. ``names``: full name -> name within the module."""

    layout: Layout
    names: Mapping[str, str]
    sizes: Sizes

    def read(self, stored: Mapping[str, Tensor]) -> State:
        local = {self.names[name]: x for name, x in stored.items()}
        return self.layout.read(local, sizes=self.sizes)

    def write(self, canonical: Mapping[str, Tensor]) -> State:
        """Return the stored tensors of canonical ones; only those in ``names``."""
        full = {local: name for name, local in self.names.items()}
        made = self.layout.write(canonical, sizes=self.sizes)
        return {full[local]: x for local, x in made.items() if local in full}

    def narrow(self) -> Self:
        """Return the reading of a model with widths of a few channels."""
        few = {name: n for name, n in _NARROW.items() if name in self.sizes}
        return replace(self, sizes=self.sizes | few)

    def make_numbered_tensors(self) -> State:
        """Return tensors of these sizes, each with its entries numbered from 1."""
        patterns = self.layout.patterns
        shapes = {name: patterns[local].shape(self.sizes) for name, local in self.names.items()}
        return {name: torch.arange(1, prod(n) + 1).reshape(n) for name, n in shapes.items()}

    def number_entries_converted_to(self, other: Self) -> bytes:
        """Return where each entry of a narrower model goes in the layout of ``other``."""
        mine, theirs = self.narrow(), other.narrow()
        canonical = mine.read(mine.make_numbered_tensors())
        converted = theirs.layout.write(canonical, sizes=theirs.sizes)
        return b"".join(converted[name].numpy().tobytes() for name in sorted(converted))


def is_same_reading(reading: LayoutReading, other: LayoutReading) -> bool:
    """True if two readings of the same tensors give the same matrices.

    With one kv head, or as many as heads, many layouts coincide. Both readings
    are therefore compared on a small example with numbered entries.
    """
    both = reading.narrow(), other.narrow()
    first, second = (each.make_numbered_tensors() for each in both)
    if {name: x.shape for name, x in first.items()} != {n: x.shape for n, x in second.items()}:
        return False
    # Without a rotary_width, all channels of a head are rotated.
    whole = ({"rotary_width": x.sizes["head_dim"], **x.sizes} for x in both)
    pairs = zip(both, whole, strict=True)
    return not list_differing_tensors(*(replace(x, sizes=sizes).read(first) for x, sizes in pairs))
