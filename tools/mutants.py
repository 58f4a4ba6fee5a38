"""Put one mistake at a time into a copy of the source; the ordinary tests must notice.

    python tools/mutants.py                  every mutant; writes docs/mutants.md
    python tools/mutants.py 03-scale 07      these only (by the beginning of the name)

A mutant is a unified diff in tests/mutants/, with a sentence above it that says what it breaks.
A hunk's place is found by its text, not by its line numbers, so it survives edits elsewhere.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATCHES = ROOT / "tests" / "mutants"
TABLE = ROOT / "docs" / "mutants.md"

# The ordinary tests of the arithmetic, the layers and the contract. What stands above (studies,
# pages, the command line) or runs them through compilers (paths) would only notice later.
SUITE = [
    "tests/test_reference.py",
    "tests/masks/test_mask.py",
    "tests/masks/test_score_bias.py",
    "tests/layers/positions",
    "tests/layers/native/test_qk_norm.py",
    "tests/layers/native/test_cache.py",
    "tests/kernels",
    "tests/layers/native",
    "tests/layers/torch_api",
    "tests/contract",
    "tests/test_matrix.py",
    "tests/layers/test_hooks.py",
    "tests/scanning/statistics",
    "tests/scanning",
    "tests/layouts",
]

PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-m", "not slow"]
SURVIVED = "**SURVIVED**"
AT_ONCE = 2


class PatchError(Exception):
    """A patch that does not fit the source of today."""


@dataclass(frozen=True)
class Mutant:
    """One mistake: its name, what it breaks in one sentence, and the diff."""

    name: str
    breaks: str
    diff: str

    def suite(self) -> list[str]:
        """The suite, with the tests of the broken room first: they notice soonest."""
        broken = {Path(name).relative_to("src/headwise").parts[0] for name, _ in _hunks(self.diff)}
        own = {f"tests/{room}" for room in broken} | {f"tests/test_{room}" for room in broken}
        return sorted(SUITE, key=lambda place: place not in own)

    @classmethod
    def read(cls, path: Path) -> Mutant:
        """The sentence is all that stands above the first ``---`` or ``diff`` line."""
        head, start, rest = _split_before(r"^(?:diff --git |--- )", path.read_text("utf-8"))
        return cls(path.stem, " ".join(head.split()), start + rest)

    def changed_files(self, root: Path) -> dict[Path, str]:
        """The new text of every file the diff changes. Nothing is written.

        Raises:
            PatchError: a hunk's text is not found exactly once.
        """
        texts: dict[Path, str] = {}
        for name, hunk in _hunks(self.diff):
            path = root / name
            # A hunk begins at the beginning of a line.
            text = "\n" + (texts.get(path) or path.read_text("utf-8"))
            old = "\n" + "".join(line[1:] for line in hunk if line[0] in " -")
            new = "\n" + "".join(line[1:] for line in hunk if line[0] in " +")
            if (places := text.count(old)) != 1:
                raise PatchError(f"{self.name}: found {places} times in {name}, not once:{old}")
            texts[path] = text.replace(old, new)[1:]
        if not texts:
            raise PatchError(f"{self.name}: there is no hunk in this patch")
        return texts


def _split_before(pattern: str, text: str) -> tuple[str, str, str]:
    found = re.search(pattern, text, re.M)
    return (
        (text, "", "") if found is None else (text[: found.start()], found[0], text[found.end() :])
    )


def _hunks(diff: str) -> Iterator[tuple[str, list[str]]]:
    """(path, lines of one hunk) for each hunk of a unified diff."""
    path, hunk, left = "", [], 0
    for line in diff.splitlines(keepends=True):
        if left > 0:
            # An editor may have stripped the one blank that stands for an empty line.
            hunk.append(line if line.strip("\n") else " \n")
            left -= 2 if hunk[-1][0] == " " else line[0] in "+-"
            if left == 0:
                yield path, hunk
        elif line.startswith("+++ "):
            path = line[4:].split("\t")[0].strip().removeprefix("b/")
        elif header := re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", line):
            hunk, left = [], sum(int(count or 1) for count in header.groups())
    if left:
        raise PatchError(f"the last hunk for {path} is cut off")


def all_mutants() -> list[Mutant]:
    """Every mutant, in the order of its number."""
    return [Mutant.read(path) for path in sorted(PATCHES.glob("*.patch"))]


def run_suite(
    mutant: Mutant | None, *options: str, seconds: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the suite against a copy of the source, with the mutant's mistake in it."""
    with tempfile.TemporaryDirectory(prefix="headwise-mutant-") as folder:
        copy = Path(folder).resolve() / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        for path, text in mutant.changed_files(copy.parent).items() if mutant else ():
            path.write_text(text, "utf-8")
        # PYTHONPATH comes before an editable install; tests/conftest.py refuses any other source.
        source = {"PYTHONPATH": str(copy), "HEADWISE_EXPECTED_SOURCE": str(copy)}
        return subprocess.run(
            [*PYTEST, *(mutant.suite() if mutant else SUITE), *options],
            cwd=ROOT,
            env=os.environ | source,
            capture_output=True,
            text=True,
            timeout=seconds,
        )


