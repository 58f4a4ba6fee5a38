"""Put one mistake at a time into a copy of the source; what ``make test`` runs must notice.

    python -m tools.mutants                  every mutant
    python -m tools.mutants 03-scale 07      these only (by the beginning of the name)

A mutant is a unified diff in tests/mutants/, with a sentence above it that says what it breaks. The
test that docs/mutants.md names for it runs first, then the tests of the broken room, then the rest.
The page is written after each mutant. build/mutants.json keeps digests, so that an interrupted run
goes on: a row counts while its patch, the source and the test that noticed are the same.
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

# What `make test` selects.
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-n0"]
PYTEST += ["-m", "not slow", "--hypothesis-profile=quick"]
SURVIVED = "**SURVIVED**"
LONGEST_RUN = 3600  # seconds; a mutant may also make a loop endless
AT_ONCE = 2

HEAD = """\
# Mutants

Each row is a mistake that was put into a copy of the source on purpose. The tests of `make test`
ran against it: first the one that noticed it before, then the others, up to the first that failed.
This page is written by `make mutants`.

"""


@dataclass(frozen=True)
class Mutant:
    """One mistake, as a patch."""

    path: Path

    @property
    def name(self) -> str:
        """As ``03-torch-polarity-inverted``."""
        return self.path.stem

    @cached_property
    def breaks(self) -> str:
        """One sentence: all that stands above the diff."""
        head = re.split(r"^(?:diff --git |--- )", self.path.read_text("utf-8"), flags=re.M)[0]
        return " ".join(head.split())

    @cached_property
    def files(self) -> list[str]:
        """Paths of the files that it changes."""
        return re.findall(r"^\+\+\+ b/(\S+)", self.path.read_text("utf-8"), re.M)

    def apply(self, root: Path) -> None:
        """Make the mistake in the files under ``root``.

        Raises:
            subprocess.CalledProcessError: the patch does not fit.
        """
        environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(root.parent)}
        command = ["git", "apply", str(self.path)]
        subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True)

    def rooms_first(self) -> list[str]:
        """All entries of tests/, those named as a broken room first: they notice soonest."""
        broken = {part.removesuffix(".py") for name in self.files for part in Path(name).parts[2:]}
        entries = [path for path in (ROOT / "tests").iterdir() if _holds_tests(path)]
        entries.sort(key=lambda path: (path.stem.removeprefix("test_") not in broken, path.name))
        return [str(path.relative_to(ROOT)) for path in entries]


def _holds_tests(path: Path) -> bool:
    return path.match("test_*.py") or (path.is_dir() and any(path.rglob("test_*.py")))


def all_mutants() -> list[Mutant]:
    """Every mutant, in the order of its number."""
    return [Mutant(path) for path in sorted(PATCHES.glob("*.patch"))]


def noted() -> dict[str, tuple[str, str]]:
    """What docs/mutants.md says: name -> (what it breaks, the test that noticed it)."""
    rows = re.findall(r"^\| (\d\d-\S+) \| (.+) \| `?(.+?)`? \|$", TABLE.read_text("utf-8"), re.M)
    return {name: (breaks, test) for name, breaks, test in rows}


def is_there(test: str) -> bool:
    """True if ``file::function`` names a test of today."""
    file, _, function = test.partition("::")
    path = ROOT / file
    defined = rf"^(def {function}\(|{function} = )"  # or made of a table of refusals
    return path.is_file() and re.search(defined, path.read_text("utf-8"), re.M) is not None


def run(mutant: Mutant | None, *what: str) -> str:
    """The first test of ``what`` that fails with this mistake in the source; "" if none does.

    Raises:
        RuntimeError: no test ran to its end.
    """
    with tempfile.TemporaryDirectory(prefix="headwise-mutant-") as folder:
        copy = Path(folder).resolve() / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant:
            mutant.apply(copy.parent)
        # PYTHONPATH comes before an editable install; tests/conftest.py refuses any other source.
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
        # Without the parameters: which of them comes first is no news.
        return failed[1].partition("[")[0]
    if done.returncode:
        raise RuntimeError(f"no test ran to a failure:\n{(done.stdout + done.stderr)[-2000:]}")
    return ""


def notices(mutant: Mutant) -> str:
    """The first test that fails, or `SURVIVED`."""
    test = noted().get(mutant.name, ("", ""))[1]
    first = run(mutant, test) if is_there(test) else ""
    return first or run(mutant, *mutant.rooms_first()) or SURVIVED


def digest_of(mutant: Mutant, test: str) -> str:
    """A digest of the patch, of the source and of the file of the test that noticed."""
    files = [mutant.path, *sorted((ROOT / "src").rglob("*.py")), ROOT / test.partition("::")[0]]
    parts = (path.read_bytes() for path in files if path.is_file())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def table(rows: dict[str, tuple[str, str]]) -> str:
    """The page docs/mutants.md."""
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


def keep(mutant: Mutant, test: str) -> None:
    """Write a row, and the digest by which a later run knows that it still holds."""
    there = {one.name for one in all_mutants()}
    rows = noted() | {mutant.name: (mutant.breaks, test)}
    TABLE.write_text(table({name: rows[name] for name in rows if name in there}), "utf-8")
    STATE.parent.mkdir(exist_ok=True)
    STATE.write_text(json.dumps(_state() | {mutant.name: digest_of(mutant, test)}, indent=1))


def _state() -> dict[str, str]:
    return json.loads(STATE.read_text("utf-8")) if STATE.is_file() else {}


def is_done(mutant: Mutant) -> bool:
    """True if an earlier run saw this mutant fail in the same source by the same test."""
    test = noted().get(mutant.name, ("", SURVIVED))[1]
    return test != SURVIVED and _state().get(mutant.name) == digest_of(mutant, test)


def main(names: Sequence[str]) -> int:
    """Run the mutants that were asked for; 0 when each of them was noticed."""
    mutants = [mutant for mutant in all_mutants() if mutant.name.startswith(tuple(names) or ("",))]
    if not mutants:
        print(f"no mutant is called {' or '.join(names)}; they are in {PATCHES.relative_to(ROOT)}")
        return 2
    left = [mutant for mutant in mutants if not is_done(mutant)]
    print(f"{len(mutants)} mutants, {len(mutants) - len(left)} of them done", flush=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for mutant, test in zip(left, pool.map(notices, left), strict=True):
            keep(mutant, test)
            print(f"{mutant.name}: {test}", flush=True)
    tests = {noted()[mutant.name][1] for mutant in mutants}
    if SURVIVED in tests:
        return 1
    if failed := run(None, *sorted(tests)):
        print(f"{failed} fails without any mistake, so it can tell nothing about mutants")
    return int(bool(failed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run the tests against mutants of the source.")
    parser.add_argument("names", nargs="*", help="beginnings of names; all mutants without")
    sys.exit(main(parser.parse_args().names))
