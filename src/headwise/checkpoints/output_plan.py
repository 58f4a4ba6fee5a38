"""Plan of the output files, to the byte, before any tensor is read; and writing into them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.checkpoints.safetensors_file import Shape, encode
from headwise.checkpoints.source import INDEX, SAFETENSORS, CheckpointSource, encode_index
from headwise.errors import CheckpointError
from headwise.layouts.conversion_steps import ConversionStep

CHUNK = 8 * 2**20
# The kernel or the disk cannot copy by itself; reading and writing still may.
_UNABLE = {errno.ENOSYS, errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM}
_UNRESERVED = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


@dataclass(frozen=True)
class OutputFile:
    """A file of the target.

    Attributes:
        name: of it.
        head: its first bytes.
        places: tensor -> the number of its first byte in the file.
        size: of the whole file.
    """

    name: str
    head: bytes
    places: Mapping[str, int]
    size: int


@dataclass(frozen=True)
class OutputPlan:
    """All files of the target.

    Attributes:
        files: with the tensors.
        index: the name and the bytes of one, where there is one.
        params: what params.json says, where the files become those that Meta's code loads.
    """

    files: tuple[OutputFile, ...]
    index: tuple[str, bytes] | None
    params: Mapping[str, Any] | None = None

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(file.size for file in self.files) + len(self.index[1] if self.index else b"")

    @property
    def room(self) -> int:
        """The bytes that it takes on the way: Meta's file is written beside the others."""
        return self.size if self.params is None else 2 * self.size


def outline(
    source: CheckpointSource, steps: Iterable[ConversionStep], metadata: Mapping[str, str]
) -> OutputPlan:
    """The files of the source once more, with the tensors that the steps make.

    A tensor goes into the file of the first that it is made of, and stands there in its order,
    the widest numbers first, so that each stands at a multiple of its width. Every file carries
    ``metadata`` beside that of its source.

    Raises:
        CheckpointError: two files of the source would become one.
    """
    order = {name: number for number, name in enumerate(source.headers)}
    made: dict[Path, list[tuple[int, int, str, Shape, torch.dtype]]] = {}
    for step in steps:
        first = min(step.inputs, key=order.__getitem__)
        dtype = source.headers[first].dtype  # of all: the plan fuses no two
        for name, shape in step.outputs.items():
            made.setdefault(source.headers[first].file, []).append(
                (-dtype.itemsize, order[first], name, shape, dtype)
            )
    files = []
    for shard in source.shards:
        if shard.path in made:
            tensors = {name: (shape, dtype) for *_, name, shape, dtype in sorted(made[shard.path])}
            head = encode(tensors, {"format": "pt", **shard.metadata, **metadata})
            files.append(OutputFile(_name(shard.path), *head))
    if len({file.name for file in files}) < len(files):
        raise CheckpointError(
            saw=", ".join(shard.path.name for shard in source.shards),
            needed=f"names that differ before their suffix: all become {SAFETENSORS}",
            do="rename one of them",
        )
    return OutputPlan(tuple(files), _index(source, files))


def _index(source: CheckpointSource, files: Sequence[OutputFile]) -> tuple[str, bytes] | None:
    if source.index is None and len(files) < 2:
        return None
    metadata = dict(source.index.metadata) if source.index else {}
    metadata["total_size"] = sum(file.size - len(file.head) for file in files)
    metadata.pop("total_parameters", None)  # biases may have come or gone
    name = "model.safetensors"
    if source.index:
        name = _name(Path(source.index.path.name.removesuffix(INDEX)))
    weight_map = {tensor: file.name for file in files for tensor in file.places}
    return name + INDEX, encode_index(weight_map, metadata)


def _name(path: Path) -> str:
    """The same with the suffix of safetensors, and as transformers calls it then."""
    if path.suffix == SAFETENSORS:
        return path.name
    return path.stem.replace("pytorch_model", "model", 1) + SAFETENSORS


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's numbers, the last axis fastest."""
    # A single number is contiguous whatever its stride, which as_strided leaves behind.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def copy(source: int, start: int, target: int, offset: int, count: int, path: Path) -> None:
    """Copy ``count`` bytes between open files; within the kernel where it can.

    Raises:
        CheckpointError: the source, which is at ``path``, ends before.
    """
    done = 0
    while done < count:
        moved = _copied(source, start + done, target, offset + done, count - done)
        if not moved:
            raise CheckpointError(
                saw=f"{path}, which became shorter while it was read",
                needed="a checkpoint that nobody writes to",
                do="ask again when it is finished",
            )
        done += moved


def reserve(target: int, size: int) -> None:
    """Make a file of this size, with room on the disk for all of it where the disk can."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(target, 0, size)
            return
    except OSError as error:
        if error.errno not in _UNRESERVED:
            raise
    os.ftruncate(target, size)


def _copied(source: int, start: int, target: int, offset: int, count: int) -> int:
    try:
        if hasattr(os, "copy_file_range"):
            return os.copy_file_range(source, target, count, start, offset)
    except OSError as error:
        if error.errno not in _UNABLE:
            raise
    read = os.pread(source, min(count, CHUNK), start)
    write_all(target, memoryview(read), offset)
    return len(read)


def write_all(target: int, left: memoryview, offset: int) -> None:
    """Write all of some bytes: a system writes as many at a time as it likes."""
    while left:
        written = os.pwrite(target, left, offset)
        left, offset = left[written:], offset + written
