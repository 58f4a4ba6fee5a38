"""Every mutant still fits the source of today: a mistake that cannot be made proves nothing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tools.mutants import PATCHES, ROOT, Mutant, PatchError

FILES = sorted(PATCHES.glob("*.patch"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_mutant_fits_and_changes_what_runs(path: Path) -> None:
    assert re.fullmatch(r"\d\d-[a-z0-9-]+", path.stem)
    mutant = Mutant.read(path)
    assert mutant.breaks.endswith(".")
    assert "|" not in mutant.breaks  # it becomes a cell of a table
    for changed, text in mutant.changed_files(ROOT).items():
        assert changed.is_relative_to(ROOT / "src")
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(changed.read_text("utf-8")))


def test_no_number_is_used_twice() -> None:
    numbers = [path.stem[:2] for path in FILES]
    assert len(set(numbers)) == len(numbers)


PATCH = """\
The sum is a difference.

--- a/src/sums.py
+++ b/src/sums.py
@@ -90,3 +90,3 @@ def add(a, b):
 def add(a, b):

-    return a + b
+    return a - b
@@ -99 +99,2 @@
-LAST = 1
+LAST = 2
+-- = 3
"""
SOURCE = "def sub(a, b):\n    return a - b\n\n\ndef add(a, b):\n\n    return a + b\n\n\nLAST = 1\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tmp_path.joinpath("src").mkdir()
    tmp_path.joinpath("src", "sums.py").write_text(SOURCE)
    tmp_path.joinpath("1.patch").write_text(PATCH)
    return tmp_path


def test_a_hunk_is_found_by_its_text(root: Path) -> None:
    mutant = Mutant.read(root / "1.patch")
    assert mutant.breaks == "The sum is a difference."
    expected = SOURCE.replace("a + b", "a - b").replace("LAST = 1\n", "LAST = 2\n-- = 3\n")
    assert mutant.changed_files(root) == {root / "src" / "sums.py": expected}
    assert root.joinpath("src", "sums.py").read_text() == SOURCE


@pytest.mark.parametrize(
    ("source", "times"), [(SOURCE.replace("a + b", "b + a"), 0), (SOURCE + SOURCE, 2)]
)
def test_a_stale_or_ambiguous_hunk_is_refused(root: Path, source: str, times: int) -> None:
    root.joinpath("src", "sums.py").write_text(source)
    with pytest.raises(PatchError, match=rf"1: found {times} times in src/sums.py, not once"):
        Mutant.read(root / "1.patch").changed_files(root)


@pytest.mark.parametrize(("cut", "message"), [(40, "no hunk"), (130, "is cut off")])
def test_half_a_patch_is_refused(root: Path, cut: int, message: str) -> None:
    root.joinpath("1.patch").write_text(PATCH[:cut])
    with pytest.raises(PatchError, match=message):
        Mutant.read(root / "1.patch").changed_files(root)
