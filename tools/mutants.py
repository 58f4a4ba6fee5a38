"""Mutation tests: each patch puts one mistake into a copy of the source, and a test must fail.

    python -m tools.mutants                  every mutant
    python -m tools.mutants 03-scale 07      these only (by the beginning of the name)

A mutant is a unified diff in tests/mutants/, below a sentence that describes the mistake. The test
that docs/mutants.md names for the mutant runs first, also if it is slow; then those of `make test`:
of the changed packages first. The page is written after each mutant. build/mutants.json holds
digests, so that an interrupted run continues: a result is valid while patch, source and test are
unchanged.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATCHES = ROOT / "tests" / "mutants"
TABLE = ROOT / "docs" / "mutants.md"
STATE = ROOT / "build" / "mutants.json"

# The same selection as `make test`.
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-n0"]
PYTEST += ["-m", "not slow", "--hypothesis-profile=quick"]
SLOW_TOO = ("-m", "")  # the later option counts
SURVIVED = "**SURVIVED**"
LONGEST_RUN = 3600  # seconds, because a mutant may cause an endless loop
AT_ONCE = 2

HEAD = """\
# Mutants

Each row is a mistake that was put into a copy of the source on purpose. The tests of `make test`
ran against it, up to the first that failed; before them the test that noticed it last time, slow
or not.
This page is written by `make mutants`.

