"""A checkpoint as one: a file, an index with its files, or a folder with one checkpoint in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from headwise.checkpoints import safetensors_file, torch_file
from headwise.checkpoints.folder import (
    INDEX,
    SAFETENSORS,
    TORCH,
    Index,
    files_of,
    no_checkpoint,
    read_index,
    require_agreement,
    require_inside,
)
from headwise.checkpoints.safetensors_file import SafetensorsFile, Stored
from headwise.checkpoints.torch_file import TorchFile
from headwise.errors import CheckpointError

Shard = SafetensorsFile | TorchFile
# Size, time of the last change, the same as the system keeps it, number on the disk. A copying tool
# sets the first time as it likes; the second is nobody's to set.
State = tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class Source(Mapping[str, Tensor]):
    """Names, shapes and dtypes of a checkpoint; a tensor is mapped when it is asked for.

    Attributes:
        path: as it was named.
        shards: its files.
        headers: name -> shape, dtype and file.
        index: where there is one.
        states: of the files as they were opened.
    """

    path: Path
    shards: tuple[Shard, ...]
    headers: dict[str, Stored]
    index: Index | None
    states: dict[Path, State]

    def __getitem__(self, name: str) -> Tensor:
        return self._shards[self.headers[name].file].tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)

    @cached_property
    def _shards(self) -> dict[Path, Shard]:
        return {shard.path: shard for shard in self.shards}

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self.shards[0].path.parent

    @property
    def is_folder(self) -> bool:
        """Whether it is more than one named file."""
        return self.path.is_dir() or self.index is not None

    def require_unchanged(self) -> None:
        """Raise CheckpointError where a file is not as it was when it was opened."""
        for path, before in self.states.items():
            if not path.is_file() or _state(path) != before:
                raise CheckpointError(
                    saw=f"{path}, which changed while it was read",
                    needed="a checkpoint that nobody writes to",
                    do="ask again when it is finished",
                )

    def digest(self) -> str:
        """What a later run knows it by: its files, their times, and all that their heads say."""
        found = hashlib.sha256()
        for path, state in self.states.items():
            found.update(f"{path.absolute()} {state}\n".encode("utf-8", "surrogateescape"))
        for shard in self.shards:
            found.update(repr((shard.path.name, shard.headers, shard.metadata)).encode("utf-8"))
        return found.hexdigest()


def open_source(path: Path) -> Source:
    """Read the heads of a checkpoint's files, and no tensor.

    Raises:
        CheckpointError: it is not there, damaged, or no checkpoint.
    """
    try:
        return _opened(path)
    except OSError as error:
        raise CheckpointError(
            saw=f"{error.filename or path}, which cannot be read: {error.strerror or error}",
            needed="files that you may read",
            do="look at their names and permissions",
        ) from error


def _opened(path: Path) -> Source:
    files = files_of(path)
    index = None
    if len(files) == 1 and files[0].name.endswith(INDEX):
        index = read_index(files[0])
        files = index.files
    elif path.is_dir():
        for file in files:
            require_inside(file, path)
    states = {file: _state(file) for file in [*files, *([index.path] if index else [])]}
    shards = tuple(_read(file) for file in files)
    headers = _apart(shards)
    if index is not None:
        require_agreement(index, {name: x.file.name for name, x in headers.items()})
    return Source(path, shards, headers, index, states)


def _read(file: Path) -> Shard:
    if file.suffix == SAFETENSORS:
        return safetensors_file.read(file)
    if file.suffix in TORCH:
        return torch_file.read(file)
    raise no_checkpoint(file, f"ends in {file.suffix or 'nothing'}")


def _apart(shards: Iterable[Shard]) -> dict[str, Stored]:
    headers: dict[str, Stored] = {}
    for shard in shards:
        if twice := sorted(headers.keys() & shard.headers.keys()):
            raise CheckpointError(
                saw=f"{twice[0]}, in {headers[twice[0]].file} and in {shard.path.name}",
                needed="every tensor once",
                do="name one file, if these are two checkpoints; if they are one model cut up for "
                "several devices, merge it first",
            )
        headers |= shard.headers
    return headers


def _state(path: Path) -> State:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
