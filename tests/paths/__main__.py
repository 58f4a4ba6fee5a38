"""Run paths: ``python -m tests.paths --write`` for the page, ``python -m tests.paths jvp`` for one.

Nothing here checks the annotations of shapes, as the test run does: what is traced is the source as
users have it.
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import torch

from tests.paths.outcomes import Outcome
from tests.paths.registry import PATHS, Path
from tests.paths.subjects import SUBJECTS
from tests.paths.table import PAGE, page
from tests.root import ROOT

AT_ONCE = 2
NAMES = [subject.name for subject in SUBJECTS]


def run_apart(path: Path, columns: Collection[str] = NAMES) -> dict[str, Outcome]:
    """The row of a path, or some columns of it, from an interpreter of its own.

    Raises:
        AssertionError: a cell failed; the message is what it wrote.
    """
    command = [sys.executable, "-m", "tests.paths", path.key, "--columns", *columns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"{path.title}\n{done.stderr[-6000:]}")
    row = json.loads(done.stdout.splitlines()[-1])
    return {name: Outcome(cell["word"], tuple(cell["notes"])) for name, cell in row.items()}


def main() -> int:
    """Run one path and print its row as JSON, or all of them and write the page."""
    parser = argparse.ArgumentParser(description="Run every path for every subject.")
    parser.add_argument("path", nargs="?", choices=[path.key for path in PATHS])
    parser.add_argument("--columns", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    if options.path:
        warnings.filterwarnings("error", module=r"headwise(\.|$)")
        torch.set_num_threads(1)
        row = next(path for path in PATHS if path.key == options.path).row(options.columns)
        print(json.dumps({name: asdict(outcome) for name, outcome in row.items()}))
        return 0
    missing = [lack for path in PATHS if (lack := path.missing())]
    if missing:
        print(missing[0])
        return 2

    def timed(path: Path) -> dict[str, Outcome]:
        began = time.monotonic()
        row = run_apart(path)
        print(f"{path.title}: {time.monotonic() - began:.0f} s", flush=True)
        return row

    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = dict(zip((path.key for path in PATHS), pool.map(timed, PATHS), strict=True))
    text = page(rows)
    if options.write:
        PAGE.write_text(text, "utf-8")
        print(f"written: {PAGE}")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
