"""Which files will be written, byte by byte, before anything is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import torch

from headwise.checkpoints.folder import INDEX, SAFETENSORS, encode_index
from headwise.checkpoints.safetensors_file import Entry, encode
from headwise.checkpoints.source import Source
from headwise.errors import CheckpointError
from headwise.layouts.steps import Step


@dataclass(frozen=True)
class File:
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
class Outline:
    """All files of the target. ``index`` are the name and the bytes of one, where there is one."""

    files: tuple[File, ...]
    index: tuple[str, bytes] | None

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(file.size for file in self.files) + len(self.index[1] if self.index else b"")

    def place(self, name: str) -> tuple[File, int]:
        """Where a tensor goes."""
        return self._places[name]

    @cached_property
    def _places(self) -> dict[str, tuple[File, int]]:
        return {name: (file, at) for file in self.files for name, at in file.places.items()}


def outline(source: Source, steps: Iterable[Step]) -> Outline:
    """The files of the source once more, with the tensors that the steps make.

    A tensor goes into the file of the first that it is made of, and stands there in its order,
    the widest numbers first, so that each stands at a multiple of its width.

    Raises:
        CheckpointError: two files of the source would become one.
    """
    order = {name: number for number, name in enumerate(source.headers)}
    made: dict[Path, list[tuple[int, int, str, tuple[int, ...], torch.dtype]]] = {}
    for step in steps:
        first = min(step.inputs, key=order.__getitem__)
        dtype = source.headers[first].dtype  # of all: the plan fuses no two
        for name, shape in step.outputs.items():
            made.setdefault(source.headers[first].file, []).append(
                (-dtype.itemsize, order[first], name, shape, dtype)
            )
    files = tuple(
        _file(
            _name(shard.path),
            {name: (shape, dtype) for *_, name, shape, dtype in sorted(made[shard.path])},
            shard.metadata,
        )
        for shard in source.shards
        if shard.path in made
    )
    _require_apart(files, source)
    return Outline(files, _index(source, files))


def _file(
    name: str,
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    metadata: Mapping[str, str],
) -> File:
    entries, end = {}, 0
    for tensor, (shape, dtype) in tensors.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        entries[tensor] = Entry(shape, dtype, start, end)
    head = encode(entries, {"format": "pt", **metadata})
    places = {tensor: len(head) + entry.start for tensor, entry in entries.items()}
    return File(name, head, places, len(head) + end)


def _index(source: Source, files: tuple[File, ...]) -> tuple[str, bytes] | None:
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
    stem = path.stem
    return stem.replace("pytorch_model", "model", 1) + SAFETENSORS


def _require_apart(files: tuple[File, ...], source: Source) -> None:
    names = [file.name for file in files]
    if len(set(names)) < len(names):
        raise CheckpointError(
            saw=f"{', '.join(shard.path.name for shard in source.shards)}",
            needed=f"names that differ before their suffix: all become {SAFETENSORS}",
            do="rename one of them",
        )
