"""Every mutant still fits the source of today, and docs/mutants.md tells of every one."""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tools import mutants
from tools.mutants import (
    ROOT,
    SURVIVED,
    TABLE,
    Mutant,
    all_mutants,
    is_existing_test,
    recorded_results,
    table,
)

HINT = "run: make mutants ONLY=name"


@pytest.mark.parametrize("mutant", all_mutants(), ids=lambda mutant: mutant.name)
def test_the_mutant_fits_and_changes_what_runs(mutant: Mutant, tmp_path: Path) -> None:
    assert re.fullmatch(r"\d{2,3}-[a-z0-9-]+", mutant.name)
    assert mutant.breaks.endswith(".")
    assert "|" not in mutant.breaks  # it becomes a cell of a table
    assert mutant.files
    for name in mutant.files:
        assert name.startswith("src/headwise/")
        tmp_path.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    mutant.apply(tmp_path)
    for name in mutant.files:
        trees = [ast.parse(root.joinpath(name).read_text("utf-8")) for root in (ROOT, tmp_path)]
        assert ast.dump(trees[0]) != ast.dump(trees[1])


def test_no_number_is_used_twice() -> None:
    numbers = [mutant.name.partition("-")[0] for mutant in all_mutants()]
    assert len(set(numbers)) == len(numbers)


def test_the_page_tells_of_every_mutant() -> None:
    rows = recorded_results()
    assert {name: breaks for name, (breaks, _) in rows.items()} == {
        mutant.name: mutant.breaks for mutant in all_mutants()
    }, HINT
    assert [
        test for _, test in rows.values() if test != SURVIVED and not is_existing_test(test)
    ] == [], HINT
    assert TABLE.read_text("utf-8") == table(rows)


@pytest.mark.parametrize("source", ["def add(a, b):\n    return b + a\n", ""])
def test_a_stale_patch_is_refused(tmp_path: Path, source: str) -> None:
    patch = tmp_path / "01-sum.patch"
    hunk = "@@ -7,2 +7,2 @@\n def add(a, b):\n-    return a + b\n+    return a - b\n"
    patch.write_text(f"The sum is a\ndifference.\n\n--- a/sums.py\n+++ b/sums.py\n{hunk}")
    mutant = Mutant(patch)
    assert mutant.breaks == "The sum is a difference."
    assert mutant.files == ["sums.py"]
    sums = tmp_path / "sums.py"
    sums.write_text("# more\n\ndef add(a, b):\n    return a + b\n")
    mutant.apply(tmp_path)
    assert sums.read_text() == "# more\n\ndef add(a, b):\n    return a - b\n"
    sums.write_text(source)
    with pytest.raises(subprocess.CalledProcessError):
        mutant.apply(tmp_path)


def test_a_row_holds_until_what_it_rests_on_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "STATE", tmp_path / "build" / "mutants.json")
    monkeypatch.setattr(mutants, "TABLE", tmp_path / "mutants.md")
    mutants.TABLE.write_text(mutants.HEAD)
    mutant = all_mutants()[0]
    assert not mutants.is_done(mutant)
    mutants.record_result(mutant, "tests/test_house.py::test_no_blind_except")
    assert mutants.is_done(mutant)
    changed = tmp_path / mutant.path.name
    changed.write_text(mutant.path.read_text() + "\n")
    assert not mutants.is_done(Mutant(changed))
    mutants.record_result(mutant, SURVIVED)
    assert not mutants.is_done(mutant)
