"""A target that cannot be written: nothing of it stays, and the source is as it was."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwise.checkpoints import conversion, staging
from headwise.checkpoints.conversion import convert_checkpoint
from headwise.checkpoints.source import open_source
from headwise.errors import CheckpointError, HeadwiseError, OptionError, ShapeError
from headwise.layouts import plan
from tests.checkpoints import llamas
from tests.root import ROOT


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llamas.in_files(tmp_path / "a")


def refused(source: Path, target: Path, **options: Any) -> HeadwiseError:
    """The error of a run after which everything is as before."""
    before = llamas.bytes_of(source)
    around = sorted(os.listdir(source.parent))
    with pytest.raises(HeadwiseError) as error:
        llamas.to_meta(source, target, **options)
    assert llamas.bytes_of(source) == before
    assert sorted(os.listdir(source.parent)) == around
    assert len(str(error.value).splitlines()) == 3
    return error.value


@pytest.mark.parametrize("kind", ["file", "folder", "link to nothing"])
def test_a_target_that_is_there(source: Path, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "b"
    if kind == "file":
        target.touch()
    if kind == "folder":
        target.mkdir()
    if kind == "link to nothing":
        target.symlink_to("nowhere")
    assert f"{target} exists already" in refused(source, target).saw


def test_a_target_that_is_the_source(source: Path) -> None:
    assert "exists already" in refused(source, source).saw


@pytest.mark.parametrize("place", ["b", "below/b"])
def test_a_target_within_the_source(source: Path, place: str) -> None:
    assert "within the source" in refused(source, source / place).saw


def test_a_target_within_the_source_by_a_link(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    assert "within the source" in refused(source, tmp_path / "link" / "b").saw


def test_a_folder_becomes_no_file_and_a_file_no_folder(source: Path, tmp_path: Path) -> None:
    error = refused(source, tmp_path / "b.safetensors")
    assert (error.needed, error.do) == (
        "the name of a folder, because the source is one",
        str(tmp_path / "b"),
    )
    error = refused(llamas.one_file(tmp_path / "one.safetensors"), tmp_path / "b")
    assert error.do == str(tmp_path / "b.safetensors")
    error = refused(tmp_path / "one.safetensors", tmp_path / "b.v2")
    assert error.do == str(tmp_path / "b.v2.safetensors")


def test_a_target_by_a_way_that_is_not_there(source: Path, tmp_path: Path) -> None:
    error = refused(source, tmp_path / "not" / "..")
    assert error.saw.endswith("ends in no name")
    done = llamas.to_meta(source, tmp_path / "not" / ".." / "b")
    assert done.target == tmp_path / "b"
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert "exists already" in refused(source, tmp_path / "not" / ".." / "b").saw


def test_a_target_below_a_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "Not a directory" in refused(source, tmp_path / "file" / "b").saw


def test_a_disk_without_room(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    size = llamas.to_meta(source, tmp_path / "b").nbytes

    class Full:
        f_frsize, f_bavail = 1, size - 1

    monkeypatch.setattr(os, "statvfs", lambda _: Full)
    monkeypatch.setattr(os, "mkdir", lambda *_: pytest.fail("it began to work"))
    error = refused(source, tmp_path / "c")
    assert error.saw == f"{tmp_path} has {size - 1:,} B free"
    assert error.needed == f"{size:,} B free"
    Full.f_bavail = 0
    error = refused(source, tmp_path / "c")
    assert (error.saw, error.needed) == (f"{tmp_path} has 0 B free", "61 kB free")
    assert real.f_bavail * real.f_frsize > size


@pytest.mark.parametrize("at", [0, 3, 8, 20])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_fails_in_the_middle(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, number: int
) -> None:
    left = [at]

    def failing(real: Callable[..., int]) -> Callable[..., int]:
        def call(*given: Any) -> int:
            if not left[0]:
                raise OSError(number, os.strerror(number))
            left[0] -= 1
            return real(*given)

        return call

    monkeypatch.setattr(os, "write", failing(os.write))
    monkeypatch.setattr(os, "copy_file_range", failing(os.copy_file_range))
    assert os.strerror(number) in refused(source, tmp_path / "b").saw


@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_a_system_that_refuses(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, name, refuse)
    assert "No space left" in refused(source, tmp_path / "b").saw


@pytest.mark.parametrize("at", ["finish_file", "finish"])
def test_a_disk_that_fails_when_all_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(staging.StagingDir, at, refuse)
    assert "Input/output error" in refused(source, tmp_path / "b").saw


@pytest.mark.slow
def test_a_real_limit_on_the_size_of_files(source: Path, tmp_path: Path) -> None:
    # -B: an import under the limit would leave half of a compiled module behind.
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from tests.checkpoints import llamas\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
        "llamas.to_meta(Path(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    done = subprocess.run(
        [sys.executable, "-B", "-c", script, str(source), str(tmp_path / "b")],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert "CheckpointError" in done.stderr
    assert "File too large" in done.stderr
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_that_may_not_be_written_to(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(path: Any, *_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "mkdir", forbidden)
    assert "Permission denied" in refused(source, tmp_path / "b").saw


def test_a_source_that_changes(source: Path, tmp_path: Path) -> None:
    file = source / "model-00001-of-00003.safetensors"

    def change(*_: object) -> None:
        os.utime(file, ns=(1, 1))

    with pytest.raises(CheckpointError, match="changed while it was read"):
        llamas.to_meta(source, tmp_path / "b", progress=change)
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("size", [0, 3000, 9000])
def test_a_source_that_is_cut_off_before_it_is_read(
    source: Path, tmp_path: Path, size: int
) -> None:
    opened = open_source(source)
    with (source / "model-00002-of-00003.safetensors").open("r+b") as file:
        file.truncate(size)
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        convert_checkpoint(opened, tmp_path / "b", "llama", "llama-meta", **llamas.COUNTS)
    assert os.listdir(tmp_path) == ["a"]


def test_a_mistake_of_ours_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors that nobody thought of are failures, too."""
    for kind in (RuntimeError, AssertionError, MemoryError):
        with monkeypatch.context() as patch:
            patch.setattr(conversion, "run_round_trip_checked_step", raising(kind("words")))
            with pytest.raises(kind, match="words"):
                llamas.to_meta(source, tmp_path / "b")
        assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_who_is_asked_to_stop_leaves_everything(
    source: Path, tmp_path: Path, stop: type[BaseException]
) -> None:
    with pytest.raises(stop):
        llamas.to_meta(source, tmp_path / "b", progress=raising(stop()))
    assert sorted(os.listdir(tmp_path)) == [".b.headwise-part", "a"]