"""


@dataclass(frozen=True)
class Mutant:
    """One mistake, as a patch."""

    path: Path

    @property
    def name(self) -> str:
        """The name of the file without suffix, such as ``03-torch-polarity-inverted``."""
        return self.path.stem

    @cached_property
    def breaks(self) -> str:
        """The sentence above the diff."""
        head = re.split(r"^(?:diff --git |--- )", self.path.read_text("utf-8"), flags=re.M)[0]
        return " ".join(head.split())

    @cached_property
    def files(self) -> list[str]:
        """The paths of the changed files."""
        return re.findall(r"^\+\+\+ b/(\S+)", self.path.read_text("utf-8"), re.M)

    def apply(self, root: Path) -> None:
        """Apply the patch to the files under ``root``.

        Raises:
            subprocess.CalledProcessError: the patch does not apply.
        """
        environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(root.parent)}
        command = ["git", "apply", str(self.path)]
        subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True)

    def entries_by_relevance(self) -> list[str]:
        """Return all entries of tests/, those of the changed packages first."""
        broken = {part.removesuffix(".py") for name in self.files for part in Path(name).parts[2:]}
        entries = [path for path in (ROOT / "tests").iterdir() if _holds_tests(path)]
        entries.sort(key=lambda path: (path.stem.removeprefix("test_") not in broken, path.name))
        return [str(path.relative_to(ROOT)) for path in entries]


def _holds_tests(path: Path) -> bool:
    return path.match("test_*.py") or (path.is_dir() and any(path.rglob("test_*.py")))


def all_mutants() -> list[Mutant]:
    """Return every mutant in the order of its number."""
    return [Mutant(path) for path in sorted(PATCHES.glob("*.patch"))]


def recorded_results() -> dict[str, tuple[str, str]]:
    """Read docs/mutants.md: name -> (the mistake, the test that failed)."""
    rows = re.findall(r"^\| (\d{2,3}-\S+) \| (.+) \| `?(.+?)`? \|$", TABLE.read_text("utf-8"), re.M)
    return {name: (breaks, test) for name, breaks, test in rows}


def is_existing_test(test: str) -> bool:
    """Check that ``file::function`` names an existing test."""
    file, _, function = test.partition("::")
    path = ROOT / file
    defined = rf"^(def {function}\(|{function} = )"  # or made from a table of errors
    return path.is_file() and re.search(defined, path.read_text("utf-8"), re.M) is not None


def run_tests(mutant: Mutant | None, *what: str) -> str:
    """Return the first test of ``what`` that fails with this mistake in the source, or "".

    Raises:
        RuntimeError: pytest failed without a failing test.
    """
    with tempfile.TemporaryDirectory(prefix="headwise-mutant-") as folder:
        copy = Path(folder).resolve() / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant:
            mutant.apply(copy.parent)
        # PYTHONPATH precedes an editable install; tests/conftest.py rejects any other source.
        source = {"PYTHONPATH": str(copy), "HEADWISE_EXPECTED_SOURCE": str(copy)}
        done = subprocess.run(
            [*PYTEST, "-x", "--tb=no", *what],
            cwd=ROOT,
            env=os.environ | source,
            capture_output=True,
            text=True,
            timeout=LONGEST_RUN,
        )
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - |$)", done.stdout, re.M)
    if failed:
        # Without the parameters, which do not matter here.
        return failed[1].partition("[")[0]
    if done.returncode:
        raise RuntimeError(
            f"pytest failed without a failing test:\n{(done.stdout + done.stderr)[-2000:]}"
        )
    return ""


def first_failing_test(mutant: Mutant, test: str) -> str:
    """Return the first test that fails, beginning with the recorded one, or `SURVIVED`."""
    first = run_tests(mutant, test, *SLOW_TOO) if is_existing_test(test) else ""
    return first or run_tests(mutant, *mutant.entries_by_relevance()) or SURVIVED


def digest_of(mutant: Mutant, test: str) -> str:
    """Return a digest of the patch, the source and the file of the failing test."""
    files = [mutant.path, *sorted((ROOT / "src").rglob("*.py")), ROOT / test.partition("::")[0]]
    parts = (path.read_bytes() for path in files if path.is_file())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def table(rows: dict[str, tuple[str, str]]) -> str:
    """Return the text of docs/mutants.md."""
    survivors = sum(test == SURVIVED for _, test in rows.values())
    lines = [
        f"{len(rows)} mutants, {survivors} survived.",
        "",
        "| mutant | what it breaks | the test that notices |",
        "| --- | --- | --- |",
    ]
    for name, (breaks, test) in sorted(rows.items()):
        lines.append(f"| {name} | {breaks} | {test if test == SURVIVED else f'`{test}`'} |")
    return HEAD + "\n".join(lines) + "\n"


def record_result(mutant: Mutant, test: str) -> None:
    """Write a row of the page, and the digest that validates it in a later run."""
    names = {each.name for each in all_mutants()}
    rows = recorded_results() | {mutant.name: (mutant.breaks, test)}
    TABLE.write_text(table({name: rows[name] for name in rows if name in names}), "utf-8")
    STATE.parent.mkdir(exist_ok=True)
    STATE.write_text(json.dumps(_state() | {mutant.name: digest_of(mutant, test)}, indent=1))


def _state() -> dict[str, str]:
    return json.loads(STATE.read_text("utf-8")) if STATE.is_file() else {}


def is_done(mutant: Mutant) -> bool:
    """Check that the recorded test failed on this mutant in the same source."""
    test = recorded_results().get(mutant.name, ("", SURVIVED))[1]
    return test != SURVIVED and _state().get(mutant.name) == digest_of(mutant, test)


def main(names: Sequence[str]) -> int:
    """Run the chosen mutants; return 0 if a test fails for each of them."""
    mutants = [mutant for mutant in all_mutants() if mutant.name.startswith(tuple(names) or ("",))]
    if not mutants:
        print(f"no mutant is named {' or '.join(names)}; see {PATCHES.relative_to(ROOT)}")
        return 2
    left = [mutant for mutant in mutants if not is_done(mutant)]
    print(f"{len(mutants)} mutants, {len(mutants) - len(left)} of them done", flush=True)
    rows = recorded_results()  # before the page is written again
    recorded = [rows.get(mutant.name, ("", ""))[1] for mutant in left]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(first_failing_test, left, recorded)
        for mutant, test in zip(left, found, strict=True):
            record_result(mutant, test)
            print(f"{mutant.name}: {test}", flush=True)
    tests = {recorded_results()[mutant.name][1] for mutant in mutants}
    if SURVIVED in tests:
        return 1
    if failed := run_tests(None, *sorted(tests), *SLOW_TOO):
        print(f"{failed} fails without a mutant, so its result means nothing")
    return int(bool(failed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run the tests against mutants of the source.")
    parser.add_argument("names", nargs="*", help="beginnings of names; all mutants without")
    sys.exit(main(parser.parse_args().names))
