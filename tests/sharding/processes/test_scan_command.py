"""``headwise scan`` in several real processes: the same bytes, also after a SIGKILL."""

from __future__ import annotations

import random
import signal
import subprocess
from pathlib import Path

import pytest

from headwise.cli import processes
from headwise.cli.output import LOST
from tests.cli.scan_command import refused, run
from tests.sharding.processes.running_command import (
    TORCHRUN,
    RunningCommand,
)

TEXTS = 12
OPTIONS = ("scan", "--demo", "--text", "texts", "--length", 600, "--stats", "entropy")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with texts, each of which takes a fraction of a second."""
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("texts").mkdir()
    words, draw = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "it"], random.Random(0)
    for number in range(TEXTS):
        content = " ".join(draw.choices(words, k=200 + 10 * number))
        tmp_path.joinpath("texts", f"{number}.txt").write_text(content, "utf-8")
    return tmp_path


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("out/parts/[0-9]*"))


def begun(folder: Path, *options: object) -> RunningCommand:
    """A scan over two processes, once the first text is done."""
    command = RunningCommand.headwise(folder, *OPTIONS, "--out", "out", "--processes", 2, *options)
    return command.when(lambda: bool(parts(folder)))


def content(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_a_killed_process_is_named_and_torchrun_resumes(folder: Path) -> None:
    command = begun(folder)
    command.workers[1].send_signal(signal.SIGKILL)
    assert command.end() == LOST
    killed = command.workers[1].pid
    assert command.printed.splitlines() == [
        f"headwise: rank 1 of 2 (process {killed}) was ended by SIGKILL",
        "  needed: every process until the work is done",
        "  do:     run the same command again: it resumes from what is done; with fewer processes "
        "if memory ran out",
    ]
    kept = {path: path.stat().st_mtime_ns for path in parts(folder)}
    assert 0 < len(kept) < TEXTS
    assert all(not path.name.startswith(".") for path in (folder / "out/parts").iterdir())
    again = [*TORCHRUN, "--nproc-per-node", "2", "-m", "headwise", *OPTIONS, "--out", "out"]
    done = subprocess.run([str(part) for part in again], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{len(kept)} of {TEXTS} texts are in out already." in done.stderr
    assert "in 2 processes" in done.stderr
    assert done.stdout.count("The page:") == 2  # before and after the details, by one rank
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    run(*OPTIONS[1:], "--out", "one", "--page", "one.html")
    assert content(folder / "out") == content(folder / "one")


def test_work_that_cannot_be_shared_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = refused("--demo", "--text", "texts", "--processes", 2)
    assert error.saw == "several texts, and no --out"
    error = refused("--demo", "--text", "texts/0.txt", "--processes", 2)
    assert error.saw == "2 processes without --out"
    assert error.do == "--out DIR, or a single process"
    error = refused("--demo", "--text", "texts/0.txt", "--out", "out", "--processes", 3)
    assert error.saw == "3 processes for one text"
    error = refused("--demo", "--processes", 2, "--out", "out")
    assert error.saw == "2 processes for one text"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "headwise")
    error = refused("--demo", "--text", "texts", "--out", "out", "--processes", 2)
    assert error.saw == "--processes 2 in a command that torchrun started"


def test_one_process_needs_no_launcher(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "launch_command", None)
    run("--demo", "--length", 40, "--stats", "entropy", "--processes", 1)
    assert Path("headwise-scan/index.html").exists()
