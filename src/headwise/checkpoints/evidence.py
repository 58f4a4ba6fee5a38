"""Deciding between layouts by values: the same weights elsewhere, in a layout that is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from headwise.checkpoints.candidates import Candidate, heads_of
from headwise.checkpoints.detect import Detection, decided
from headwise.layouts.canonical import State
from headwise.layouts.sameness import differing, differing_part
from headwise.layouts.sizes import Sizes


def by_values(
    detection: Detection,
    state: Mapping[str, Tensor],
    reference: Detection,
    other: Mapping[str, Tensor],
    *,
    called: str = "the reference",
) -> Detection:
    """The candidates whose canonical tensors are the reference's, all rows of all modules.

    The first head is often the same in several layouts; the others are not. Where nobody said how
    many heads there are, or how much of them turns, every number that fits is tried.

    Args:
        detection: of the checkpoint in question.
        state: its tensors; read module by module, so they may be memory-mapped.
        reference: of the same weights elsewhere; where it has several candidates itself, any of
            them may agree.
        other: its tensors.
        called: how the reasons call it.
    """
    kept, refuted = [], dict(detection.refuted)
    known = [one for group in reference.candidates for one in _one_by_one(group[0])]
    for group in detection.candidates:
        found = _agreeing(_one_by_one(group[0]), state, known, other, called)
        if isinstance(found, Candidate):
            kept.append(tuple(one.narrowed(found.fits[0]) for one in group))
        else:
            refuted |= {one.layout.name: found for one in group}
    return decided(detection, kept, refuted, by="values")


def _agreeing(
    read: list[Candidate],
    state: Mapping[str, Tensor],
    known: list[Candidate],
    other: Mapping[str, Tensor],
    called: str,
) -> Candidate | str:
    """The first of the readings that one of the reference's agrees with; else why none does."""
    if not known:
        return f"{called} has no attention that is known"
    why = f"no number of heads fits both it and {called}"
    pairs = [(one, two) for one in read for two in known if _heads(one) == _heads(two)]
    for number, (one, two) in enumerate(pairs):
        found = _disagreement(one, state, two, other, called)
        if found is None:
            return one
        why = why if number else found
    return why


def _heads(one: Candidate) -> tuple[int, int]:
    return heads_of(one.fits[0])


def _one_by_one(one: Candidate) -> list[Candidate]:
    """A candidate for each of its sizes, and for every rotary_width that it may have."""
    return [
        replace(one, fits=(sizes | width,)) for sizes in one.fits for width in _widths(one, sizes)
    ]


def _widths(one: Candidate, sizes: Sizes) -> list[Sizes]:
    """All of the head comes first. Of two channels both pairings are one, so two decide nothing."""
    function, head_dim = one.layout.function, sizes["head_dim"]
    is_open = function.rotary == "interleaved" and function.rotary_width is None
    if not is_open or "rotary_width" in sizes:
        return [{}]
    return [{"rotary_width": width} for width in range(head_dim - head_dim % 2, 2, -2)]


def _disagreement(
    one: Candidate,
    state: Mapping[str, Tensor],
    known: Candidate,
    other: Mapping[str, Tensor],
    called: str,
) -> str | None:
    """What is the first to differ; None where nothing does."""
    if len(one.modules) != len(known.modules):
        return f"it has {len(one.modules)} modules, {called} {len(known.modules)}"
    conflicts = one.layout.function.conflicts(known.layout.function)
    for name, (mine, theirs) in conflicts.items():
        return f"{name}: {mine}; {known.layout.name}, {called}'s layout, has {theirs}"
    for number, module in enumerate(one.modules):
        x, y = _canonical(one, number, state), _canonical(known, number, other)
        if found := differing(x, y):
            parts = "; ".join(differing_part(name, x.get(name), y.get(name)) for name in found)
            before = f"; before it, {number} of {len(one.modules)} modules agree" if number else ""
            place = f"`{module.prefix}`" if module.prefix else "the module"
            return f"{place} differs from {called} in {parts}{before}"
    return None


def _canonical(one: Candidate, number: int, state: Mapping[str, Tensor]) -> State:
    reading = one.reading(one.fits[0], module=number)
    return reading.read({name: state[name] for name in reading.names})
