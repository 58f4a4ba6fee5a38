"""Two files of proofs: every difference is printed with its size."""

import json
from pathlib import Path

import pytest

from tests.root import ROOT
from tools.proof.files import SLOW, compare_files, write

PROOF = {
    "scans": {"gpt2": {"entropy": [[1.0, float("nan")], [0.0, 2.5]]}},
    "files": {"llama-meta": {"model.safetensors": "ab"}},
}


def compared(folder: Path, after: dict[str, dict[str, object]]) -> bool:
    write(PROOF, folder / "before.json")
    write(after, folder / "after.json")
    return compare_files(folder / "before.json", folder / "after.json")


def changed(value: object) -> dict[str, dict[str, object]]:
    return PROOF | {"scans": {"gpt2": {"entropy": [[1.0, float("nan")], [0.0, value]]}}}


def test_a_proof_is_the_same_as_itself(tmp_path: Path) -> None:
    assert not compared(tmp_path, dict(PROOF))


@pytest.mark.parametrize(
    ("after", "line"),
    [
        (changed(2.625), "scans / gpt2 / entropy[1][1]: 2.5 before, 2.625 after, 1.2e-01 apart"),
        (changed(float("nan")), "scans / gpt2 / entropy[1][1]: 2.5 before, NaN after"),
        (changed("2.5"), 'scans / gpt2 / entropy[1][1]: 2.5 before, "2.5" after'),
        (PROOF | {"files": {}}, "files / llama-meta: only before"),
        (PROOF | {"files": {"llama-meta": {"x": "ab"}}}, "files / llama-meta / x: only after"),
        (PROOF | {"pages": {"study": "ab"}}, "pages / study: only after"),
        ({"scans": PROOF["scans"]}, "files / llama-meta: only before"),
    ],
)
def test_a_difference_is_printed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    after: dict[str, dict[str, object]],
    line: str,
) -> None:
    assert compared(tmp_path, after)
    assert f"  {line}\n" in capsys.readouterr().out


def test_zero_has_a_sign(tmp_path: Path) -> None:
    assert compared(
        tmp_path, PROOF | {"scans": {"gpt2": {"entropy": [[1.0, float("nan")], [-0.0, 2.5]]}}}
    )


def test_the_fault_bench_may_be_absent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not compared(tmp_path, PROOF | {SLOW: {"table": ["1 of 1"]}})
    assert f"{SLOW}: not in both files, not compared" in capsys.readouterr().out


def test_the_record_has_every_section() -> None:
    record = json.loads(ROOT.joinpath("tools", "proof.json").read_text("utf-8"))
    assert [name for name, entries in record.items() if not entries] == []
    assert len(record["layouts"]) >= 132
    assert len(record["budgets"]) == 200
    assert len(record["verdicts"]) == 32
