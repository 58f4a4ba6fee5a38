"""Patterns of stored tensors, in the vocabulary of einops, with names for fused tensors.

    wq: (heads head_dim) embed_dim                                  a matrix; rows head by head
    embed_dim ([wq: heads head_dim | wk: heads head_dim])           two side by side in one axis
    (kv_heads [wq: group head_dim | wk: head_dim | wv: head_dim]) embed_dim
                                              for each kv head: its query heads, its key, its value

A pattern lists axes. An axis is a name, or names in round brackets, the slowest first. Square
brackets fuse: blocks one after the other, each with the tensor it belongs to and its own names.
Both directions of a conversion follow from the pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, SupportsIndex

from headwise.errors import DTypeError, OptionError, ShapeError
from headwise.function.weights import AXES, CHANNELS, QUERIES, ROTATED, WIDER, State
from headwise.support.text import nearest_counts

if TYPE_CHECKING:
    import torch
    from torch import Tensor


# A canonical axis, and the names that a pattern may write it by instead, the slowest first.
Splits = Mapping[str, tuple[str, ...]]
GROUPED: Splits = {"heads": ("kv_heads", "group")}


def unpack_tensor(
    pattern: Pattern, stored: Tensor, sizes: Mapping[str, int], splits: Splits = GROUPED
) -> dict[str, Tensor]:
    """Return the canonical tensors that ``stored`` holds, as views where possible."""
    parts = [stored]
    if pattern.fused is not None:
        axis, at = pattern.axes[pattern.fused], pattern.fused
        lengths = [product_of_sizes(block.names, sizes) for block in axis.blocks]
        opened = stored.unflatten(at, axis.around(sum(lengths), sizes))
        parts = list(opened.split(lengths, dim=at + 1))
    canonical = {}
    for tensor, part in zip(pattern.tensors, parts, strict=True):
        names = pattern.names_of(tensor)
        groups = names_by_canonical_axis(tensor, names, splits)
        opened = part.reshape([sizes[name] for name in names])
        order = [names.index(name) for group in groups for name in group]
        canonical[tensor] = opened.permute(order).reshape(
            [product_of_sizes(x, sizes) for x in groups]
        )
    return canonical


def pack_tensors(
    pattern: Pattern,
    canonical: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    splits: Splits = GROUPED,
) -> Tensor:
    """Return the stored tensor, which shares no memory with the canonical ones."""
    import torch

    parts = []
    for tensor in pattern.tensors:
        names, whole = pattern.names_of(tensor), canonical[tensor]
        groups = names_by_canonical_axis(tensor, names, splits)
        fitting = tuple(product_of_sizes(group, sizes) for group in groups)
        if tuple(whole.shape) != fitting:
            raise ShapeError(
                saw=f"{tensor} of shape {tuple(whole.shape)}",
                needed=f"{fitting}, for the axes {'; '.join(' '.join(group) for group in groups)}",
                do="choose a layout that has these axes apart: headwise layouts lists them",
            )
        flat = [name for group in groups for name in group]
        opened = whole.reshape([sizes[name] for name in flat])
        shape = [product_of_sizes(axis.names_of(tensor), sizes) for axis in pattern.axes]
        parts.append(opened.permute([flat.index(name) for name in names]).reshape(shape))
    if pattern.fused is None:
        [part], [tensor] = parts, pattern.tensors
        home = canonical[tensor].untyped_storage().data_ptr()
        is_own = part.untyped_storage().data_ptr() != home
        return part if is_own else part.clone(memory_format=torch.contiguous_format)
    axis, at = pattern.axes[pattern.fused], pattern.fused
    require_one_dtype({tensor: canonical[tensor].dtype for tensor in pattern.tensors})
    blocks = [
        part.unflatten(at, axis.around(product_of_sizes(block.names, sizes), sizes))
        for part, block in zip(parts, axis.blocks, strict=True)
    ]
    return torch.cat(blocks, dim=at + 1).flatten(at, at + 2)


def canonical_shape(
    pattern: Pattern, tensor: str, sizes: Mapping[str, int], splits: Splits = GROUPED
) -> tuple[int, ...]:
    names = pattern.names_of(tensor)
    return tuple(
        product_of_sizes(group, sizes) for group in names_by_canonical_axis(tensor, names, splits)
    )


def names_by_canonical_axis(
    tensor: str, names: tuple[str, ...], splits: Splits = GROUPED
) -> list[tuple[str, ...]]:
    """Return, for each canonical axis of a tensor, its names in a pattern.

    A tensor outside of attention has its names as axes, in alphabetical order.

    Raises:
        OptionError: names are missing, left over, or written twice.
    """
    axes = AXES.get(tensor) or tuple(sorted(names))
    groups = [_find_names_of_canonical_axis(axis, names, splits) for axis in axes]
    used = [name for group in groups for name in group or ()]
    if None in groups or sorted(used) != sorted(names):
        raise OptionError(
            saw=f"{tensor} with the axes {' '.join(names) or '(none)'}",
            needed=f"its axes, each once: {' '.join(axes)}",
            do="write kv_heads and group for heads where rows are grouped; a layout may say "
            "other splits",
        )
    return [group for group in groups if group is not None]


def _find_names_of_canonical_axis(
    axis: str, names: tuple[str, ...], splits: Splits
) -> tuple[str, ...] | None:
    spelling: str | None = axis
    while spelling is not None:
        if spelling in names:
            return (spelling,)
        split = splits.get(spelling)
        if split is not None and all(name in names for name in split):
            return split
        spelling = WIDER.get(spelling)
    return None


def require_one_dtype(dtypes: Mapping[str, torch.dtype]) -> None:
    if len(set(dtypes.values())) > 1:
        raise DTypeError(
            saw=", ".join(f"{tensor} in {dtype}" for tensor, dtype in dtypes.items()),
            needed="one dtype: here they are fused in one tensor",
            do="cast them first, where the rounding is known to be wanted",
        )


def to_half_split(state: State, *, width: int, rotated: tuple[str, ...] = ROTATED) -> State:
    """Reorder the first ``width`` channels from pairs (2i, 2i + 1) to (i, i + width / 2)."""
    shape = (width // 2, 2)
    return {
        n: _reorder_channels(n, x, width, shape) if n in rotated else x for n, x in state.items()
    }


def to_interleaved(state: State, *, width: int, rotated: tuple[str, ...] = ROTATED) -> State:
    """Reorder the first ``width`` channels from pairs (i, i + width / 2) to (2i, 2i + 1)."""
    shape = (2, width // 2)
    return {
        n: _reorder_channels(n, x, width, shape) if n in rotated else x for n, x in state.items()
    }


def _reorder_channels(name: str, x: Tensor, width: int, shape: tuple[int, int]) -> Tensor:
    import torch

    axis = _find_channel_axis(name)
    rotated, rest = x.split([width, x.shape[axis] - width], dim=axis)
    turned = rotated.unflatten(axis, shape).transpose(axis, axis + 1).flatten(axis, axis + 1)
    return turned if not rest.shape[axis] else torch.cat([turned, rest], dim=axis)


def _find_channel_axis(name: str) -> int:
    return next(dim for dim, axis in enumerate(AXES[name]) if axis in CHANNELS)


def roll_query_channels(state: State, *, by: int) -> State:
    """Move the last ``by`` channels of each head's queries to its front; the first, if negative."""
    return {n: x.roll(by, _find_channel_axis(n)) if n in QUERIES else x for n, x in state.items()}


