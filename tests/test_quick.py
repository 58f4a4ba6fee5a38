"""What the commands of the Makefile run: together every test."""

import re

import pytest

from tests.quick import others_extra, others_slow
from tests.root import ROOT

SELECTION = re.compile(r"^(\w+): \$\(READY\)\n\t\$\(BIN\)/python -m pytest -m \"?([\w ]+)\"?", re.M)


@pytest.mark.parametrize(
    ("is_slow", "is_extra", "commands"),
    [(False, False, ["test", "tests"]), (True, False, ["tests"]), (True, True, ["suite"])],
)
def test_each_test_is_run(is_slow: bool, is_extra: bool, commands: list[str]) -> None:
    selections = SELECTION.findall(ROOT.joinpath("Makefile").read_text("utf-8"))
    marks = {"slow": is_slow, "extra": is_extra}
    assert [name for name, words in selections if eval(words, {}, marks)] == commands
    assert "make test check suite" in ROOT.joinpath(".ci", "run").read_text("utf-8")


@pytest.mark.extra
def test_what_is_extra_is_slow(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("slow")


def test_the_marks_of_cases() -> None:
    def marks(cases: list[object]) -> list[str]:
        return [" ".join(mark.name for mark in getattr(case, "marks", ())) for case in cases]

    assert marks(others_slow("abc")) == ["", "slow", "slow"]
    assert marks(others_slow("abc", "b", "c")) == ["slow", "", ""]
    assert marks(others_extra("abc")) == ["slow", "extra", "extra"]
    assert marks(others_extra("abc", "b", quick="c")) == ["extra", "slow", ""]
    with pytest.raises(AssertionError):
        others_extra("abc", "d")