def killed_by(mutant: Mutant, seconds: float) -> str:
    """The first test that fails, `SURVIVED`, or why the mutant says nothing about the tests."""
    try:
        done = run_suite(mutant, "-n0", "-x", "--tb=no", seconds=seconds)
    except subprocess.TimeoutExpired:
        return "the suite did not end"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - |$)", done.stdout, re.M)
    if done.returncode == 0:
        return SURVIVED
    if failed is None:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        return f"**BROKEN**: no test ran to a failure ({' '.join(last)})"
    # Without the parameters: which of them comes first is no news.
    return f"`{failed[1].partition('[')[0]}`"


def table(rows: list[tuple[Mutant, str]]) -> str:
    """The page docs/mutants.md."""
    survivors = sum(killer == SURVIVED for _, killer in rows)
    lines = [
        "# Mutants",
        "",
        "Each row is a mistake that was put into a copy of the source on purpose. The ordinary",
        "test suite ran against it and stopped at the first test that noticed.",
        "This page is written by `make mutants`.",
        "",
        f"{len(rows)} mutants, {survivors} survived.",
        "",
        "| mutant | what it breaks | first test that notices |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {mutant.name} | {mutant.breaks} | {killer} |" for mutant, killer in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the mutants that were asked for; 0 when each of them was killed."""
    parser = argparse.ArgumentParser(description="Run the tests against mutants of the source.")
    parser.add_argument("names", nargs="*", help="beginnings of names; all mutants without")
    wanted = tuple(parser.parse_args().names) or ("",)
    mutants = [mutant for mutant in all_mutants() if mutant.name.startswith(wanted)]
    if not mutants:
        print(f"no mutant is called {' or '.join(wanted)}; they are in {PATCHES.relative_to(ROOT)}")
        return 2
    try:
        for mutant in mutants:
            mutant.changed_files(ROOT)
    except PatchError as error:
        print(error)
        return 2

    print("the suite on an unchanged copy ... ", end="", flush=True)
    began = time.monotonic()
    unchanged = run_suite(None)
    if unchanged.returncode:
        output = (unchanged.stdout + unchanged.stderr)[-3000:]
        print(f"fails, so it can tell nothing about mutants\n{output}")
        return 2
    elapsed = time.monotonic() - began
    print(f"passes, in {elapsed:.0f} s")

    rows = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        killers = pool.map(lambda mutant: killed_by(mutant, 10 * elapsed + 60), mutants)
        for mutant, killer in zip(mutants, killers, strict=True):
            rows.append((mutant, killer))
            print(f"{mutant.name}: {killer}", flush=True)
    if len(mutants) == len(all_mutants()):
        TABLE.write_text(table(rows), "utf-8")
        print(f"written: {TABLE.relative_to(ROOT)}")
    return int(any(killer.startswith("**") for _, killer in rows))


if __name__ == "__main__":
    sys.exit(main())
