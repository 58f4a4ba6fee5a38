"""Deciding between layouts by values: the same weights elsewhere, in a layout that is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from headwise.layouts.canonical import State
from headwise.layouts.detect import Candidate, Detection, decided
from headwise.layouts.sameness import differing


def by_values(
    detection: Detection,
    state: Mapping[str, Tensor],
    reference: Detection,
    other: Mapping[str, Tensor],
) -> Detection:
    """The candidates whose canonical tensors are the reference's, all rows of all modules.

    The first head is often the same in several layouts; the others are not. Where heads turn in
    part, and nobody said how much of them, every even number is tried.

    Args:
        detection: of the checkpoint in question.
        state: its tensors; read module by module, so they may be memory-mapped.
        reference: of the same weights elsewhere; where it has several candidates itself, any of
            them may agree.
        other: its tensors.
    """
    kept, refuted = [], dict(detection.refuted)
    known = [one for group in reference.candidates for one in _in_widths(group[0])]
    for group in detection.candidates:
        read = _in_widths(group[0])
        reasons = [_disagreement(one, state, two, other) for one in read for two in known]
        if None in reasons:
            found = read[reasons.index(None) // len(known)]
            kept.append((found, *group[1:]))
        else:
            why = reasons[0] if reasons else "the reference has no attention that is known"
            refuted |= {one.layout.name: str(why) for one in group}
    return decided(kept, refuted)


def _in_widths(one: Candidate) -> list[Candidate]:
    """A candidate with every rotary_width that it may have; all of the head comes first."""
    function, head_dim = one.layout.function, one.sizes["head_dim"]
    is_open = function.rotary == "interleaved" and function.rotary_width is None
    if not is_open or "rotary_width" in one.sizes:
        return [one]
    widths = range(head_dim - head_dim % 2, 0, -2)
    return [replace(one, sizes={**one.sizes, "rotary_width": width}) for width in widths]


def _disagreement(
    one: Candidate, state: Mapping[str, Tensor], known: Candidate, other: Mapping[str, Tensor]
) -> str | None:
    """What is the first to differ; None where nothing does."""
    if len(one.modules) != len(known.modules):
        return f"it has {len(one.modules)} modules, the reference {len(known.modules)}"
    for number, module in enumerate(one.modules):
        found = differing(_canonical(one, number, state), _canonical(known, number, other))
        if found:
            return f"{module.prefix}: {', '.join(found)} are not the reference's"
    return None


def _canonical(one: Candidate, number: int, state: Mapping[str, Tensor]) -> State:
    reading = one.reading(number)
    return reading.read({name: state[name] for name in reading.names})