_TOKEN = re.compile(r"\s*(?:([A-Za-z_][\w.{}]*:?)|([()\[\]|])|(\S))")


@dataclass(frozen=True)
class PatternBlock:
    """One tensor's part of a fused axis; no names mean one entry."""

    tensor: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class PatternAxis:
    """One axis of a stored tensor: ``before`` is slower than the blocks, ``after`` faster.

    Without blocks all names are in ``before``.
    """

    before: tuple[str, ...]
    blocks: tuple[PatternBlock, ...] = ()
    after: tuple[str, ...] = ()

    def names_of(self, tensor: str) -> tuple[str, ...]:
        inner = next((block.names for block in self.blocks if block.tensor == tensor), ())
        return (*self.before, *inner, *self.after)

    def size(self, sizes: Mapping[str, int]) -> int:
        """Return the length of the axis. KeyError for a name without a size."""
        around = product_of_sizes((*self.before, *self.after), sizes)
        blocks = [product_of_sizes(block.names, sizes) for block in self.blocks]
        return around * (sum(blocks) if blocks else 1)

    def around(self, length: int, sizes: Mapping[str, int]) -> tuple[int, int, int]:
        """Return the axis as three: what is before, ``length`` of the blocks, and what is after."""
        before, after = (product_of_sizes(names, sizes) for names in (self.before, self.after))
        return before, length, after


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern."""

    axes: tuple[PatternAxis, ...]  # of the stored tensor
    tensors: tuple[str, ...]  # what it holds, in stored order
    fused: int | None  # the number of the axis that is fused; None where it holds one tensor alone

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the stored tensor. KeyError for a name without a size."""
        return tuple(axis.size(sizes) for axis in self.axes)

    def names_of(self, tensor: str) -> tuple[str, ...]:
        return tuple(name for axis in self.axes for name in axis.names_of(tensor))

    def axis_names(self) -> set[str]:
        return {name for tensor in self.tensors for name in self.names_of(tensor)}


