"""Plan of the output files, made from tensor headers alone; functions that write the files."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.checkpoints.safetensors import Shape, encode_header
from headwise.checkpoints.source import INDEX, SAFETENSORS, CheckpointSource, encode_index
from headwise.errors import CheckpointError
from headwise.layouts._convert import RoundTripError
from headwise.layouts.equality import same_bytes
from headwise.layouts.shards import ShardMap
from headwise.layouts.steps import ConversionStep

CHUNK = 8 * 2**20  # bytes
# The kernel or the disk has no copy operation here; reading and writing may still work.
_NO_COPY_RANGE = {errno.ENOSYS, errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM}
_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}

MODEL_FILE = "model.safetensors"  # the name that transformers looks for


@dataclass(frozen=True)
class OutputFile:
    """File of the target.

    Attributes:
        name: the file's name.
        head: the safetensors header.
        offsets: tensor -> its first byte in the file.
        size: bytes of the whole file.
    """

    name: str
    head: bytes
    offsets: Mapping[str, int]
    size: int


@dataclass(frozen=True)
class OutputPlan:
    """All files of the target.

    Attributes:
        files: the files with tensors.
        index: name and content of the index file; None without an index.
        division: the division of the tensors over the files, if these become the files of
            tensor-parallel processes; None if each tensor is whole in its file.
        params: the content of params.json, if the target is for Meta's code.
        config: the content of config.json, if the target is a folder that transformers loads.
    """

    files: tuple[OutputFile, ...]
    index: tuple[str, bytes] | None
    division: ShardMap | None = None
    params: Mapping[str, Any] | None = None
    config: str | None = None

    @property
    def size(self) -> int:
        """Bytes of the finished target."""
        return sum(file.size for file in self.files) + len(self.index[1] if self.index else b"")

    @property
    def is_found_by_transformers(self) -> bool:
        """True if the weights have the file names that transformers looks for."""
        name = self.index[0].removesuffix(INDEX) if self.index else self.files[0].name
        return name == MODEL_FILE

    @property
    def peak_size(self) -> int:
        """Bytes on disk during the work: other files are written beside the safetensors files."""
        return self.size if self.division is None else 2 * self.size

    def locate_tensor_in_files(self, name: str) -> list[tuple[str, int]]:
        """Return the files that hold a tensor or a share of it, and its first byte in each."""
        return [(file.name, file.offsets[name]) for file in self._files_by_tensor[name]]

    def split_tensor_into_verified_shares(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Return the shares of a tensor, after they were joined and compared; or the tensor.

        Raises:
            RoundTripError: the shares do not make up the tensor.
        """
        if self.division is None:
            return [tensor]
        shares = self.division.split(name, tensor)
        if not same_bytes(self.division.join(name, shares), tensor):
            raise RoundTripError(
                saw=f"{name}, which does not come back from {len(shares)} shares",
                needed="the same bytes",
                do="nothing was written; the layout's patterns contradict each other",
            )
        return shares

    def file_of_step(self, step: ConversionStep) -> str:
        """Return the name of the file that a step writes; "" for a step that only checks."""
        return next(
            (file.name for name in step.outputs for file in self._files_by_tensor[name]), ""
        )

    @cached_property
    def _files_by_tensor(self) -> dict[str, list[OutputFile]]:
        homes: dict[str, list[OutputFile]] = {}
        for file in self.files:
            for name in file.offsets:
                homes.setdefault(name, []).append(file)
        return homes


