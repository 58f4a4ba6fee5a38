"""Moving a stored tensor to canonical ones and back: the two directions of one pattern.

Nothing is computed: every number keeps its bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.layouts.canonical import AXES, ROTATED, State

if TYPE_CHECKING:
    from torch import Tensor

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headwise.errors import DTypeError, OptionError, ShapeError
from headwise.layouts.canonical import WIDER
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
    canonical = {}
    for tensor, part in zip(pattern.tensors, parts, strict=True):
        names = pattern.names_of(tensor)
        groups = atoms(tensor, names, splits)
        opened = part.reshape([sizes[name] for name in names])
        order = [names.index(name) for group in groups for name in group]
        canonical[tensor] = opened.permute(order).reshape([product(x, sizes) for x in groups])
    return canonical


def pack(
    pattern: Pattern,
    canonical: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    splits: Splits = GROUPED,
) -> Tensor:
    """The stored tensor, in memory of its own."""
    import torch

    parts = []
    for tensor in pattern.tensors:
        names, whole = pattern.names_of(tensor), canonical[tensor]
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
        parts.append(opened.permute([flat.index(name) for name in names]).reshape(shape))
    if pattern.fused is None:
        [part], [tensor] = parts, pattern.tensors
        home = canonical[tensor].untyped_storage().data_ptr()
        is_own = part.untyped_storage().data_ptr() != home
        return part if is_own else part.clone(memory_format=torch.contiguous_format)
    axis, at = pattern.axes[pattern.fused], pattern.fused
    require_one_dtype({tensor: canonical[tensor].dtype for tensor in pattern.tensors})
    blocks = [
        part.unflatten(
            at,
            (product(axis.before, sizes), product(block.names, sizes), product(axis.after, sizes)),
        )
        for part, block in zip(parts, axis.blocks, strict=True)
    ]
    return torch.cat(blocks, dim=at + 1).flatten(at, at + 2)


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


def require_one_dtype(dtypes: Mapping[str, torch.dtype]) -> None:
    """Raise DTypeError where tensors that are fused, by their names, differ in it."""
    if len(set(dtypes.values())) > 1:
        raise DTypeError(
            saw=", ".join(f"{tensor} in {dtype}" for tensor, dtype in dtypes.items()),
            needed="one dtype: here they are fused in one tensor",
            do="cast them first, where the rounding is known to be wanted",
        )


def halves(state: State, *, width: int) -> State:
    """From neighbours, (2i, 2i + 1), to halves, (i, i + width / 2): the canonical order.

    The first ``width`` of head_dim are rotated; the rest stays where it is.
    """
    return {name: _reordered(name, x, width, (width // 2, 2)) for name, x in state.items()}


def neighbours(state: State, *, width: int) -> State:
    """From halves to neighbours."""
    return {name: _reordered(name, x, width, (2, width // 2)) for name, x in state.items()}


def _reordered(name: str, x: Tensor, width: int, shape: tuple[int, int]) -> Tensor:
    import torch

    if name not in ROTATED:
        return x
    axis = AXES[name].index("head_dim")
    rotated, rest = x.split([width, x.shape[axis] - width], dim=axis)
    turned = rotated.unflatten(axis, shape).transpose(axis, axis + 1).flatten(axis, axis + 1)
    return turned if not rest.shape[axis] else torch.cat([turned, rest], dim=axis)
