"""A corpus scanned by two processes, beside one: ``python -m benchmarks.sharding_scan``.

Both are whole commands with one thread a process, from the start of Python to the end of the page.
The saved scans must be the same bytes. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console

from headwise.models import text as demo_text

TIME_LIMIT = 0.65  # of the time of one process
STATISTICS = "entropy,maximum,previous_token,induction,map"


def main(
    documents: Annotated[int, typer.Option(help="Texts of the corpus.")] = 64,
    length: Annotated[int, typer.Option(help="Tokens of each text.")] = 1024,
    processes: Annotated[int, typer.Option(help="Processes beside one.")] = 2,
    rounds: Annotated[int, typer.Option(help="How often each is timed.")] = 3,
) -> None:
    """Print the seconds of each, and the time of several processes over that of one."""
    console = Console(width=max(120, Console().width))
    console.print(f"{documents} texts of {length:,} tokens; load before: {os.getloadavg()[0]:.2f}")
    ratios = []
    with tempfile.TemporaryDirectory() as place:
        write_texts(Path(place) / "texts", documents, length)
        for number in range(rounds):
            one = scan(Path(place), f"one-{number}", length, 1)
            several = scan(Path(place), f"several-{number}", length, processes)
            require_same(Path(place) / f"one-{number}", Path(place) / f"several-{number}")
            console.print(f"1 process {one:.1f} s, {processes} processes {several:.1f} s")
            ratios.append(several / one)
    console.print(
        f"{processes} processes: {median(ratios):.2f} of one ({min(ratios):.2f}-{max(ratios):.2f}),"
        f" at most {TIME_LIMIT}; the saved scans are the same bytes; load after: "
        f"{os.getloadavg()[0]:.2f}"
    )


def write_texts(folder: Path, count: int, length: int) -> None:
    """Texts that begin at other places of the text that ships with headwise."""
    folder.mkdir()
    whole = "\n\n".join(demo_text.read_opening_paragraphs())
    for number in range(count):
        begin = 37 * number
        text = (whole[begin:] + whole) * (1 + length // len(whole))
        (folder / f"{number:03}.txt").write_text(text[:length], "utf-8")


def scan(place: Path, out: str, length: int, processes: int) -> float:
    """Seconds of the command."""
    options = ["--demo", "--text", "texts", "--length", str(length), "--stats", STATISTICS]
    options += ["--out", out, "--page", f"{out}.html", "--processes", str(processes)]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "headwise", "scan", *options],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return time.perf_counter() - start


def require_same(a: Path, b: Path) -> None:
    """End unless the saved scans are the same bytes."""
    if not filecmp.cmp(a / "scan.safetensors", b / "scan.safetensors", shallow=False):
        raise SystemExit(f"{a.name} and {b.name} hold other bytes")


if __name__ == "__main__":
    typer.run(main)