def plan_output(
    source: CheckpointSource, steps: Iterable[ConversionStep], metadata: Mapping[str, str]
) -> OutputPlan:
    """Return the plan: one file for each source file, with the tensors that the steps make.

    A tensor goes into the file of its first source tensor, in that tensor's order. Wider dtypes
    come first, so every tensor starts at a multiple of its item size. Every file carries
    ``metadata`` beside that of its source.

    Raises:
        CheckpointError: two files of the source would have the same target name.
    """
    order = {name: number for number, name in enumerate(source.headers)}
    made: dict[Path, list[tuple[int, int, str, Shape, torch.dtype]]] = {}
    for step in steps:
        first = min(step.inputs, key=order.__getitem__)
        dtype = source.headers[first].dtype  # the same for all inputs of a step
        for name, shape in step.outputs.items():
            made.setdefault(source.headers[first].file, []).append(
                (-dtype.itemsize, order[first], name, shape, dtype)
            )
    files = []
    for shard in source.shards:
        if shard.path in made:
            tensors = {name: (shape, dtype) for *_, name, shape, dtype in sorted(made[shard.path])}
            head = encode_header(tensors, {"format": "pt", **shard.metadata, **metadata})
            files.append(OutputFile(source.target_file_name(shard.path), *head))
    if len({file.name for file in files}) < len(files):
        raise CheckpointError(
            saw="the files " + ", ".join(shard.path.name for shard in source.shards),
            needed=f"names that differ before their suffix, which becomes {SAFETENSORS}",
            do="rename one of the files",
        )
    return OutputPlan(tuple(files), _plan_shard_index(source, files))


def plan_share_files(
    source: CheckpointSource,
    steps: Iterable[ConversionStep],
    metadata: Mapping[str, str],
    division: ShardMap,
) -> OutputPlan:
    """Return the plan of a file for each tensor-parallel process, with its share of all tensors."""
    tensors: list[tuple[int, str, Shape, torch.dtype]] = []
    for step in steps:
        dtype = source.headers[step.inputs[0]].dtype  # the same for all inputs of a step
        for name, shape in step.outputs.items():
            share = division.share_shape(name, tuple(shape))
            tensors.append((-dtype.itemsize, name, share, dtype))
    tensors.sort(key=lambda each: each[0])
    held = {name: (shape, dtype) for _, name, shape, dtype in tensors}
    head = encode_header(held, {"format": "pt", **metadata})
    files = [OutputFile(f"share-{n:05}{SAFETENSORS}", *head) for n in range(division.count)]
    return OutputPlan(tuple(files), None, division)


def _plan_shard_index(
    source: CheckpointSource, files: Sequence[OutputFile]
) -> tuple[str, bytes] | None:
    if source.index is None and len(files) < 2:
        return None
    metadata = dict(source.index.metadata) if source.index else {}
    metadata["total_size"] = sum(file.size - len(file.head) for file in files)
    metadata.pop("total_parameters", None)  # conversion may add or remove biases
    name = MODEL_FILE
    if source.index:
        name = source.target_file_name(Path(source.index.path.name.removesuffix(INDEX)))
    weight_map = {tensor: file.name for file in files for tensor in file.offsets}
    return name + INDEX, encode_index(weight_map, metadata)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order."""
    # as_strided sets the stride to 1: a tensor of one number is contiguous with any stride.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def copy_bytes(source: int, start: int, target: int, offset: int, count: int, path: Path) -> None:
    """Copy ``count`` bytes between open files, inside the kernel where possible.

    Raises:
        CheckpointError: the source, which is at ``path``, ends too early.
    """
    done = 0
    while done < count:
        moved = _copy_some(source, start + done, target, offset + done, count - done)
        if not moved:
            raise CheckpointError(
                saw=f"{path} became shorter while it was read",
                needed="a checkpoint that no program writes to",
                do="run the command again when the checkpoint is complete",
            )
        done += moved


def reserve_space(target: int, size: int) -> None:
    """Set the size of a file, and allocate its disk space where the file system can."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(target, 0, size)
            return
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise
    os.ftruncate(target, size)


def _copy_some(source: int, start: int, target: int, offset: int, count: int) -> int:
    try:
        if hasattr(os, "copy_file_range"):
            return os.copy_file_range(source, target, count, start, offset)
    except OSError as error:
        if error.errno not in _NO_COPY_RANGE:
            raise
    read = os.pread(source, min(count, CHUNK), start)
    write_all_bytes(target, memoryview(read), offset)
    return len(read)


def write_all_bytes(target: int, content: memoryview, offset: int) -> None:
    """Write all bytes: one system call may write fewer than requested."""
    while content:
        written = os.pwrite(target, content, offset)
        content, offset = content[written:], offset + written
