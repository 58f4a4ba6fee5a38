"""The runner of the fault bench: one case of each suite; what the benchmarks print."""

import subprocess
import sys

import pytest

from benchmarks.compare.__main__ import main
from benchmarks.compare.cause_table import NO_CAUSE, cause_counts, cause_table
from benchmarks.compare.parameters import find_wrong_parameters, parameters_agree
from benchmarks.compare.suites import SUITES, Scored
from tests.root import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "fault"),
    [
        ("same", "bitwise copy"),
        ("same", "value bias in output bias"),
        pytest.param("same", "same position offset of q and k", marks=pytest.mark.extra),
        ("subtle", "theta 1e4 for 5e5"),
        ("subtle", "window 8 for 9"),
        ("subtle", "one entry of bv"),
    ],
)
def test_a_pair_gets_the_right_verdict(suite: str, fault: str) -> None:
    [case] = [each for each in SUITES[suite](1) if each.fault == fault]
    assert case.score().is_right, case.key


def test_one_case_is_selected_by_its_key(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--suite", "single", "--case", "scale:mha:init-like:0"])
    assert "1 of   1  scale" in capsys.readouterr().out


@pytest.mark.slow
def test_cases_of_one_seed_are_selected(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--suite", "single", "--fault", "residual inside", "--geometry", "mha"]
    main([*arguments, "--seed", "5", "--count", "1"])
    assert "1 of   1  residual inside" in capsys.readouterr().out


def test_reported_parameters_are_checked() -> None:
    right = {"scale": 0.201, "roles": "qk", "rows": (1, 2), "exponent width": 8}
    truth = {"scale": 0.2, "role": "qk", "rows": (1, 2), "exponent_width": 8}
    assert find_wrong_parameters(truth, right) == []
    wrong = {"scale": 0.203, "roles": "q", "rows": (1, 3), "exponent width": 9}
    assert find_wrong_parameters(truth, wrong) == [
        "scale 0.203 for 0.2",
        "role q for qk",
        "rows (1, 3) for (1, 2)",
        "exponent_width 9 for 8",
    ]
    fused = {"stored": "[q|k|v]", "read": "[k|v|q]"}
    assert find_wrong_parameters({"stored": "vqk"}, fused) == []
    assert find_wrong_parameters({"stored": "kqv"}, fused) != []
    nested = {"stored": "[q|k|v]", "read": "heads [q|k|v] head_dim"}
    assert find_wrong_parameters({"stored": "by role", "read": "by head"}, nested) == []
    assert len(find_wrong_parameters({"stored": "by head", "read": "by role"}, nested)) == 2


def scored(truths: tuple[tuple[str, ...], ...], *named: str) -> Scored:
    return Scored("", "", "", is_right=False, truths=truths, named=named)


def test_precision_and_recall_count_each_fault_of_a_case() -> None:
    scores = [
        scored((("scale",), ("sign", "minus")), "minus", "scale"),
        scored((("scale",),), "sign", "unknown"),
        scored((("sign", "minus"),)),
    ]
    counts = cause_counts(scores)
    assert (counts["scale"].cases, counts["scale"].recalled) == (2, 1)
    assert (counts["scale"].named, counts["scale"].named_rightly) == (1, 1)
    assert counts["scale"].instead == {"sign": 1}
    assert (counts["sign"].cases, counts["sign"].recalled) == (2, 1)
    assert (counts["sign"].named, counts["sign"].named_rightly) == (1, 0)
    assert counts["sign"].instead == {NO_CAUSE: 1}
    assert (counts["minus"].named, counts["minus"].named_rightly) == (1, 1)
    lines = [" ".join(line.split()) for line in cause_table(scores)]
    assert "scale 1 of 2 50.0% 1 of 1 100.0% sign (1)" in lines


def test_no_table_without_causes() -> None:
    assert cause_table([scored(())]) == []


@pytest.mark.slow
def test_a_cause_that_is_left_out_is_not_replaced_by_another() -> None:
    [case] = [c for c in SUITES["left-out"](1) if c.fault == "softcap"]
    assert case.score().is_right
    [case] = [c for c in SUITES["single"](1) if c.fault == "softcap"]
    assert case.score().named == ("softcap",)


def test_another_name_of_the_same_function_takes_the_place_of_a_cause() -> None:
    [case] = [c for c in SUITES["left-out"](1) if c.fault == "kv groups of fused rows"]
    scored = case.score()
    assert scored.answer == "shards joined in the wrong order"
    assert scored.is_right
    assert scored.by_other_name


def test_reports_agree_within_a_percent() -> None:
    report = {"theta": 10_000.0, "heads": [1, 3], "kind": "linear"}
    assert parameters_agree(report, {**report, "theta": 10_050.0})
    assert not parameters_agree(report, {**report, "theta": 10_200.0})
    assert not parameters_agree(report, {**report, "heads": [1, 2]})
    assert not parameters_agree(report, {"theta": 10_000.0, "kind": "linear"})


@pytest.mark.extra
def test_the_benchmarks_print_no_warnings_of_other_packages() -> None:
    command = [sys.executable, "-c", "import benchmarks.timing, benchmarks.models"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
