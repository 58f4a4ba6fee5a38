"""Axis sizes, solved from the shapes of tensors and the known counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import SupportsIndex

from headwise.errors import OptionError, ShapeError
from headwise.layouts.pattern import Pattern, PatternAxis, product_of_sizes
from headwise.support.text import nearest_counts

Sizes = dict[str, int]
Shape = tuple[int, ...]
COUNTS_OF_HEADS = ("heads", "kv_heads")


def solve_axis_sizes(
    shapes: Mapping[str, tuple[Pattern, Shape]],
    known: Mapping[str, int],
    splits: Mapping[str, tuple[str, ...]],
) -> Sizes:
    """Return the known sizes and every size that the shapes determine.

    Args:
        shapes: tensor name -> its pattern and its shape.
        known: counts such as heads, which follow from no shape.
        splits: axis -> the names that it is also written by, whose product it is.

    Raises:
        ShapeError: a shape does not fit its pattern, or a count does not divide.
        OptionError: a size stays undetermined; the message names the count to give.
    """
    _require_counts(known)
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


def _require_counts(known: Mapping[str, int]) -> None:
    for name, count in known.items():
        if isinstance(count, bool) or not isinstance(count, SupportsIndex):
            raise OptionError(
                saw=f"{name}={count!r:.40}",
                needed="a whole number",
                do=f"give {name} as an int",
            )
    if any(size < 1 for size in known.values()):
        raise OptionError(
            saw=_join_sizes(known),
            needed="counts of at least 1",
            do="give the counts that the model has; leave out what it has not",
        )


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
    """Return the nearest counts with which the axis has a whole number of the unknown."""

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
            raise OptionError(
                saw=f"{name}, an axis of {length}; known are {_join_sizes(sizes)}",
                needed=f"the sizes of {', '.join(missing)}",
                do=f"give {_join_names(f'{{{name}}}' for name in wanted)}, which config.json calls "
                f"{_join_names(counts[name][0] for name in wanted)}"
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


def _join_names(names: Iterable[str]) -> str:
    return " and ".join(names)


@cache
def _names_in_axis(axis: PatternAxis) -> frozenset[str]:
    inner = {name for block in axis.blocks for name in block.names}
    return frozenset({*axis.before, *inner, *axis.after})


def _join_sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items()) or "nothing"
