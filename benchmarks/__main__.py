"""Table of all benchmarks, with medians over several processes: ``python -m benchmarks``.

Run the benchmarks alone on the machine: a second busy process makes two-thread tiles much slower.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median, mode
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

from benchmarks.case import SHAPES

try:
    from benchmarks import models
    from benchmarks.memory import CASES
    from benchmarks.timing import MAKERS, MEDIANS, wall_seconds
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing.name} is missing: pip install -e '.[bench]'") from missing

STARTS = 7  # rounds
OF_DROP_IN = 1.05  # the native layer's time over that of the drop-in
IMPORT_LIMIT, HELP_LIMIT = 1.10, 0.3  # of the time of `import torch`; seconds


def main(
    processes: Annotated[
        int, typer.Option(help="Number of processes that measure every case.")
    ] = 5,
) -> None:
    """Print every measurement beside that of its peer."""
    # Wide enough for the table, also if the output is no terminal.
    console = Console(width=max(160, Console().width))
    console.print(f"{_machine()}; load before: {os.getloadavg()[0]:.2f}")
    results: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("timing", total=processes * len(MAKERS))
        for seed in range(processes):
            for result in _run_process(seed):
                results[result["group"], result["name"]].append(result)
                progress.advance(task)
    console.print(_times(results))
    console.print(_summary(results))
    console.print(_memory())
    console.print(_models())
    console.print(_starting())
    console.print(f"load after: {os.getloadavg()[0]:.2f}")


def _machine() -> str:
    threads = torch.get_num_threads()
    return (
        f"{platform.machine()}, {threads} threads, torch {torch.__version__}, float32, CPU; "
        f"ratio = headwise / the fastest peer, below 1 is faster"
    )


def _run_process(seed: int) -> Any:
    command = [sys.executable, "-m", "benchmarks.timing", str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise SystemExit(f"{' '.join(command[1:])} ended with {process.returncode}")


def _times(groups: dict[tuple[str, str], list[dict[str, Any]]]) -> Table:
    table = Table(title="Time", title_justify="left")
    for column in ("what", "batch, length, embed, heads", "fastest peer"):
        table.add_column(column, no_wrap=True)
    for column in ("headwise ms", "peer ms", "ratio", "range", "at most"):
        table.add_column(column, justify="right", no_wrap=True)
    for (group, name), results in groups.items():
        ratios = [r["ratio"] for r in results]
        limit = results[0]["limit"]
        table.add_row(
            group,
            name,
            _fastest(results),
            f"{median(r['ours_ms'] for r in results):.2f}",
            f"{median(r['peer_ms'] for r in results):.2f}",
            _marked(median(ratios), limit),
            f"{min(ratios):.2f}-{max(ratios):.2f}",
            "" if limit is None else f"{limit:.2f}",
        )
    return table


def _fastest(results: list[dict[str, Any]]) -> str:
    """Return the fastest peer in most processes."""
    return str(mode(r["peer"] for r in results))


def _marked(value: float, limit: float | None) -> str:
    missed = limit is not None and value > limit
    return f"[red]{value:.2f} missed[/red]" if missed else f"{value:.2f}"


def _summary(groups: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    """Return the medians over the six shapes, and the native layer beside the drop-in."""
    lines = []
    for group in dict.fromkeys(group for group, _ in groups):
        ratios = [median(r["ratio"] for r in groups[key]) for key in groups if key[0] == group]
        if len(ratios) == len(SHAPES):
            limit = MEDIANS.get(group)
            limit_text = "" if limit is None else f" (at most {limit})"
            lines.append(
                f"median over shapes, {group}: {_marked(median(ratios), limit)}{limit_text}"
            )
    for task in ("inference", "training"):
        native, drop_in = (
            [median(r["ours_ms"] for r in groups[group, str(shape)]) for shape in SHAPES]
            for group in (f"native, {task}", f"drop-in, {task}, batch first")
        )
        ratios = [ours / peer for ours, peer in zip(native, drop_in, strict=True)]
        text = f"{min(ratios):.2f} to {_marked(max(ratios), OF_DROP_IN)}"
        lines.append(f"native / drop-in over shapes, {task}: {text} (at most {OF_DROP_IN})")
    return "\n".join(lines)


def _starting() -> str:
    """Measure the start of whole processes, interleaved."""
    layer = (sys.executable, "-c", "from headwise import MultiheadAttention")
    torch_alone = (sys.executable, "-c", "import torch")
    command_line = (str(Path(sys.executable).with_name("headwise")), "--help")

    def process_seconds(*command: str) -> float:
        return wall_seconds(lambda: subprocess.run(command, capture_output=True, check=True))

    for command in (layer, torch_alone, command_line):
        process_seconds(*command)
    ratio = median(process_seconds(*layer) / process_seconds(*torch_alone) for _ in range(STARTS))
    help_seconds = median(process_seconds(*command_line) for _ in range(STARTS))
    return (
        f"from headwise import MultiheadAttention / import torch: "
        f"{_marked(ratio, IMPORT_LIMIT)} (at most {IMPORT_LIMIT})\n"
        f"headwise --help: {_marked(help_seconds, HELP_LIMIT)} s (at most {HELP_LIMIT})"
    )


def _memory() -> Table:
    table = Table(title="Peak memory", title_justify="left")
    table.add_column("what")
    for column in ("MB", "at most"):
        table.add_column(column, justify="right")
    cases = enumerate(track(CASES.items(), "memory", transient=True))
    for index, (name, (_, limit)) in cases:
        command = [sys.executable, "-m", "benchmarks.memory", str(index)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        table.add_row(name, _marked(json.loads(done.stdout), limit), str(limit))
    return table


def _models() -> Table:
    table = Table(title="Whole models of GPT-2's shape, with what loads them", title_justify="left")
    table.add_column("what")
    for column in ("s", "MB", "MB at most"):
        table.add_column(column, justify="right")
    for name, run in track(models.RUNS.items(), "whole models", transient=True):
        measured = models.measure(name)
        if measured is None:
            table.add_row(run.what, f"{run.package} is not installed", "", "")
            continue
        limit = "" if run.most_mb is None else str(run.most_mb)
        text = f"{measured['mb']:.0f}"
        if run.most_mb is not None and measured["mb"] > run.most_mb:
            text = f"[red]{text} missed[/red]"
        table.add_row(run.what, f"{measured['seconds']:.1f}", text, limit)
    return table


if __name__ == "__main__":
    typer.run(main)
