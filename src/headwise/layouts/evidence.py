"""Deciding between layouts by values: the same weights elsewhere, in a layout that is known."""

from __future__ import annotations

from collections.abc import Mapping

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

    The first head is often the same in several layouts; the others are not.

    Args:
        detection: of the checkpoint in question.
        state: its tensors; read module by module, so they may be memory-mapped.
        reference: of the same weights elsewhere; where it has several candidates itself, any of
            them may agree.
        other: its tensors.
    """
    kept, refuted = [], dict(detection.refuted)
    known = [group[0] for group in reference.candidates]
    for group in detection.candidates:
        reasons = [_disagreement(group[0], state, one, other) for one in known]
        if any(reason is None for reason in reasons):
            kept.append(group)
        else:
            why = reasons[0] if reasons else "the reference has no attention that is known"
            refuted |= {one.layout.name: str(why) for one in group}
    return decided(kept, refuted)


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