@dataclass(frozen=True)
class LeadingName:
    """Name that an axis of a pattern begins with; in ``each_block``, or before all of them."""

    dim: int
    name: str
    each_block: bool


def find_axis_led_by(pattern: Pattern, names: Iterable[str]) -> LeadingName | None:
    """Return the axis that begins with one of these names; None if no axis has any.

    Raises:
        OptionError: an axis has one of the names at another place: its shares are no slices.
    """
    names = frozenset(names)
    for dim, axis in enumerate(pattern.axes):
        if axis.before and axis.before[0] in names:
            return LeadingName(dim, axis.before[0], each_block=False)
        firsts = [block.names[:1] for block in axis.blocks]
        if (
            not axis.before
            and firsts
            and all(names.issuperset(first) and first for first in firsts)
        ):
            return LeadingName(dim, firsts[0][0], each_block=True)
        if inner := sorted(names & {n for t in pattern.tensors for n in axis.names_of(t)}):
            raise OptionError(
                saw=f"the axis of {', '.join(pattern.tensors)} that is divided by {inner[0]}",
                needed=f"{inner[0]} as the slowest name of the axis, or of each of its blocks",
                do="leave the name out of the names that processes divide",
            )
    return None


@cache
def parse_pattern(text: str) -> Pattern:
    """Parse a pattern; raise OptionError, which quotes the wrong token, for a text that is none."""
    tokens = _tokenize_pattern(text)
    whole = None
    if tokens and tokens[0].endswith(":"):
        whole = tokens.pop(0)[:-1]
    axes = tuple(_parse_axes(tokens, text))
    fused = [number for number, axis in enumerate(axes) if axis.blocks]
    if (whole is None) != (len(fused) == 1) or len(fused) > 1:
        raise _pattern_error(text, "either one tensor's name before its axes, or one pair of []")
    if whole is not None:
        return Pattern(axes, (whole,), None)
    tensors = tuple(block.tensor for block in axes[fused[0]].blocks)
    if len(set(tensors)) < len(tensors):
        raise _pattern_error(text, "every tensor in one block")
    return Pattern(axes, tensors, fused[0])


def _tokenize_pattern(text: str) -> list[str]:
    tokens = []
    for name, sign, other in _TOKEN.findall(text):
        if other:
            raise _pattern_error(text, f"names, : and ()[]|, not {other!r}")
        tokens.append(name or sign)
    return tokens


def _parse_axes(tokens: list[str], text: str) -> Iterator[PatternAxis]:
    while tokens:
        token = tokens.pop(0)
        if token == "(":
            yield _parse_product_axis(tokens, text)
        elif token.isidentifier():
            yield PatternAxis((token,))
        else:
            raise _pattern_error(text, f"an axis where {token!r} stands")


