"""A run that is killed at any moment goes on, and ends in the same bytes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from headwise.checkpoints import conversion, output
from headwise.checkpoints.conversion import ConversionStream
from headwise.checkpoints.journal import Journal
from headwise.errors import CheckpointError
from tests.checkpoints import llamas
from tests.root import ROOT

# Runs in a process of its own, whose children are killed in the middle of a write.
KILLED = """
import json, os, signal, sys
from pathlib import Path
from headwise.checkpoints import stream_conversion
from tests.checkpoints import llamas

source, place = map(Path, sys.argv[1:])
stream_conversion.FLUSH_SIZE = 1  # every step is made sure of
os.fsync = lambda _: None  # what is killed here is a process, not a machine
pwrite, copy = os.pwrite, os.copy_file_range
left = iter(())  # the calls that are lived through; threads may not count the same one twice

def dies(half, whole):
    if next(left, None) is None:
        half()
        os.kill(os.getpid(), signal.SIGKILL)
    return whole()

def write(f, data, at):
    return dies(lambda: pwrite(f, data[: len(data) // 2], at), lambda: pwrite(f, data, at))

def copied(a, b, n, *at):
    return dies(lambda: copy(a, b, n // 2, *at), lambda: copy(a, b, n, *at))

def child(target, calls):
    global left
    identifier = os.fork()
    if not identifier:
        left = iter(range(1, calls))
        os.pwrite, os.copy_file_range = write, copied
        found = llamas.to_meta(source, target).earlier_run
        target.with_suffix(".found").write_text(found)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(identifier, 0)[1])

told = []
for calls in [*range(1, 47, 4), 60]:
    target = place / f"target-{calls}"
    ended = child(target, calls)
    was_there = target.exists()
    child(target, 60)
    told.append([calls, ended, was_there, target.with_suffix(".found").read_text()])
target = place / "target-often"
often = 0
while child(target, 9) != 0:
    often += 1
print(json.dumps({"told": told, "often": often}))
"""


@pytest.mark.slow
def test_killed_in_the_middle_of_any_write(tmp_path: Path) -> None:
    source = llamas.in_files(tmp_path / "a")
    llamas.to_meta(source, tmp_path / "b")
    whole, place = llamas.bytes_of(tmp_path / "b"), tmp_path / "killed"
    place.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(source), str(place)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    killed = [told for told in result["told"] if told[1] == -9]
    # Of 47 writes: three heads and 21 tensors, and 23 lines of the journal.
    assert len(killed) == 12
    assert not any(was_there for _, _, was_there, _ in killed)
    assert {found for calls, _, _, found in killed if calls <= 4} == {"nothing"}
    assert {found for calls, _, _, found in killed if calls > 4} == {"its beginning"}
    assert result["often"] >= 2
    targets = sorted(path for path in place.iterdir() if path.is_dir())
    assert len(targets) == len(result["told"]) + 1
    for each in targets:
        assert llamas.bytes_of(each) == whole


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source of a run to ``b`` that was interrupted after half of its steps."""
    monkeypatch.setattr(conversion, "FLUSH_SIZE", 1)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    source = llamas.in_files(tmp_path / "a")
    told: list[int] = []

    def stop(*_: object) -> None:
        told.append(1)
        if len(told) == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llamas.to_meta(source, tmp_path / "b", progress=stop)
    assert sorted(os.listdir(tmp_path)) == [".b.headwise-part", "a"]
    return source


def steps_of_the_next(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The steps that are really done, from now on."""
    done: list[object] = []
    real = ConversionStream._run_step
    monkeypatch.setattr(
        ConversionStream, "_run_step", lambda self, s, *a: (done.append(s), real(self, s, *a))
    )
    return done


def test_what_was_done_is_not_done_again(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = steps_of_the_next(monkeypatch)
    told: list[int] = []
    done = llamas.to_meta(stopped, tmp_path / "b", progress=lambda _, n, __: told.append(n))
    assert done.earlier_run == "its beginning"
    assert 10 <= len(steps) <= 11
    assert len(told) == 22  # what is done is counted
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    llamas.to_meta(stopped, tmp_path / "c")
    assert llamas.bytes_of(tmp_path / "b") == llamas.bytes_of(tmp_path / "c")


def touched(source: Path) -> dict[str, Any]:
    os.utime(source / "model-00002-of-00003.safetensors", ns=(1, 1))
    return {}


def grown(source: Path) -> dict[str, Any]:
    index = json.loads((source / llamas.INDEX).read_text())
    index["metadata"]["note"] = "new"
    (source / llamas.INDEX).write_text(json.dumps(index))
    return {}


def renamed(source: Path) -> dict[str, Any]:
    """Another file with the time and size of the old one."""
    path = source / "model-00002-of-00003.safetensors"
    before, raw = path.stat(), path.read_bytes()
    path.with_name("new").write_bytes(raw)
    path.with_name("new").rename(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return {}


def in_place(source: Path) -> dict[str, Any]:
    """Other bytes in the old file, and its time set back."""
    path = source / "model-00002-of-00003.safetensors"
    before, raw = path.stat(), bytearray(path.read_bytes())
    raw[-1] ^= 1
    with path.open("r+b") as file:
        file.write(raw)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return {}


CHANGES = {
    "bytes": in_place,
    "time": touched,
    "index": grown,
    "file": renamed,
    "counts": lambda _: {"rotary_width": 10},
    "accepted": lambda _: {"accept": ["window"]},
}


@pytest.mark.parametrize("what", CHANGES)
def test_other_work_starts_anew(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    options = CHANGES[what](stopped)
    steps = steps_of_the_next(monkeypatch)
    done = llamas.to_meta(stopped, tmp_path / "b", **options)
    assert done.earlier_run == "other work"
    assert len(steps) == 21
    expected = llamas.in_metas(llamas.read(stopped))
    llamas.assert_same(llamas.read(tmp_path / "b"), expected)


@pytest.mark.parametrize("harm", ["journal", "file", "head", "torn"])
def test_a_beginning_that_is_harmed(stopped: Path, tmp_path: Path, harm: str) -> None:
    part = tmp_path / ".b.headwise-part"
    if harm == "journal":
        with (part / "journal").open("ab") as file:
            file.write(b"\0\0\0\0\n")
    if harm == "torn":
        with (part / "journal").open("ab") as file:
            file.write(b"2")  # of 20, say
    if harm == "file":
        file_ = next((part / "made").iterdir())
        file_.write_bytes(file_.read_bytes()[:-1])
    if harm == "head":
        file_ = next((part / "made").iterdir())
        file_.write_bytes(bytes(8) + file_.read_bytes()[8:])
    done = llamas.to_meta(stopped, tmp_path / "b")
    assert done.earlier_run == ("its beginning" if harm == "torn" else "nothing")
    expected = llamas.in_metas(llamas.weights())
    llamas.assert_same(llamas.read(tmp_path / "b"), expected)


def test_a_line_that_was_cut_off_is_no_part_of_the_next(tmp_path: Path) -> None:
    """Else 1, of 12, and then 9 would be 19."""
    path = tmp_path / "journal"
    path.write_bytes(b"work\n8\n1")
    journal = Journal(path)
    assert journal.finished_steps("work") == {8}
    journal.record_steps([9])
    journal.close()
    assert path.read_bytes() == b"work\n8\n9\n"


def test_a_system_that_writes_little_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda f, data, at: real(f, data[:1], at))
    journal = Journal(tmp_path / "journal")
    journal.append("work")
    journal.record_steps([10, 11])
    journal.close()
    assert (tmp_path / "journal").read_bytes() == b"work\n10 11\n"


def test_other_work_that_is_stopped_before_it_begins(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves files of the right size, in which there is nothing of what was done before."""
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", lambda *_: interrupt())
        with pytest.raises(KeyboardInterrupt):
            llamas.to_meta(stopped, tmp_path / "b", rotary_width=10)
    done = llamas.to_meta(stopped, tmp_path / "b")
    assert done.earlier_run == "nothing"
    expected = llamas.in_metas(llamas.weights())
    llamas.assert_same(llamas.read(tmp_path / "b"), expected)


def test_the_journal_is_forgotten_before_the_files_go(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / ".b.headwise-part" / "journal"
    sizes: list[int] = []

    def remove(_: Path) -> None:
        sizes.append(journal.stat().st_size)
        interrupt()

    monkeypatch.setattr(shutil, "rmtree", remove)
    assert journal.stat().st_size > 0
    with pytest.raises(KeyboardInterrupt):
        llamas.to_meta(stopped, tmp_path / "b", rotary_width=10)
    assert sizes == [0]


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("began", [True, False])
def test_a_run_that_ends_while_another_waits_for_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, began: bool
) -> None:
    """The lock is then that of a file that is gone, or that is another one by now."""
    path, real = tmp_path / "journal", fcntl.flock
    first = Journal(path)
    later: list[Journal] = []

    def ends(handle: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        path.unlink()
        first.close()
        if began:
            later.append(Journal(path))
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", ends)
    with pytest.raises(CheckpointError, match="another run is writing into"):
        Journal(path)
    for journal in later:
        journal.close()


def test_what_is_done_is_not_read(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched, steps = [], steps_of_the_next(monkeypatch)
    monkeypatch.setattr(
        ConversionStream, "_prefetch_inputs", lambda _self, step, _stack: fetched.append(step)
    )
    llamas.to_meta(stopped, tmp_path / "b")
    assert fetched == steps


def test_one_run_at_a_time(stopped: Path, tmp_path: Path) -> None:
    journal = Journal(tmp_path / ".b.headwise-part" / "journal")
    with pytest.raises(CheckpointError, match="another run is writing into"):
        llamas.to_meta(stopped, tmp_path / "b")
    journal.close()
    assert llamas.to_meta(stopped, tmp_path / "b").earlier_run == "its beginning"


def test_a_step_is_noted_only_after_its_bytes_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not made sure of when the machine loses power may be anything."""
    monkeypatch.setattr(conversion, "FLUSH_SIZE", 1)
    written: set[int] = set()
    noted_unsure: list[set[int]] = []
    real_write, real_copy, real_sync = os.pwrite, os.copy_file_range, os.fsync
    real_add = Journal.record_steps

    def write(handle: int, *rest: Any) -> int:
        written.add(handle)
        return real_write(handle, *rest)

    def copy(source: int, target: int, *rest: Any) -> int:
        written.add(target)
        return real_copy(source, target, *rest)

    def sync(handle: int) -> None:
        written.discard(handle)
        real_sync(handle)

    def add(self: Journal, steps: list[int]) -> None:
        noted_unsure.append(set(written))
        real_add(self, steps)

    class AtOnce:
        """The thread that makes sure, without being one."""

        def __init__(self, _count: int) -> None:
            pass

        def submit(self, work: Any, *given: Any) -> Future[Any]:
            done: Future[Any] = Future()
            done.set_result(work(*given))
            return done

        def shutdown(self, **_: Any) -> None:
            pass

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "copy_file_range", copy)
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Journal, "record_steps", add)
    monkeypatch.setattr(conversion, "ThreadPoolExecutor", AtOnce)
    llamas.to_meta(llamas.in_files(tmp_path / "a"), tmp_path / "b")
    assert noted_unsure == [set()] * 22


def test_moving_bytes_are_those_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above patch what is really called."""
    called: list[str] = []
    monkeypatch.setattr(os, "pwrite", lambda f, data, at: called.append("pwrite") or len(data))
    monkeypatch.setattr(
        os, "copy_file_range", lambda a, b, n, *at: called.append("copy_file_range") or n
    )
    output.write_all_bytes(0, memoryview(b"ab"), 0)
    output.copy_bytes(0, 0, 0, 0, 2, path=Path("a"))
    assert called == ["pwrite", "copy_file_range"]
