"""A conversion over processes: the bytes of one process, and a beginning that any run resumes."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from headwise.checkpoints.conversion import ConversionStream
from headwise.checkpoints.plan import PlannedConversion, plan_checkpoint_conversion
from headwise.checkpoints.source import open_source
from headwise.checkpoints.staging import StagingDir, StagingShare, read_finished_steps
from headwise.cli.output import LOST, USAGE
from headwise.errors import HeadwiseError
from headwise.sharding.processes.files import convert_in_job, divide_steps
from headwise.sharding.processes.job import open_group_job
from headwise.support.progress import no_progress
from tests.checkpoints import llamas
from tests.cli.test_convert import run
from tests.sharding.processes.running_command import RunningCommand
from tests.sharding.ranks import ranks

FILES = 5


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llamas.in_files(tmp_path / "a", FILES)


def plan(source: Path, target: Path, **options: int) -> PlannedConversion:
    counts = {**llamas.COUNTS, **options}
    return plan_checkpoint_conversion(open_source(source), target, "llama", "llama-meta", **counts)


def written(conversion: PlannedConversion, steps: frozenset[int]) -> list[str]:
    """The tensors that steps write."""
    return [name for number in steps for name in conversion.steps[number].outputs]


def files(conversion: PlannedConversion, steps: frozenset[int]) -> set[str]:
    names = set(written(conversion, steps))
    return {file.name for file in conversion.output.files if names & file.offsets.keys()}


def interrupt_after(conversion: PlannedConversion, shares: list[frozenset[int]]) -> None:
    """Write shares of the steps, one after the other, and leave the folder to a later run."""
    identity, target = conversion.identity, conversion.target
    with suppress(KeyboardInterrupt), StagingDir(target, conversion.output) as staging:
        staging.begin(identity)
        for number, steps in enumerate(shares):
            names, done = files(conversion, steps), frozenset[int]()
            with StagingShare(target, names, identity=identity, number=number, done=done) as share:
                stream = ConversionStream(conversion.source, conversion.output, share)
                stream.run(conversion.steps, no_progress, chosen=steps)
        raise KeyboardInterrupt


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_each_file_has_one_rank(source: Path, tmp_path: Path, count: int) -> None:
    conversion = plan(source, tmp_path / "b")
    shares = divide_steps(conversion, frozenset(), count=count)
    assert len(shares) == count
    names = [name for share in shares for name in written(conversion, share)]
    assert sorted(names) == sorted(llamas.in_metas(llamas.weights()))
    of_rank = [files(conversion, share) for share in shares]
    assert sum(map(len, of_rank)) == FILES
    assert sorted(map(len, of_rank)) == sorted(
        FILES // count + (n < FILES % count) for n in range(count)
    )


def test_bytes_that_are_done_do_not_count(source: Path, tmp_path: Path) -> None:
    conversion = plan(source, tmp_path / "b")
    first, second = divide_steps(conversion, frozenset(), count=2)
    again, other = divide_steps(conversion, first, count=2)
    headers = conversion.source.headers
    left = [
        sum(headers[name].nbytes for n in share - first for name in conversion.steps[n].inputs)
        for share in (again, other)
    ]
    assert sum(left) == sum(headers[n].nbytes for s in second for n in conversion.steps[s].inputs)
    assert max(left) < sum(left)  # both have some of it


def test_shares_of_a_folder_are_resumed_by_one_process(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three shares were written, and the last line of a journal was cut off."""
    conversion = plan(source, tmp_path / "b")
    identity, target = conversion.identity, conversion.target
    shares = divide_steps(conversion, frozenset(), count=3)
    interrupt_after(conversion, shares[:2])
    with (tmp_path / ".b.headwise-part" / "journal-1").open("ab") as journal:
        journal.write(b"1")  # of 12, say
    done = shares[0] | shares[1]
    assert read_finished_steps(tmp_path / ".b.headwise-part", identity) == done
    assert read_finished_steps(tmp_path / ".b.headwise-part", "another") == frozenset()
    ran: list[object] = []
    real = ConversionStream._run_step
    monkeypatch.setattr(
        ConversionStream, "_run_step", lambda self, s, *a: (ran.append(s), real(self, s, *a))
    )
    assert llamas.to_meta(source, target).earlier_run == "its beginning"
    checks = sum(not step.outputs for step in conversion.steps)
    assert len(ran) == len(shares[2]) + checks
    llamas.to_meta(source, tmp_path / "c")
    assert llamas.bytes_of(target) == llamas.bytes_of(tmp_path / "c")
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


def test_shares_of_other_work_are_removed(source: Path, tmp_path: Path) -> None:
    conversion = plan(source, tmp_path / "b", rotary_width=10)
    interrupt_after(conversion, divide_steps(conversion, frozenset(), count=2))
    assert llamas.to_meta(source, tmp_path / "b").earlier_run == "other work"
    llamas.assert_same(llamas.read(tmp_path / "b"), llamas.in_metas(llamas.weights()))


