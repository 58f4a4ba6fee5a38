"""Checkpoint in shares of tensor-parallel processes: its files, read as one."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from headwise.checkpoints import source as sources
from headwise.checkpoints.safetensors import StoredTensor, TensorFile
from headwise.checkpoints.source import PART, SAFETENSORS, TORCH, CheckpointSource, incomplete_error
from headwise.errors import CheckpointError, OptionError, ShapeError, UndecidedError
from headwise.layouts._layout import Layout
from headwise.layouts.registry import layouts_by_name
from headwise.layouts.shards import ShardMap, derive_shard_map_from_shares, find_known_length
from headwise.support.tensors import same_bytes

RANK_FOLDER, TRACKER = "mp_rank_", "latest_checkpointed_iteration.txt"
_RANK = re.compile(rf"{RANK_FOLDER}(\d+)(_\d+)*")


def find_numbered_files(path: Path) -> dict[int, Path]:
    """Return process -> file; {} unless the files are several, and numbered without a total.

    Such files may also be parts of a model, with different tensors.

    Raises:
        CheckpointError: the path holds no weights, or stages of a pipeline.
    """
    folder = _find_folder_of_rank_folders(path)
    if folder is not None:
        return _find_rank_files(folder)
    files = sources.checkpoint_files(path)
    parts = [PART.fullmatch(file.stem) for file in files]
    numbers = {int(part[2]): file for part, file in zip(parts, files, strict=True) if part}
    has_total = any(part and part[3] is not None for part in parts)
    return {} if len(files) < 2 or len(numbers) < len(files) or has_total else numbers


def require_count(files: Sequence[Path], count: int) -> None:
    if len(files) < count:
        lacked = range(len(files), min(count, len(files) + 3))
        names = ", ".join(_name_for_process(files[0], number) for number in lacked)
        more = " and more" if count > len(files) + 3 else ""
        held = f"it holds {len(files)} of {count} shares, and lacks {names}{more}"
        raise incomplete_error(_processes_folder(files[0]), held)


def _find_folder_of_rank_folders(path: Path) -> Path | None:
    if not path.is_dir():
        return None
    tracker = path / TRACKER
    if tracker.is_file():
        text = tracker.read_text("utf-8", "replace").strip()
        name = f"iter_{int(text):07d}" if text.isdecimal() and len(text) < 10 else "release"
        path = path / name
    is_megatron = path.is_dir() and any(path.glob(f"{RANK_FOLDER}*"))
    return path if is_megatron else None


def _find_rank_files(folder: Path) -> dict[int, Path]:
    files = {}
    for rank in sorted(folder.glob(f"{RANK_FOLDER}*")):
        number = _RANK.fullmatch(rank.name)
        if number is None or number[2] is not None or not rank.is_dir():
            raise CheckpointError(
                saw=f"{rank}",
                needed="folders mp_rank_00, mp_rank_01 and so on, of tensor-parallel processes",
                do="join the stages of a pipeline by Megatron's own tools first",
            )
        weights = [file for file in sorted(rank.iterdir()) if file.suffix in (SAFETENSORS, *TORCH)]
        if len(weights) != 1:
            names = ", ".join(file.name for file in weights) or "no weights"
            raise incomplete_error(folder, f"{rank.name} holds {names}, not one file of weights")
        files[int(number[1])] = weights[0]
    return files


def _processes_folder(file: Path) -> Path:
    return file.parent.parent if file.parent.name.startswith(RANK_FOLDER) else file.parent


def _name_for_process(file: Path, number: int) -> str:
    """Return the name for another process: consolidated.03.pth for consolidated.00.pth."""
    name = file.parent.name if file.parent.name.startswith(RANK_FOLDER) else file.name
    last = list(re.finditer(r"\d+", name))[-1]
    return f"{name[: last.start()]}{number:0{len(last[0])}}{name[last.end() :]}"


@dataclass(frozen=True, eq=False)
class JoinedSource(CheckpointSource):
    """Whole tensors of shares; only the shares of one tensor are in memory at a time."""

    division: ShardMap  # of the tensors over the files

    def __getitem__(self, name: str) -> Tensor:
        """Join a tensor, divide it again and compare the shares byte for byte."""
        shares = [shard.tensor(name) for shard in self.shards]
        whole = self.division.join(name, shares)
        again = self.division.split(name, whole)
        for file, *pair in zip(self.shards, shares, again, strict=True):
            if not same_bytes(*pair):
                first, other = _short_path(self.shards[0].path), _short_path(file.path)
                raise CheckpointError(
                    saw=f"{name} differs between {first} and {other}",
                    needed="the same kv head in neighbouring shares"
                    if name in self.division.axes
                    else "the same tensor in all shares, since the layout divides no axis of it",
                    do="copy the files again; or name the layout that the shares are in",
                )
        return whole

    @property
    def folder(self) -> Path:
        """The folder of the files, or of the folders of all processes."""
        return self.path

    def target_file_name(self, file: Path) -> str:
        number = [shard.path for shard in self.shards].index(file) + 1
        return f"model-{number:05}-of-{len(self.shards):05}{SAFETENSORS}"


def open_shares(path: Path) -> JoinedSource | None:
    """Open shares before their division is known; None unless the path holds shares.

    Raises:
        CheckpointError: a share is missing or damaged, or the shares hold different tensors.
    """
    with sources.explained_os_errors(path):
        numbers = find_numbered_files(path)
        for file in numbers.values():
            sources.require_inside(file, path)
        files = {number: sources.read_tensor_file(file) for number, file in numbers.items()}
    sets = [frozenset(file.headers) for file in files.values()]
    is_parts = len(files) > 1 and not frozenset.intersection(*sets)
    if not files or is_parts:
        return None
    shards = tuple(files[number] for number in sorted(files))
    _require_same_headers(shards)
    for number in range(len(files)):
        if number not in numbers:
            first = numbers[min(numbers)]
            lacked = _name_for_process(first, number)
            raise incomplete_error(_processes_folder(first), f"it lacks {lacked}")
    states = {shard.path: sources.read_file_state(shard.path) for shard in shards}
    return JoinedSource(path, shards, shards[0].headers, None, states, ShardMap(len(shards), {}))


def join_shares(
    shares: JoinedSource, stored: Layout | None, known: Mapping[str, int]
) -> JoinedSource:
    """Return the shares as one checkpoint, in the layout ``stored``, or any that fits if None.

    Raises:
        CheckpointError: the counts of the model need more shares.
        OptionError, ShapeError: the shares do not fit the layout.
        UndecidedError: no layout is given, and layouts that fit divide the tensors differently.
    """
    shapes = {name: header.shape for name, header in shares.headers.items()}
    count = len(shares.shards)
    if stored is None:
        stored = _find_fitting_layout(shares, shapes, known)
    if known_length := find_known_length(stored, shapes, known):
        name, length, whole = known_length
        files = [shard.path for shard in shares.shards]
        if whole % length == 0:
            require_count(files, whole // length)
        if whole != length * count:
            raise CheckpointError(
                saw=f"{shares.path}: {count} shares of {name} with {length} rows or columns each",
                needed=f"{whole} of them in all, by the heads of the model",
                do="give the counts of the model, or all files of it",
            )
    division = derive_shard_map_from_shares(stored, shapes, count, known)
    return replace(shares, division=division, headers=_make_whole_headers(shares, division))


def require_all_shares(source: CheckpointSource, stored: Layout, known: Mapping[str, int]) -> None:
    """Raise CheckpointError if the only file of a folder is one of several shares."""
    file = source.shards[0].path
    if not source.path.is_dir() or len(source.shards) > 1 or PART.fullmatch(file.stem) is None:
        return
    shapes = {name: header.shape for name, header in source.headers.items()}
    length = find_known_length(stored, shapes, known) if stored.sharded else None
    if length is not None and length[2] % length[1] == 0:
        require_count([file], length[2] // length[1])


def _make_whole_headers(shares: JoinedSource, division: ShardMap) -> dict[str, StoredTensor]:
    """Return the headers of whole tensors, each in a file of the target, in equal parts."""
    headers = {
        name: replace(header, shape=division.whole_shape(name, header.shape), offset=None)
        for name, header in shares.headers.items()
    }
    total, done = sum(header.nbytes for header in headers.values()), 0
    files = [shard.path for shard in shares.shards]
    for name, header in headers.items():
        headers[name] = replace(header, file=files[len(files) * done // max(total, 1)])
        done += header.nbytes
    return headers


def _find_fitting_layout(
    shares: JoinedSource, shapes: Mapping[str, tuple[int, ...]], known: Mapping[str, int]
) -> Layout:
    fitting: list[tuple[Layout, ShardMap]] = []
    count = len(shares.shards)
    for each in layouts_by_name().values():
        with suppress(OptionError, ShapeError):
            if each.sharded:
                fitting.append((each, derive_shard_map_from_shares(each, shapes, count, known)))
    if not fitting:
        divided = ", ".join(each.name for each in layouts_by_name().values() if each.sharded)
        raise CheckpointError(
            saw=f"{shares.path} holds {count} shares of each tensor, in no layout that fits",
            needed=f"shares in one of the layouts {divided}",
            do="join the shares by the tools of the framework that wrote them",
        )
    if any(division != fitting[0][1] for _, division in fitting):
        raise UndecidedError(
            saw=f"{shares.path} holds {count} shares of each tensor, which fit "
            f"{', '.join(each.name for each, _ in fitting)}",
            needed="one layout: these divide the tensors differently",
            do="give {from}, or a config.json with the heads",
            parameter={"from": (fitting[0][0].name,)},
        )
    return fitting[0][0]


def _require_same_headers(shards: Sequence[TensorFile]) -> None:
    first = shards[0]
    for shard in shards[1:]:
        for name in {**first.headers, **shard.headers}:
            mine, theirs = first.headers.get(name), shard.headers.get(name)
            paths = _short_path(first.path), _short_path(shard.path)
            if mine is None or theirs is None:
                saw = f"{name} is in {paths[mine is None]} alone"
            elif (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
                saw = (
                    f"{name} is {mine.dtype} {mine.shape} in {paths[0]}, and "
                    f"{theirs.dtype} {theirs.shape} in {paths[1]}"
                )
            else:
                continue
            raise CheckpointError(
                saw=saw,
                needed="files that are shares of one model, of the same tensors and shapes",
                do="copy the files again; or name one of them, if these are several checkpoints",
            )


def _short_path(file: Path) -> str:
    return f"{file.parent.name}/{file.name}"
