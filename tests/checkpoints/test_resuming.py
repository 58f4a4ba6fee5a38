"""A run that is killed at any moment goes on with the first unfinished file, to the same bytes."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwise.checkpoints import torch_file
from headwise.checkpoints.conversion import ConversionReport, convert_checkpoint
from headwise.checkpoints.source import open_source
from headwise.checkpoints.staging import PartialFile, StagingDir
from headwise.errors import CheckpointError
from tests.checkpoints import llamas
from tests.root import ROOT

# Runs in a process of its own, whose children are killed in the middle of a write.
KILLED = """
import json, os, signal, sys
from pathlib import Path
from headwise.checkpoints.staging import PartialFile, StagingDir
from tests.checkpoints import llamas

source, place = map(Path, sys.argv[1:])
os.fsync = lambda _: None  # what is killed here is a process, not a machine
write, copy = PartialFile.write, PartialFile.append_range
append, rename = StagingDir._append, os.rename
left = iter(())  # the events that are lived through; threads may not count the same one twice
wrote = 0

def dies(half, whole):
    if next(left, None) is None:
        half()
        os.kill(os.getpid(), signal.SIGKILL)
    return whole()

def written(part, data):
    global wrote
    wrote += 1
    dies(lambda: write(part, data[: len(data) // 2]), lambda: write(part, data))

def copied(part, path, start, count):
    global wrote
    wrote += 1
    dies(lambda: copy(part, path, start, count // 2), lambda: copy(part, path, start, count))

def appended(staging, line):
    def half():
        staging._manifest.write(json.dumps(line).encode()[:20])
        staging._manifest.flush()
    dies(half, lambda: append(staging, line))

def child(target, events):
    global left
    identifier = os.fork()
    if not identifier:
        left = iter(range(1, events))
        PartialFile.write, PartialFile.append_range = written, copied
        StagingDir._append = appended
        os.rename = lambda a, b: dies(lambda: None, lambda: rename(a, b))
        found = llamas.to_meta(source, target).earlier_run
        target.with_suffix(".found").write_text(json.dumps([found, wrote]))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(identifier, 0)[1])

told = []
for events in range(1, 34):
    target = place / f"target-{events}"
    ended = child(target, events)
    was_there = target.exists()
    manifest = place / f".target-{events}.headwise-part" / "manifest"
    lines = manifest.read_bytes().count(b"\\n") if manifest.exists() else 0
    if not was_there:
        child(target, 99)
    told.append([ended, was_there, lines, *json.loads(target.with_suffix(".found").read_text())])
target = place / "target-often"
often = 0
while child(target, 13) != 0:
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
    *killed, last = result["told"]
    # The identity; three times a header, seven tensors, a rename and a line; the last rename.
    assert last == [0, True, 0, "nothing", 24]
    assert [(ended, was_there) for ended, was_there, *_ in killed] == [(-9, False)] * 32
    for _, _, lines, found, wrote in killed:  # a file whose line was cut off is written again
        assert found == ("its beginning" if lines else "other work")
        assert wrote == 24 - 8 * max(lines - 1, 0)
    # A thread writes the lines: on a busy machine two of them fall between two kills.
    assert {0, 4} <= {lines for _, _, lines, *_ in killed} <= {0, 1, 2, 3, 4}
    assert result["often"] >= 2
    targets = sorted(path for path in place.iterdir() if path.is_dir())
    assert len(targets) == len(result["told"]) + 1
    for each in targets:
        assert llamas.bytes_of(each) == whole


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source of a run to ``b`` that was interrupted in its second file of three."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    source = llamas.in_files(tmp_path / "a")
    manifest = tmp_path / ".b.headwise-part" / "manifest"
    told: list[int] = []

    def stop(*_: object) -> None:
        told.append(1)
        if len(told) == 11:
            wait_until(lambda: manifest.read_bytes().count(b"\n") == 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llamas.to_meta(source, tmp_path / "b", progress=stop)
    assert sorted(os.listdir(tmp_path)) == [".b.headwise-part", "a"]
    return source


def wait_until(is_true: Callable[[], bool]) -> None:
    """Another thread finishes the first file."""
    end = time.monotonic() + 120
    while not is_true():
        assert time.monotonic() < end, "the file was not finished within two minutes"
        time.sleep(0.01)


FIRST = "model-00001-of-00003.safetensors"


def files_of_the_next(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are really written, from now on."""
    written: list[str] = []
    real = PartialFile.__init__
    monkeypatch.setattr(
        PartialFile, "__init__", lambda part, path: (written.append(path.stem), real(part, path))[1]
    )
    return written


def test_a_finished_file_is_not_written_again(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = files_of_the_next(monkeypatch)
    told: list[int] = []
    done = llamas.to_meta(stopped, tmp_path / "b", progress=lambda _, n, __: told.append(n))
    assert done.earlier_run == "its beginning"
    assert [name[:11] for name in written] == ["model-00002", "model-00003"]
    assert len(told) == 1 + 14 + 1  # a finished file is counted whole
    assert told == sorted(told)
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
    written = files_of_the_next(monkeypatch)
    done = llamas.to_meta(stopped, tmp_path / "b", **options)
    assert done.earlier_run == "other work"
    assert len(written) == 3
    expected = llamas.in_metas(llamas.read(stopped))
    llamas.assert_same(llamas.read(tmp_path / "b"), expected)


def test_what_version_0_1_0_left_is_other_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / ".b.headwise-part"
    (part / "made").mkdir(parents=True)
    (part / "made" / FIRST).write_bytes(b"half of it")
    (part / "journal").write_text("identity\n0 1 2\n")
    done = llamas.to_meta(llamas.in_files(tmp_path / "a"), tmp_path / "b")
    assert done.earlier_run == "other work"
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


HARM = {  # what is harmed -> the files that are written again
    "zeros in a line": 3,
    "a line that is cut off": 2,
    "a line of another kind": 3,
    "no identity": 3,
    "a shorter file": 3,
    "other bytes": 3,
    "other bytes of the same time": 2,
    "no file": 3,
}


def harm(part: Path, what: str) -> None:
    manifest, file = part / "manifest", part / "files" / FIRST
    raw, bytes_, state = manifest.read_bytes(), file.read_bytes(), file.stat()
    identity, line = raw.splitlines(keepends=True)
    if what == "zeros in a line":
        manifest.write_bytes(identity + bytes(len(line) - 1) + b"\n" + line)
    if what == "a line that is cut off":
        manifest.write_bytes(raw + line[:-1])
    if what == "a line of another kind":
        manifest.write_bytes(identity + b"[1]\n" + line)
    if what == "no identity":
        manifest.write_bytes(line)
    if what == "a shorter file":
        file.write_bytes(bytes_[:-1])
    if what.startswith("other bytes"):
        file.write_bytes(bytes_[:-1] + bytes([bytes_[-1] ^ 1]))
    if what in ("other bytes of the same time", "a shorter file"):
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    if what == "no file":
        file.unlink()


@pytest.mark.parametrize("what", HARM)
def test_a_beginning_that_is_harmed(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    harm(tmp_path / ".b.headwise-part", what)
    written = files_of_the_next(monkeypatch)
    done = llamas.to_meta(stopped, tmp_path / "b")
    assert done.earlier_run == ("other work" if what == "no identity" else "its beginning")
    assert len(written) == HARM[what]
    is_whole = what != "other bytes of the same time"
    expected = llamas.in_metas(llamas.weights())
    made = llamas.read(tmp_path / "b")
    assert sorted(made) == sorted(expected)
    if is_whole:
        llamas.assert_same(made, expected)


def test_verify_reads_what_an_earlier_run_finished(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time and its size are those of its line, and its bytes are not."""
    harm(tmp_path / ".b.headwise-part", "other bytes of the same time")
    written = files_of_the_next(monkeypatch)
    llamas.to_meta(stopped, tmp_path / "b", verify=True)
    assert len(written) == 3
    llamas.assert_same(llamas.read(tmp_path / "b"), llamas.in_metas(llamas.weights()))


def test_verify_keeps_what_is_right(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = files_of_the_next(monkeypatch)
    llamas.to_meta(stopped, tmp_path / "b", verify=True)
    assert len(written) == 2


def test_verify_reads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that returns other bytes is found, and nothing is left."""
    source, real = llamas.in_files(tmp_path / "a"), os.rename

    def rename(part: Path, file: Path) -> None:
        raw = part.read_bytes()
        part.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        real(part, file)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(CheckpointError, match=f"{FIRST} reads back other bytes"):
        llamas.to_meta(source, tmp_path / "b", verify=True)
    assert os.listdir(tmp_path) == ["a"]


def test_a_line_is_written_only_after_its_file_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not made sure of when the machine loses power may be anything."""
    source = llamas.in_files(tmp_path / "a")
    files = tmp_path / ".b.headwise-part" / "files"
    events: list[str] = []
    real_sync, real_rename, real_append = os.fsync, os.rename, StagingDir._append

    def sync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        assert os.fstat(handle).st_size == path.stat().st_size  # nothing is left in a buffer
        events.append(f"sync {path.name}")
        real_sync(handle)

    def rename(old: Path, new: Path) -> None:
        events.append(f"rename {new.name}")
        real_rename(old, new)

    def append(self: StagingDir, line: dict[str, Any]) -> None:
        assert "file" not in line or (files / line["file"]).is_file()
        events.append(f"line {line.get('file')}")
        real_append(self, line)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(StagingDir, "_append", append)
    llamas.to_meta(source, tmp_path / "b")
    names = [f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]
    finished = [
        [f"sync {name}.part", f"rename {name}", "sync files", f"line {name}", "sync manifest"]
        for name in names
    ]
    assert events == [
        *["line None", "sync manifest"],
        *(event for file in finished for event in file),
        *[f"sync {llamas.INDEX}", "sync files", "rename b", f"sync {tmp_path.name}"],
    ]


def test_other_work_is_removed_after_its_lines(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = tmp_path / ".b.headwise-part" / "manifest"
    sizes: list[int] = []

    def remove(_: Path) -> None:
        sizes.append(manifest.stat().st_size)
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", remove)
    assert manifest.stat().st_size > 0
    with pytest.raises(KeyboardInterrupt):
        llamas.to_meta(stopped, tmp_path / "b", rotary_width=10)
    assert sizes == [0]


@pytest.mark.parametrize("began", [True, False])
def test_a_run_that_ends_while_another_waits_for_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, began: bool
) -> None:
    """The lock is then that of a file that is gone, or that is another one by now."""
    target, real = tmp_path / "b", fcntl.flock
    first = StagingDir(target, 0)
    later: list[StagingDir] = []

    def ends(handle: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        first.path.joinpath("manifest").unlink()
        first._manifest.close()
        if began:
            later.append(StagingDir(target, 0))
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", ends)
    with pytest.raises(CheckpointError, match="another run is writing into"):
        StagingDir(target, 0)
    for each in later:
        each._manifest.close()


def test_one_run_at_a_time(stopped: Path, tmp_path: Path) -> None:
    with StagingDir(tmp_path / "b", 0):
        with pytest.raises(CheckpointError, match="another run is writing into"):
            llamas.to_meta(stopped, tmp_path / "b")
        assert (tmp_path / ".b.headwise-part" / "files" / FIRST).is_file()
    assert llamas.to_meta(stopped, tmp_path / "b").earlier_run == "its beginning"


def test_a_file_beside_the_tensors_that_was_cut_off_is_written_again(
    stopped: Path, tmp_path: Path
) -> None:
    (tmp_path / ".b.headwise-part" / "files" / llamas.INDEX).write_text("{")
    llamas.to_meta(stopped, tmp_path / "b")
    llamas.to_meta(stopped, tmp_path / "c")
    assert llamas.bytes_of(tmp_path / "b") == llamas.bytes_of(tmp_path / "c")


def test_megatrons_files_that_were_begun_are_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their folders are there already, and the shares need not be written again."""
    source, real, saved = llamas.in_files(tmp_path / "a"), torch_file.save_torch_file, []

    def convert(target: str) -> ConversionReport:
        options: dict[str, Any] = {**llamas.COUNTS, "files": "megatron"}
        opened = open_source(source)
        return convert_checkpoint(opened, tmp_path / target, "llama", "megatron", **options)

    def save(path: Path, content: dict[str, Any]) -> None:
        saved.append(path)
        if len(saved) == 1:
            raise KeyboardInterrupt
        real(path, content)

    monkeypatch.setattr(torch_file, "save_torch_file", save)
    with pytest.raises(KeyboardInterrupt):
        convert("b")
    written = files_of_the_next(monkeypatch)
    assert convert("b").earlier_run == "its beginning"
    assert written == []
    convert("c")
    assert llamas.bytes_of(tmp_path / "b") == llamas.bytes_of(tmp_path / "c")
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]
