"""Every cause, named on a case of the fault bench whose injector knows nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest

import headwise
from benchmarks.compare.suites import SUITES, Case
from headwise.diagnosis.causes.catalogue import CAUSES
from headwise.diagnosis.causes.cause import PAGES, Cause, cause_page_path, describe_cause
from tools import causes_page

NAMES = [cause.name for cause in CAUSES]


def cases() -> dict[str, Case]:
    first: dict[str, Case] = {}
    for case in SUITES["single"](1):
        first.setdefault(case.fault, case)
    return first


CASES = cases()


@pytest.mark.slow
@pytest.mark.parametrize("fault", sorted(CASES))
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


def test_a_layer_in_bfloat16_is_the_same_to_rounding() -> None:
    """Each stage is predicted from recorded ones, so that its rounding alone hides a difference."""
    narrow = "dtype only:cross:init-like:0"
    [case] = [each for each in SUITES["single"](20) if each.key == narrow]
    assert case.score().is_right


def test_the_pages_of_causes_are_up_to_date() -> None:
    written = {path.name: path.read_text("utf-8") for path in PAGES.iterdir()}
    assert written == causes_page.pages()


@pytest.mark.parametrize("cause", CAUSES, ids=NAMES)
def test_each_cause_has_a_page_with_a_repair(cause: Cause) -> None:
    path = Path(cause_page_path(cause.name))
    assert path.is_relative_to(Path(headwise.__file__).parent)  # a file that users have
    text = path.read_text("utf-8")
    assert text.startswith(f"# {cause.symptom}\n")
    assert "## Repair" in text
    sections = describe_cause(cause).sections
    for name in {"Wrong", "Right"} & sections.keys():
        compile(sections[name], name, "exec")


def test_a_page_links_to_causes_that_exist() -> None:
    assert causes_page.link("rotary theta") == "[rotary theta](rotary-theta.md)"
    with pytest.raises(KeyError, match="rotary thetas"):
        causes_page.link("rotary thetas")


def test_pages_of_causes_that_are_no_more_are_removed(tmp_path: Path) -> None:
    tmp_path.joinpath("phlogiston.md").touch()
    causes_page.write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*causes_page.pages()}
