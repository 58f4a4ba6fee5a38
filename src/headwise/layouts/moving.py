"""Moving a stored tensor to canonical ones and back: the two directions of one pattern.

Nothing is computed: every number keeps its bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headwise.errors import DTypeError, OptionError, ShapeError
from headwise.layouts.canonical import AXES, WIDER
from headwise.layouts.pattern import Pattern
from headwise.layouts.sizes import product

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# A canonical axis, and the names that a pattern may write it by instead, the slowest first.
Splits = Mapping[str, tuple[str, ...]]
GROUPED: Splits = {"heads": ("kv_heads", "group")}


def unpack(
    pattern: Pattern, stored: Tensor, sizes: Mapping[str, int], splits: Splits = GROUPED
) -> dict[str, Tensor]:
    """The canonical tensors that ``stored`` holds; views of it where that can be."""
    parts = [stored]
    if pattern.fused is not None:
        axis = pattern.axes[pattern.fused]
        lengths = [product(block.names, sizes) for block in axis.blocks]
        around = (product(axis.before, sizes), sum(lengths), product(axis.after, sizes))
        opened = stored.unflatten(pattern.fused, around)
        parts = list(opened.split(lengths, dim=pattern.fused + 1))
    return {
        tensor: _to_canonical(pattern, tensor, part, sizes, splits)
        for tensor, part in zip(pattern.tensors, parts, strict=True)
    }


def pack(
    pattern: Pattern,
    canonical: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    splits: Splits = GROUPED,
) -> Tensor:
    """The stored tensor, in memory of its own."""
    import torch

    parts = [
        _from_canonical(pattern, tensor, canonical[tensor], sizes, splits)
        for tensor in pattern.tensors
    ]
    if pattern.fused is None:
        [tensor] = pattern.tensors
        is_own = not _shares(parts[0], canonical[tensor])
        return parts[0] if is_own else parts[0].clone(memory_format=torch.contiguous_format)
    axis, at = pattern.axes[pattern.fused], pattern.fused
    require_one_dtype({tensor: canonical[tensor].dtype for tensor in pattern.tensors})
    opened = [
        part.unflatten(
            at,
            (product(axis.before, sizes), product(block.names, sizes), product(axis.after, sizes)),
        )
        for part, block in zip(parts, axis.blocks, strict=True)
    ]
    return torch.cat(opened, dim=at + 1).flatten(at, at + 2)


def canonical_shape(
    pattern: Pattern, tensor: str, sizes: Mapping[str, int], splits: Splits = GROUPED
) -> tuple[int, ...]:
    """The shape of a canonical tensor that a stored one holds."""
    names = pattern.names_of(tensor)
    return tuple(product(group, sizes) for group in atoms(tensor, names, splits))


def atoms(tensor: str, names: tuple[str, ...], splits: Splits = GROUPED) -> list[tuple[str, ...]]:
    """For each canonical axis of a tensor, the names that a pattern writes it by.

    A tensor outside of attention has its names as axes, in alphabetical order.

    Raises:
        OptionError: names are missing, left over, or written twice.
    """
    axes = AXES.get(tensor) or tuple(sorted(names))
    found = [_spelled(axis, names, splits) for axis in axes]
    used = [name for group in found for name in group or ()]
    if None in found or sorted(used) != sorted(names):
        raise OptionError(
            saw=f"{tensor} with the axes {' '.join(names) or '(none)'}",
            needed=f"its axes, each once: {' '.join(axes)}",
            do="write kv_heads and group for heads where rows are grouped; a layout may say "
            "other splits",
        )
    return [group for group in found if group is not None]


def _spelled(axis: str, names: tuple[str, ...], splits: Splits) -> tuple[str, ...] | None:
    for spelling in (axis, WIDER.get(axis)):
        if spelling is None:
            continue
        if spelling in names:
            return (spelling,)
        split = splits.get(spelling)
        if split is not None and all(name in names for name in split):
            return split
    return None


def _to_canonical(
    pattern: Pattern, tensor: str, part: Tensor, sizes: Mapping[str, int], splits: Splits
) -> Tensor:
    names = pattern.names_of(tensor)
    groups = atoms(tensor, names, splits)
    opened = part.reshape([sizes[name] for name in names])
    order = [names.index(name) for group in groups for name in group]
    return opened.permute(order).reshape([product(group, sizes) for group in groups])


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _from_canonical(
    pattern: Pattern, tensor: str, whole: Tensor, sizes: Mapping[str, int], splits: Splits
) -> Tensor:
    """The part of the stored tensor, with its axes."""
    names = pattern.names_of(tensor)
    groups = atoms(tensor, names, splits)
    fitting = tuple(product(group, sizes) for group in groups)
    if tuple(whole.shape) != fitting:
        raise ShapeError(
            saw=f"{tensor} of shape {tuple(whole.shape)}",
            needed=f"{fitting}, for the axes {'; '.join(' '.join(group) for group in groups)}",
            do="choose a layout that has these axes apart: headwise layouts lists them",
        )
    flat = [name for group in groups for name in group]
    opened = whole.reshape([sizes[name] for name in flat])
    shape = [product(axis.names_of(tensor), sizes) for axis in pattern.axes]
    return opened.permute([flat.index(name) for name in names]).reshape(shape)


def require_one_dtype(dtypes: Mapping[str, torch.dtype]) -> None:
    """Raise DTypeError where tensors that are fused, by their names, differ in it."""
    if len(set(dtypes.values())) > 1:
        raise DTypeError(
            saw=", ".join(f"{tensor} in {dtype}" for tensor, dtype in dtypes.items()),
            needed="one dtype: here they are fused in one tensor",
            do="cast them first, where the rounding is known to be wanted",
        )