def _parse_product_axis(tokens: list[str], text: str) -> PatternAxis:
    before: list[str] = []
    blocks: tuple[PatternBlock, ...] = ()
    after: list[str] = []
    while tokens:
        token = tokens.pop(0)
        if token == ")":
            return PatternAxis(tuple(before), blocks, tuple(after))
        if token == "[" and not blocks:
            blocks = tuple(_parse_blocks(tokens, text))
        elif token.isidentifier():
            (after if blocks else before).append(token)
        else:
            raise _pattern_error(text, f"a name or one [ ] where {token!r} stands")
    raise _pattern_error(text, "a ) at the end")


def _parse_blocks(tokens: list[str], text: str) -> Iterator[PatternBlock]:
    tensor = ""
    names: list[str] = []
    while tokens:
        token = tokens.pop(0)
        if token in ("|", "]"):
            if not tensor:
                raise _pattern_error(text, "a tensor's name in every block: [wq: head_dim | ...]")
            yield PatternBlock(tensor, tuple(names))
            tensor, names = "", []
            if token == "]":
                return
        elif token.endswith(":") and not tensor:
            tensor = token[:-1]
        elif token.isidentifier() and tensor:
            names.append(token)
        else:
            raise _pattern_error(
                text, f"a block such as 'wq: heads head_dim' where {token!r} stands"
            )
    raise _pattern_error(text, "a ] after the blocks")


def _pattern_error(text: str, needed: str) -> OptionError:
    return OptionError(
        saw=f"the pattern {text!r}",
        needed=needed,
        do="write it like 'wq: (heads head_dim) embed_dim'; see Weight layouts in the docs",
    )


def product_of_sizes(names: Iterable[str], sizes: Mapping[str, int]) -> int:
    return prod([sizes[name] for name in names])


Sizes = dict[str, int]
Shape = tuple[int, ...]
COUNTS_OF_HEADS = ("heads", "kv_heads")


def solve_axis_sizes(
    shapes: Mapping[str, tuple[Pattern, Shape]],
    known: Mapping[str, int],
    splits: Mapping[str, tuple[str, ...]],
) -> Sizes:
    """Return the known sizes, counts such as heads, and every size that the shapes determine.

    Raises:
        ShapeError: a shape does not fit its pattern, or a count does not divide.
        OptionError: a size stays undetermined; the message names the count to give.
    """
    for name, count in known.items():
        if isinstance(count, bool) or not isinstance(count, SupportsIndex):
            raise OptionError(
                saw=f"{name}={count!r:.40}", needed="a whole number", do=f"give {name} as an int"
            )
    if any(size < 1 for size in known.values()):
        raise OptionError(
            saw=_join_sizes(known),
            needed="counts of at least 1",
            do="give the counts that the model has; leave out what it has not",
        )
    sizes = solve_products(dict(known), splits)
    equations = []
    for name, (pattern, shape) in shapes.items():
        if len(shape) != len(pattern.axes):
            raise ShapeError(
                saw=f"{name} of shape {shape}",
                needed=f"{len(pattern.axes)} axes",
                do="name the layout that the file is really in",
            )
        equations += [(name, axis, n) for axis, n in zip(pattern.axes, shape, strict=True)]
    progress = True
    while progress:
        progress = False
        for name, axis, length in equations:
            unknown = sorted(_names_in_axis(axis) - sizes.keys())
            size = _solve_axis(name, axis, length, sizes, unknown[0]) if len(unknown) == 1 else None
            if size is not None:
                sizes[unknown[0]] = size
                sizes = solve_products(sizes, splits)
                progress = True
    _check_equations(equations, sizes)
    return sizes


