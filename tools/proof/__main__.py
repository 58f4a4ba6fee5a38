"""Frozen behaviour of the library: ``python -m tools.proof``; what a rebuilt house must keep.

    python -m tools.proof                write build/proof.json, compare with tools/proof.json
    python -m tools.proof --bench        also one case of each fault; takes minutes
    python -m tools.proof FILE.json      likewise, and write FILE.json
    python -m tools.proof --compare A B  compare two files, and measure nothing

Every difference is printed with its size, and the exit status is 1 if there is any. All inputs are
seeded, and one thread computes. Values are equal only on one kind of machine with one torch, which
the section "machine" names. Bytes are held as the first 128 bits of their SHA-256.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tools.proof.commands import measure_commands, measure_pages, without_times_and_paths
from tools.proof.digests import Entries
from tools.proof.files import SLOW, compare_files, write
from tools.proof.layouts import measure_files, measure_layouts
from tools.proof.models import make_models, measure_scans
from tools.proof.rounding import measure_budgets, measure_verdicts

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tools" / "proof.json"
BUILT = ROOT / "build" / "proof.json"


def measure(*, with_bench: bool) -> dict[str, dict[str, Any]]:
    """Measure every section, in a temporary folder."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder, chdir(folder):
        models = make_models()
        sections: dict[str, Callable[[], Entries]] = {
            "machine": measure_machine,
            "layouts": measure_layouts,
            "files": measure_files,
            "scans": lambda: measure_scans(models),
            "commands": measure_commands,
            "pages": measure_pages,
            "budgets": measure_budgets,
            "verdicts": measure_verdicts,
        }
        sections |= {SLOW: measure_bench} if with_bench else {}
        return {name: dict(section()) for name, section in sections.items()}


def measure_machine() -> Entries:
    """Name what the values depend on beside the library."""
    for package in ("torch", "transformers", "safetensors"):
        yield package, version(package)
    yield "cpu", torch.backends.cpu.get_cpu_capability()
    yield "processor", name_processor()


def name_processor() -> str:
    """Return the processor's name: libraries of matrix products choose their kernels by it."""
    known = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", known.read_text() if known.exists() else "", re.M)
    return names[0] if names else platform.processor()


def measure_bench() -> Entries:
    """Run one case of each fault of the bench, and return the rows of its table."""
    from benchmarks.compare.__main__ import main as run_bench

    with redirect_stdout(StringIO()) as printed:
        run_bench(["--count", "1"])
    yield "table", [without_times_and_paths(row) for row in printed.getvalue().splitlines() if row]


def main() -> int:
    """Measure and compare; see the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("path", nargs="?", type=Path, default=BUILT, help="the file to write")
    parser.add_argument("--bench", action="store_true", help="also run the fault bench")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.compare:
        return int(compare_files(*options.compare))
    write(measure(with_bench=options.bench), options.path.absolute())
    print(f"{options.path}: {options.path.stat().st_size:,} bytes")
    return int(compare_files(RECORD, options.path)) if RECORD.exists() else 0


if __name__ == "__main__":
    sys.exit(main())
