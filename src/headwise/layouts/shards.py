"""Division of a checkpoint's tensors over tensor-parallel processes, by the axes a layout names.

A share has the pattern of the whole tensor, with fewer heads, hidden channels or tokens of the
vocabulary. It is a slice of one axis, or a slice of each block in it: a process that holds
[gate | up] holds a part of both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headwise.errors import OptionError, ShapeError
from headwise.layouts import pattern as notation
from headwise.layouts._layout import Layout
from headwise.layouts.modules import NamedPosition, find_modules, locate_weight_outside_attention
from headwise.layouts.pattern import LeadingName, Pattern, PatternAxis, Sizes, find_axis_led_by

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ShardedAxis:
    """Division of one stored tensor."""

    dim: int  # the axis
    # lengths of the blocks in a share, each divided by itself; () for a single one
    blocks: tuple[int, ...] = ()
    copies: int = 1  # neighbouring shares that hold the same slice, of fewer kv heads than shares

    def join(self, shares: Sequence[Tensor]) -> Tensor:
        distinct = shares[:: self.copies]
        if not self.blocks:
            return torch.cat(list(distinct), dim=self.dim)
        opened = [share.split(list(self.blocks), dim=self.dim) for share in distinct]
        blocks = [block for same in zip(*opened, strict=True) for block in same]
        return torch.cat(blocks, dim=self.dim)

    def split(self, whole: Tensor, count: int) -> list[Tensor]:
        """Return the shares of this many processes; views where a share is one slice."""
        distinct = count // self.copies
        lengths = self.blocks or (whole.shape[self.dim] // distinct,)
        blocks = whole.split([length * distinct for length in lengths], dim=self.dim)
        slices = [
            block.split(length, dim=self.dim) for block, length in zip(blocks, lengths, strict=True)
        ]
        parts = [
            same[0] if len(same) == 1 else torch.cat(same, dim=self.dim)
            for same in zip(*slices, strict=True)
        ]
        return [part for part in parts for _ in range(self.copies)]


@dataclass(frozen=True)
class ShardMap:
    """Division of all tensors of a checkpoint; a tensor without an axis is the same everywhere."""

    count: int  # tensor-parallel processes
    axes: Mapping[str, ShardedAxis]  # full name -> division

    def join(self, name: str, shares: Sequence[Tensor]) -> Tensor:
        axis = self.axes.get(name)
        return shares[0] if axis is None else axis.join(shares)

    def split(self, name: str, whole: Tensor) -> list[Tensor]:
        axis = self.axes.get(name)
        return [whole] * self.count if axis is None else axis.split(whole, self.count)

    def whole_shape(self, name: str, share: tuple[int, ...]) -> tuple[int, ...]:
        dim, distinct = self._divided_axis(name)
        return tuple(n * distinct if axis == dim else n for axis, n in enumerate(share))

    def share_shape(self, name: str, whole: tuple[int, ...]) -> tuple[int, ...]:
        dim, distinct = self._divided_axis(name)
        return tuple(n // distinct if axis == dim else n for axis, n in enumerate(whole))

    def _divided_axis(self, name: str) -> tuple[int | None, int]:
        axis = self.axes.get(name)
        return (None, 1) if axis is None else (axis.dim, self.count // axis.copies)


def derive_shard_map_from_shares(
    layout: Layout, shares: Shapes, count: int, known: Mapping[str, int]
) -> ShardMap:
    """Return the division of tensors, from the shapes in one of ``count`` shares.

    ``known`` counts are those of the whole model.

    Raises:
        OptionError, ShapeError: names, shapes or counts that do not fit the layout.
    """
    groups = _group_tensors(layout, shares)
    here = {
        name: max(size // count, 1) if name in layout.sharded else size
        for name, size in known.items()
    }
    axes: dict[str, ShardedAxis] = {}
    for group in groups:
        for name, axis in group.also.items():
            dim = _find_alternative_sharded_dim(groups, shares, name, axis, count)
            if dim is not None:
                axes[name] = ShardedAxis(dim)
        rest = {name: p for name, p in group.patterns.items() if name not in axes}
        rest_group = replace(group, patterns=rest)
        axes |= _sharded_axes_from_shares(layout, rest_group, shares, count, known, here)
    return ShardMap(count, axes)


def derive_shard_map_from_whole(
    layout: Layout, wholes: Shapes, count: int, known: Mapping[str, int], *, also: bool = False
) -> ShardMap:
    """Return the division of whole tensors over this many processes.

    ``also`` is True for the axes in ``layout.sharded_also``.

    Raises:
        OptionError, ShapeError: see `derive_shard_map_from_shares`; and counts that the processes
            do not divide.
    """
    axes: dict[str, ShardedAxis] = {}
    for group in _group_tensors(layout, wholes):
        sizes = _solve_group_sizes(layout, group, wholes, known)
        for name, pattern in group.patterns.items():
            names = group.also[name] if also and name in group.also else layout.sharded
            sharded = find_axis_led_by(pattern, names)
            if sharded is not None:
                axes[name] = _sharded_axis_of_whole_tensor(name, pattern, sharded, count, sizes)
    return ShardMap(count, axes)


def find_known_length(
    layout: Layout, shares: Shapes, known: Mapping[str, int]
) -> tuple[str, int, int] | None:
    """Return a tensor whose length is known: its name, the length in a share, and the whole one.

    None where the known counts do not give any. The number of shares is the quotient.
    """
    sizes = notation.solve_products(dict(known), layout.axis_splits_with_defaults)
    for module in find_modules(layout, shares):
        for name, local in module.tensors.items():
            pattern = layout.patterns[local]
            sharded = find_axis_led_by(pattern, layout.sharded)
            if sharded is None or (sharded.name == "kv_heads" and pattern.fused is None):
                continue  # kv heads may be repeated
            axis = pattern.axes[sharded.dim]
            if {n for tensor in pattern.tensors for n in axis.names_of(tensor)} <= sizes.keys():
                return name, shares[name][sharded.dim], axis.size(sizes)
    return None


@dataclass(frozen=True)
class _Group:
    """Tensors that share their sizes: a module of attention, or all others of one place."""

    patterns: Mapping[str, Pattern]  # full name -> pattern
    is_attention: bool  # True for a module
    # full name -> the other axis that some code divides
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def _group_tensors(layout: Layout, names: Iterable[str]) -> list[_Group]:
    names = list(names)
    modules = find_modules(layout, names)
    if not layout.sharded or not modules:
        raise OptionError(
            saw=f"{len(names)} tensors, among them {sorted(names)[:2]}, as shares of {layout.name}",
            needed="modules of a layout that names the axes which processes divide",
            do="join the shares by the tools of the framework that wrote them",
        )
    groups = [
        _Group({name: layout.patterns[local] for name, local in module.tensors.items()}, True)
        for module in modules
    ]
    inside = {name for module in modules for name in module.tensors}
    roots = {module.place.root for module in modules}
    places: dict[NamedPosition, dict[str, str]] = {}  # place -> full name -> template
    for name in names:
        match = None if name in inside else locate_weight_outside_attention(layout, name, roots)
        if match is not None:
            places.setdefault(replace(match[1], role=""), {})[name] = match[0]
    for templates in places.values():
        patterns = {n: notation.parse_pattern(layout.outside[at]) for n, at in templates.items()}
        also = layout.sharded_also
        others = {name: (also[at],) for name, at in templates.items() if at in also}
        groups.append(_Group(patterns, False, others))
    return groups


def _find_alternative_sharded_dim(
    groups: Iterable[_Group], shares: Shapes, name: str, axis: tuple[str, ...], count: int
) -> int | None:
    """Return the axis of an embedding that is divided by its other axis; None if it is not."""
    lengths = {
        shares[other][dim]
        for group in groups
        for other, pattern in group.patterns.items()
        if other not in group.also
        for dim, each in enumerate(pattern.axes)
        if each == PatternAxis(axis)
    }
    patterns = next(group.patterns for group in groups if name in group.patterns)
    dim = patterns[name].axes.index(PatternAxis(axis))
    return dim if {shares[name][dim] * count} == lengths else None


def _sharded_axes_from_shares(
    layout: Layout,
    group: _Group,
    shares: Shapes,
    count: int,
    known: Mapping[str, int],
    known_here: Mapping[str, int],
) -> dict[str, ShardedAxis]:
    divided = {name: find_axis_led_by(p, layout.sharded) for name, p in group.patterns.items()}
    has_blocks = any(each and each.each_block for each in divided.values())
    needs_sizes = has_blocks or not group.is_attention
    sizes = _solve_group_sizes(layout, group, shares, known_here) if needs_sizes else {}
    axes = {}
    for name, sharded in divided.items():
        if sharded is not None:
            total = known.get(sharded.name)
            copies = _count_copies(group.patterns[name], sharded, count, total)
            if total is not None:
                _require_divisible(name, sharded.name, total, count // copies)
            lengths = _block_lengths(group.patterns[name], sharded, sizes)
            axes[name] = ShardedAxis(sharded.dim, lengths, copies)
    return axes


def _sharded_axis_of_whole_tensor(
    name: str, pattern: Pattern, sharded: LeadingName, count: int, sizes: Sizes
) -> ShardedAxis:
    copies = _count_copies(pattern, sharded, count, sizes[sharded.name])
    blocks = pattern.axes[sharded.dim].blocks if sharded.each_block else ()
    names = {block.names[0] for block in blocks} or {sharded.name}
    for each in sorted(names):
        _require_divisible(name, each, sizes[each], count // copies)
    share = {each: sizes[each] // (count // copies) for each in names}
    return ShardedAxis(sharded.dim, _block_lengths(pattern, sharded, sizes | share), copies)


def _solve_group_sizes(
    layout: Layout, group: _Group, shapes: Shapes, known: Mapping[str, int]
) -> Sizes:
    stored = {name: (pattern, shapes[name]) for name, pattern in group.patterns.items()}
    if group.is_attention:
        return notation.solve_axis_sizes(stored, known, layout.axis_splits_with_defaults)
    return notation.solve_axis_sizes(stored, {}, {})


def _block_lengths(pattern: Pattern, sharded: LeadingName, sizes: Sizes) -> tuple[int, ...]:
    if not sharded.each_block:
        return ()
    axis = pattern.axes[sharded.dim]
    after = notation.product_of_sizes(axis.after, sizes)
    return tuple(notation.product_of_sizes(block.names, sizes) * after for block in axis.blocks)


def _count_copies(pattern: Pattern, sharded: LeadingName, count: int, kv_heads: int | None) -> int:
    if sharded.name != "kv_heads" or pattern.fused is not None or kv_heads is None:
        return 1
    return count // kv_heads if count > kv_heads and count % kv_heads == 0 else 1


def _require_divisible(name: str, axis: str, size: int, count: int) -> None:
    if size % count:
        raise ShapeError(
            saw=f"{count} shares of {name}, which has {axis} {size}",
            needed=f"a number of shares that divides {axis}",
            do="choose another number of shares",
        )