def _solve_axis(
    name: str, axis: PatternAxis, length: int, sizes: Sizes, unknown: str
) -> int | None:
    """Solve an axis for its unknown name; the length of the axis is linear in that size."""
    at_1, at_2 = (axis.size(sizes | {unknown: n}) for n in (1, 2))
    step = at_2 - at_1
    if not step:
        return None
    size, rest = divmod(length - at_1 + step, step)
    if rest or size < 1:
        given = {key: sizes[key] for key in sorted(_names_in_axis(axis) & sizes.keys())}
        fitting = [
            f"{count} {near}"
            for count in sorted(given.keys() & COUNTS_OF_HEADS)
            if (near := _nearest_fitting(axis, length, sizes, count, unknown))
        ]
        raise ShapeError(
            saw=f"{name} has an axis of {length}, with {_join_sizes(given)}",
            needed=f"a whole number of {unknown}" + "".join(f"; {text} fit" for text in fitting),
            do="give the counts that the model has, or the layout that the file is really in",
        )
    return size


def _nearest_fitting(axis: PatternAxis, length: int, sizes: Sizes, count: str, unknown: str) -> str:
    def fits(n: int) -> bool:
        at_1, at_2 = (axis.size(sizes | {count: n, unknown: size}) for size in (1, 2))
        size, rest = divmod(length - at_1 + (at_2 - at_1), at_2 - at_1)
        return not rest and size > 0

    return nearest_counts(sizes[count], fits, most=length)


def solve_products(sizes: Sizes, splits: Mapping[str, tuple[str, ...]]) -> Sizes:
    """Return the sizes with those that follow from products in which one factor is unknown.

    Raises:
        ShapeError: a count that does not divide, or counts that contradict each other.
    """
    sizes = dict(sizes)
    for whole, parts in splits.items():
        unknown = [name for name in parts if name not in sizes]
        others = product_of_sizes((name for name in parts if name in sizes), sizes)
        if whole in sizes and len(unknown) == 1:
            size, rest = divmod(sizes[whole], others)
            if rest:
                given = {name: sizes[name] for name in (whole, *parts) if name in sizes}
                raise ShapeError(
                    saw=_join_sizes(given),
                    needed=f"{whole} that {' times '.join(given.keys() - {whole})} divides",
                    do="give the counts that the model has",
                )
            sizes[unknown[0]] = size
        elif not unknown and sizes.setdefault(whole, others) != others:
            times = f"which is {' times '.join(parts)}" if parts else "whatever the model"
            raise ShapeError(
                saw=_join_sizes({name: sizes[name] for name in (whole, *parts)}),
                needed=f"{whole} {others}, {times}",
                do="give the counts that the model has, or the layout that the file is really in",
            )
    return sizes


def _check_equations(equations: Iterable[tuple[str, PatternAxis, int]], sizes: Sizes) -> None:
    for name, axis, length in equations:
        missing = sorted(_names_in_axis(axis) - sizes.keys())
        if missing:
            # A model's config says heads and kv_heads, and never how many of one share the other.
            counts = {
                "heads": ("num_attention_heads", {"heads", "group"}),
                "kv_heads": ("num_key_value_heads", {"kv_heads"}),
            }
            wanted = [name for name, (_, of) in counts.items() if of & {*missing}]
            slots = " and ".join(f"{{{name}}}" for name in wanted)
            words = " and ".join(counts[name][0] for name in wanted)
            raise OptionError(
                saw=f"{name}, an axis of {length}; known are {_join_sizes(sizes)}",
                needed=f"the sizes of {', '.join(missing)}",
                do=f"give {slots}, which config.json calls {words}"
                if wanted
                else f"give {missing[0]}, as the model has it",
                parameter=dict.fromkeys(wanted, ()),
            )
        if axis.size(sizes) != length:
            raise ShapeError(
                saw=f"{name} has an axis of {length}",
                needed=f"{axis.size(sizes)}, with {_join_sizes(sizes)}",
                do="give the counts that the model has, or the layout that the file is really in",
            )


@cache
def _names_in_axis(axis: PatternAxis) -> frozenset[str]:
    inner = {name for block in axis.blocks for name in block.names}
    return frozenset({*axis.before, *inner, *axis.after})


def _join_sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items()) or "nothing"
