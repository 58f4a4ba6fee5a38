"""The runner of the fault bench: one case of each suite."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.compare.__main__ import main
from benchmarks.compare.suites import SUITES


@pytest.mark.parametrize("suite", ["same", "subtle"])
def test_a_pair_gets_the_right_verdict(suite: str) -> None:
    for case in itertools.islice(SUITES[suite](1), 0, None, 6):
        assert case.score().is_right, case.key


def test_one_case_is_selected_by_its_key(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--suite", "single", "--case", "scale:mha:init-like:0"])
    assert "1 of   1  scale" in capsys.readouterr().out
