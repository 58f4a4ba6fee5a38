"""`verify`: whether two sets of tensors hold the same function, compared byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.layouts.layout import Layout
from headwise.layouts.places import modules_of
from headwise.layouts.plan import plan
from headwise.layouts.registry import layout
from headwise.layouts.sameness import same_bytes

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Difference:
    """A tensor that is another one in the second file.

    Attributes:
        name: in the second file.
        made_of: names in the first.
        what: the shapes or dtypes that differ, or how many entries and by how much at most.
    """

    name: str
    made_of: tuple[str, ...]
    what: str


@dataclass(frozen=True)
class Verification:
    """What was found.

    Attributes:
        same: how many tensors of the second file are those of the first, byte for byte.
        differences: those that are not.
        only_first: tensors of the first file that the second has nothing of.
        only_second: tensors of the second file that nothing of the first makes.
        conflicts: what the two layouts say of how weights are used, and say differently.
    """

    same: int
    differences: tuple[Difference, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    conflicts: Mapping[str, tuple[str, str]]

    def __bool__(self) -> bool:
        """Whether both hold the same function."""
        return not (self.differences or self.only_first or self.only_second or self.conflicts)


def verify(
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    first_layout: str | Layout,
    second_layout: str | Layout,
    *,
    progress: Progress | None = None,
    **known: int,
) -> Verification:
    """Move the first into the layout of the second, step by step, and compare every byte.

    Args:
        first: name -> tensor; read one after the other, so they may be memory-mapped.
        second: likewise.
        first_layout: the layout that the first are in, or its name.
        second_layout: that of the second.
        progress: told how many of how many steps are done.
        known: heads, and what else no shape tells.

    Raises:
        OptionError, ShapeError, DTypeError: see `headwise.layouts.plan.plan`.
    """
    source, target = layout(first_layout), layout(second_layout)
    conflicts = source.function.conflicts(target.function)
    roots = {module.place.root for module in modules_of(target, second)}
    root = roots.pop() if len(roots) == 1 else None
    steps = plan(first, source, target, accept=conflicts, root=root, **known)
    same, met = 0, set()
    differences: list[Difference] = []
    only_first: list[str] = []
    for number, step in enumerate(steps):
        made = step.run({name: first[name] for name in step.inputs})
        for name, tensor in made.items():
            if name not in second:
                only_first += step.inputs
                continue
            met.add(name)
            if same_bytes(tensor, second[name]):
                same += 1
            else:
                what = _what(tensor, second[name])
                differences.append(Difference(name, step.inputs, what))
        if progress is not None:
            progress(number + 1, len(steps))
    only_second = tuple(name for name in second if name not in met)
    return Verification(same, tuple(differences), tuple(only_first), only_second, conflicts)


def lines_of(found: Verification, *, most: int) -> list[str]:
    """What keeps two files from being the same, in words; at most so many of a kind."""
    lines = [
        f"{name}: {mine} in the first, {theirs} in the second"
        for name, (mine, theirs) in found.conflicts.items()
    ]
    kinds = [
        [f"{one.name}, of {', '.join(one.made_of)}: {one.what}" for one in found.differences],
        [f"{name}: in the first alone" for name in found.only_first],
        [f"{name}: in the second alone" for name in found.only_second],
    ]
    for kind in kinds:
        lines += kind[:most]
        if len(kind) > most:
            lines.append(f"and {len(kind) - most} more")
    return lines


def _what(a: Tensor, b: Tensor) -> str:
    for word in ("shape", "dtype"):
        mine, theirs = getattr(a, word), getattr(b, word)
        if mine != theirs:
            return f"{word} {_said(mine)} against {_said(theirs)}"
    if not a.is_floating_point():
        return f"{int((a != b).sum())} of {a.numel()} entries"
    # What is equal as numbers and not as bits, such as -0 and 0, counts as well.
    other = (a != b) & ~(a.isnan() & b.isnan())
    most = (a.double() - b.double()).abs().nan_to_num().max()
    signs = int(((a.signbit() != b.signbit()) & ~other).sum())
    zeros = f", and {signs} that differ in their sign alone" if signs else ""
    return f"{int(other.sum())} of {a.numel()} entries, by at most {float(most):.3g}{zeros}"


def _said(value: torch.Size | torch.dtype) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)