def raising(error: BaseException) -> Callable[..., None]:
    def call(*_: object) -> None:
        raise error

    return call


@pytest.mark.parametrize("at", ["_open_and_lock", "begin"])
def test_folders_on_the_way_go_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    failing = raising(OSError(errno.ENOSPC, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr(staging if at == "_open_and_lock" else staging.StagingDir, at, failing)
        assert "No space left" in refused(source, tmp_path / "new" / "newer" / "b").saw
    done = llamas.to_meta(source, tmp_path / "new" / "newer" / "b")
    assert os.listdir(tmp_path / "new" / "newer") == ["b"]
    assert done.target.is_dir()


@pytest.mark.parametrize("at", ["_sync_to_disk", "_discard"])
def test_a_disk_that_fails_when_the_target_has_its_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    owner: Any = staging if at == "_sync_to_disk" else staging.StagingDir
    real = getattr(owner, at)

    def fail(*given: Any) -> None:
        if (tmp_path / "b").exists():
            raise OSError(errno.EIO, "Input/output error")
        real(*given)

    monkeypatch.setattr(owner, at, fail)
    with pytest.raises(CheckpointError) as error:
        llamas.to_meta(source, tmp_path / "b")
    assert error.value.saw.endswith(f"Input/output error; {tmp_path / 'b'} is complete")
    assert "nothing was written" not in str(error.value)
    llamas.assert_same(llamas.read(tmp_path / "b"), llamas.in_metas(llamas.weights()))


def test_a_file_that_appears_at_the_last_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename would write over it."""
    source, target = llamas.one_file(tmp_path / "a.safetensors"), tmp_path / "b.safetensors"
    real = staging.require_unused_name

    def appear(path: Path) -> None:
        real(path)
        path.write_text("another's")

    monkeypatch.setattr(staging, "require_unused_name", appear)
    with pytest.raises(CheckpointError, match="exists already"):
        llamas.to_meta(source, target)
    assert target.read_text() == "another's"
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EIO])
def test_a_disk_on_which_a_file_has_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    source, target = llamas.one_file(tmp_path / "a.safetensors"), tmp_path / "b.safetensors"
    monkeypatch.setattr(os, "link", raising(OSError(number, os.strerror(number))))
    if number == errno.EIO:
        assert "Input/output error" in refused(source, target).saw
    else:
        llamas.to_meta(source, target)
        assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors"]
        llamas.assert_same(llamas.read(target), llamas.in_metas(llamas.weights()))


def test_a_target_that_appears_meanwhile(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "b"

    def appear(*_: object) -> None:
        target.mkdir(exist_ok=True)

    with pytest.raises(CheckpointError, match="exists already"):
        llamas.to_meta(source, target, progress=appear)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert list(target.iterdir()) == []


def test_a_conversion_that_does_not_lead_back(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "same_bytes", lambda a, b: a.shape != (60, 40))
    assert isinstance(refused(source, tmp_path / "b"), plan.RoundTripError)


@pytest.mark.parametrize(
    ("counts", "kind"),
    [({"heads": 7}, ShapeError), ({"heads": 4}, ShapeError), ({"kv_heads": 4}, ShapeError)],
)
def test_counts_that_do_not_divide(
    source: Path, tmp_path: Path, counts: dict[str, int], kind: type[HeadwiseError]
) -> None:
    assert isinstance(refused(source, tmp_path / "b", **counts), kind)


@pytest.mark.parametrize(
    ("name", "saw"),
    [
        ("model.layers.0.self_attn.q_proj.lora_A", "lora_A, within model.layers.0.self_attn."),
        ("layers.0.attention.wq.weight", "layers.0.attention.wq.weight, made of"),
    ],
)
def test_names_that_do_not_fit(tmp_path: Path, name: str, saw: str) -> None:
    state = llamas.weights()
    place = tmp_path / "a"
    place.mkdir()
    llamas.one_file(place / "a.safetensors", state | {name: state["model.norm.weight"].clone()})
    error = refused(place, tmp_path / "b")
    assert isinstance(error, OptionError)
    assert saw in error.saw


def test_room_that_an_earlier_run_has_taken_counts(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llamas.to_meta(source, tmp_path / "b", progress=stop)
    part = tmp_path / ".b.headwise-part"
    taken = sum(file.stat().st_blocks * 512 for file in part.rglob("*"))
    assert taken > (part / "model-00001-of-00003.safetensors.part").stat().st_size > 0
    asked: list[int] = []
    monkeypatch.setattr(staging, "require_disk_space", lambda _, size: asked.append(size))
    done = llamas.to_meta(source, tmp_path / "b")
    assert asked == [done.nbytes - taken]
