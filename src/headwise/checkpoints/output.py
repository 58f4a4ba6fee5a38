"""Plan of the output files, made from tensor headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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

MODEL_FILE = "model.safetensors"  # the name that transformers looks for


@dataclass(frozen=True, eq=False)
class OutputFile:
    """Safetensors file that a conversion writes from its first byte to its last.

    Attributes:
        name: the file's name.
        head: the safetensors header.
        size: bytes of the whole file.
        steps: the steps that make its tensors, in the order of their bytes.
        tensors: the names of its tensors, in the order of their bytes.
    """

    name: str
    head: bytes
    size: int
    steps: Sequence[ConversionStep]
    tensors: Sequence[str]


@dataclass(frozen=True, eq=False)
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
    def shards(self) -> list[tuple[OutputFile, ...]]:
        """The files, by those that are written together: shares hold parts of the same tensors."""
        return [(file,) for file in self.files] if self.division is None else [self.files]

    @property
    def is_found_by_transformers(self) -> bool:
        """True if the weights have the file names that transformers looks for."""
        name = self.index[0].removesuffix(INDEX) if self.index else self.files[0].name
        return name == MODEL_FILE

    @property
    def peak_size(self) -> int:
        """Bytes on disk during the work: the files of processes are copies of safetensors files."""
        size = sum(file.size for file in self.files) + len(self.index[1] if self.index else b"")
        return size if self.division is None else 2 * size

    def divide(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Return the part of a tensor for each file of its shard, joined again and compared.

        Raises:
            RoundTripError: the parts do not make up the tensor.
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
    steps_by_file: dict[Path, list[tuple[int, int, int, ConversionStep]]] = {}
    for number, step in enumerate(steps):
        first = min(step.inputs, key=order.__getitem__)
        stored = source.headers[first]  # all inputs of a step have the same dtype
        if step.outputs:
            place = (-stored.dtype.itemsize, order[first], number, step)
            steps_by_file.setdefault(stored.file, []).append(place)
    files = []
    for shard in source.shards:
        if shard.path in steps_by_file:
            ordered = [step for *_, step in sorted(steps_by_file[shard.path])]
            tensors = {
                name: (shape, source.headers[step.inputs[0]].dtype)
                for step in ordered
                for name, shape in sorted(step.outputs.items())
            }
            head, size = encode_header(tensors, {"format": "pt", **shard.metadata, **metadata})
            name = source.target_file_name(shard.path)
            files.append(OutputFile(name, head, size, ordered, [*tensors]))
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
    made = [(source.headers[step.inputs[0]].dtype, step) for step in steps if step.outputs]
    made.sort(key=lambda pair: -pair[0].itemsize)
    tensors: dict[str, tuple[Shape, torch.dtype]] = {
        name: (division.share_shape(name, tuple(shape)), dtype)
        for dtype, step in made
        for name, shape in step.outputs.items()
    }
    head, size = encode_header(tensors, {"format": "pt", **metadata})
    names = [f"share-{number:05}{SAFETENSORS}" for number in range(division.count)]
    ordered = [step for _, step in made]
    files = [OutputFile(name, head, size, ordered, [*tensors]) for name in names]
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
    weight_map = {tensor: file.name for file in files for tensor in file.tensors}
    return name + INDEX, encode_index(weight_map, metadata)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order."""
    # as_strided sets the stride to 1: a tensor of one number is contiguous with any stride.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data