# ---- over real processes -----------------------------------------------------------------------


def convert_on_ranks(source: Path, target: Path, *, fault: str = "") -> str:
    """The earlier run on rank 0, or the error of this rank."""
    real = ConversionStream._run_step

    def fail(self: ConversionStream, *_: object) -> None:
        raise OSError(28, "No space left on device")

    is_last = dist.get_rank() == dist.get_world_size() - 1
    options = {"rotary_width": 10} if fault == "options" and is_last else {}
    if fault == "disk" and is_last:
        ConversionStream._run_step = fail  # type: ignore[method-assign]
    try:
        with open_group_job("a test") as job:
            report = convert_in_job(
                job, plan(source, target, **options), no_progress, lost_status=75
            )
            return "" if report is None else report.earlier_run
    except HeadwiseError as error:
        return error.saw
    finally:
        ConversionStream._run_step = real  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "files"), [(2, 5), (4, 3)])
def test_any_number_of_ranks_writes_the_bytes_of_one_process(
    tmp_path: Path, count: int, files: int
) -> None:
    """Also if there are more ranks than files."""
    source = llamas.in_files(tmp_path / "a", files)
    assert ranks(count).run(convert_on_ranks, source, tmp_path / "b") == [
        "nothing",
        *[""] * (count - 1),
    ]
    llamas.to_meta(source, tmp_path / "c")
    assert llamas.bytes_of(tmp_path / "b") == llamas.bytes_of(tmp_path / "c")
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


def faults_on_ranks(source: Path, target: Path) -> list[str]:
    return [convert_on_ranks(source, target, fault=fault) for fault in ("options", "disk")]


@pytest.mark.slow
def test_an_error_of_one_rank_leaves_nothing(source: Path, tmp_path: Path) -> None:
    messages = ranks(2).run(faults_on_ranks, source, tmp_path / "b")
    options, disk = zip(*messages, strict=True)
    assert len(set(options)) == 1
    assert options[0].startswith("source and options of rank 1, which differs from")
    assert disk[1] == f"{tmp_path}: No space left on device"
    assert disk[0] == f"rank 1 of 2 failed: {disk[1]}"
    assert os.listdir(tmp_path) == ["a"]


def started(source: Path, target: Path, *fault: str) -> RunningCommand:
    program = "tests.sharding.processes.held_conversion"
    return RunningCommand(target.parent, sys.executable, "-m", program, source, target, *fault)


def held(source: Path, target: Path) -> RunningCommand:
    """A conversion whose processes both wait in the middle."""
    for path in target.parent.glob("rank-*"):
        path.unlink()
    command = started(source, target, "held")
    return command.when(lambda: len(list(target.parent.glob("rank-*"))) == 2)


@pytest.mark.slow
def test_a_killed_conversion_is_resumed_by_the_command(source: Path, tmp_path: Path) -> None:
    """First a process is killed, then the launcher, and the command finishes the rest."""
    target = tmp_path / "b"
    conversion = held(source, target)
    conversion.workers[1].send_signal(signal.SIGKILL)
    assert conversion.end() == LOST
    assert "was ended by SIGKILL" in conversion.printed
    identity = plan(source, target, head_dim=llamas.HEAD_DIM).identity  # as in config.json
    part = tmp_path / ".b.headwise-part"
    first = read_finished_steps(part, identity)
    assert not target.exists()
    conversion = held(source, target)
    conversion.process.send_signal(signal.SIGKILL)
    conversion.end()
    assert first < read_finished_steps(part, identity)
    options = ("--to", "llama-meta", "--processes", 2)
    conversion = RunningCommand.headwise(tmp_path, "convert", source, target, *options)
    assert conversion.end() == 0
    resumed, *printed = (tmp_path / "stdout").read_text("utf-8").splitlines()
    out, _ = run(source, tmp_path / "c", *options[:2])
    assert resumed.startswith("Resumed an interrupted run")
    assert printed[:-2] == out.splitlines()[:-2]
    assert llamas.bytes_of(target) == llamas.bytes_of(tmp_path / "c")


@pytest.mark.slow
def test_an_error_is_printed_once_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    conversion = started(source, tmp_path / "b", "broken")
    assert conversion.end() == USAGE
    assert conversion.printed == "headwise: a step\n  needed: the same bytes\n  do:     nothing"
    assert sorted(os.listdir(tmp_path)) == ["a", "stderr", "stdout"]


def test_a_file_is_written_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["headwise.cli.convert"], "launch_command", None)
    file = llamas.one_file(tmp_path / "a.safetensors")
    counts = ("--heads", 6, "--kv-heads", 2, "--from", "llama", "--to", "llama-meta")
    run(file, tmp_path / "b.safetensors", *counts, "--processes", 3)
    llamas.assert_same(llamas.read(tmp_path / "b.safetensors"), llamas.in_metas(llamas.weights()))
