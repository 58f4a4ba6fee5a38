"""Every cause, named on a case of the fault bench whose injector knows nothing of it."""

from __future__ import annotations

import pytest

from benchmarks.compare.suites import SUITES, Case
from headwise.diagnosis.causes.all_causes import CAUSES
from tools import causes_page

NAMES = [cause.name for cause in CAUSES]
# Not named yet: the recorded scores of such calls have another meaning, see docs/log.md.
OPEN = {
    "adapters merged or not",
    "batch and sequence exchanged",
    "evicted keys",
    "layers exchanged",
    "layers off by one",
    "position offset in decoding",
    "projection never called",
}


def cases() -> dict[str, Case]:
    first: dict[str, Case] = {}
    for case in SUITES["single"](1):
        first.setdefault(case.fault, case)
    return first


CASES = cases()


@pytest.mark.slow
@pytest.mark.parametrize("fault", sorted(CASES.keys() - OPEN))
def test_the_cause_of_a_fault_is_named(fault: str) -> None:
    scored = CASES[fault].score()
    assert scored.is_right, scored.answer


def test_names_and_symptoms_are_of_one_cause_each() -> None:
    symptoms = [cause.symptom for cause in CAUSES]
    assert sorted(NAMES) == sorted({*NAMES})
    assert sorted(symptoms) == sorted({*symptoms})
    assert all(cause.stages for cause in CAUSES)


@pytest.mark.parametrize("fault", ["softcap", "rotary pairing", "merge without transpose"])
def test_causes_of_three_stages(fault: str) -> None:
    scored = CASES[fault].score()
    assert scored.is_right, scored.answer


def test_the_page_of_causes_is_written_anew() -> None:
    assert causes_page.PAGE.read_text("utf-8") == causes_page.page()
