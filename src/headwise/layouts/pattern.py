"""How a tensor is stored, in the vocabulary of einops, with names for what is fused.

    wq: (heads head_dim) embed_dim                                  a matrix; rows head by head
    embed_dim ([wq: heads head_dim | wk: heads head_dim])           two side by side in one axis
    (kv_heads [wq: group head_dim | wk: head_dim | wv: head_dim]) embed_dim
                                              for each kv head: its query heads, its key, its value

A pattern lists axes. An axis is a name, or names in round brackets, the slowest first. Square
brackets fuse: blocks one after the other, each with the tensor it belongs to and its own names.
Everything is read from the pattern, in both directions (`headwise.layouts.moving`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

from headwise.errors import OptionError

_TOKEN = re.compile(r"\s*(?:([A-Za-z_][\w.{}]*:?)|([()\[\]|])|(\S))")


@dataclass(frozen=True)
class Block:
    """One tensor's part of a fused axis; no names mean one entry."""

    tensor: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Axis:
    """One axis of a stored tensor: ``before`` is slower than the blocks, ``after`` faster.

    Without blocks all names are in ``before``.
    """

    before: tuple[str, ...]
    blocks: tuple[Block, ...] = ()
    after: tuple[str, ...] = ()

    def names_of(self, tensor: str) -> tuple[str, ...]:
        """The names of what ``tensor`` has of this axis, the slowest first."""
        inner = next((block.names for block in self.blocks if block.tensor == tensor), ())
        return (*self.before, *inner, *self.after)

    def size(self, sizes: Mapping[str, int]) -> int:
        """How long it is. KeyError for a name without a size."""
        around = prod(sizes[name] for name in (*self.before, *self.after))
        if not self.blocks:
            return around
        return around * sum(prod(sizes[name] for name in block.names) for block in self.blocks)


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern.

    Attributes:
        axes: of the stored tensor.
        tensors: what it holds, in stored order.
        fused: the number of the axis that is fused; None where it holds one tensor alone.
    """

    axes: tuple[Axis, ...]
    tensors: tuple[str, ...]
    fused: int | None

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Of the stored tensor. KeyError for a name without a size."""
        return tuple(axis.size(sizes) for axis in self.axes)

    def names_of(self, tensor: str) -> tuple[str, ...]:
        """The names of all axes of a tensor, in stored order."""
        return tuple(name for axis in self.axes for name in axis.names_of(tensor))

    def names(self) -> set[str]:
        """Every name of every axis."""
        return {name for tensor in self.tensors for name in self.names_of(tensor)}


@cache
def parse(text: str) -> Pattern:
    """Read a pattern.

    Raises:
        OptionError: it is none; what was found where is said.
    """
    tokens = _tokens(text)
    whole = None
    if tokens and tokens[0].endswith(":"):
        whole = tokens.pop(0)[:-1]
    axes = tuple(_axes(tokens, text))
    fused = [number for number, axis in enumerate(axes) if axis.blocks]
    if (whole is None) != (len(fused) == 1) or len(fused) > 1:
        raise _refused(text, "either one tensor's name before its axes, or one pair of []")
    if whole is not None:
        return Pattern(axes, (whole,), None)
    tensors = tuple(block.tensor for block in axes[fused[0]].blocks)
    if len(set(tensors)) < len(tensors):
        raise _refused(text, "every tensor in one block")
    return Pattern(axes, tensors, fused[0])


def _tokens(text: str) -> list[str]:
    found = []
    for name, sign, other in _TOKEN.findall(text):
        if other:
            raise _refused(text, f"names, : and ()[]|, not {other!r}")
        found.append(name or sign)
    return found


def _axes(tokens: list[str], text: str) -> Iterator[Axis]:
    while tokens:
        token = tokens.pop(0)
        if token == "(":
            yield _product(tokens, text)
        elif token.isidentifier():
            yield Axis((token,))
        else:
            raise _refused(text, f"an axis where {token!r} stands")


def _product(tokens: list[str], text: str) -> Axis:
    """What stands between round brackets, of which the first is read."""
    before: list[str] = []
    blocks: tuple[Block, ...] = ()
    after: list[str] = []
    while tokens:
        token = tokens.pop(0)
        if token == ")":
            return Axis(tuple(before), blocks, tuple(after))
        if token == "[" and not blocks:
            blocks = tuple(_blocks(tokens, text))
        elif token.isidentifier():
            (after if blocks else before).append(token)
        else:
            raise _refused(text, f"a name or one [ ] where {token!r} stands")
    raise _refused(text, "a ) at the end")


def _blocks(tokens: list[str], text: str) -> Iterator[Block]:
    tensor = ""
    names: list[str] = []
    while tokens:
        token = tokens.pop(0)
        if token in ("|", "]"):
            if not tensor:
                raise _refused(text, "a tensor's name in every block: [wq: head_dim | ...]")
            yield Block(tensor, tuple(names))
            tensor, names = "", []
            if token == "]":
                return
        elif token.endswith(":") and not tensor:
            tensor = token[:-1]
        elif token.isidentifier() and tensor:
            names.append(token)
        else:
            raise _refused(text, f"a block such as 'wq: heads head_dim' where {token!r} stands")
    raise _refused(text, "a ] after the blocks")


def _refused(text: str, needed: str) -> OptionError:
    return OptionError(
        saw=f"the pattern {text!r}",
        needed=needed,
        do="write it like 'wq: (heads head_dim) embed_dim'; docs/layouts.md tells more",
    )
