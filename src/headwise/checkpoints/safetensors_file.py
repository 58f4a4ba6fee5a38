"""A .safetensors file: its head is checked, and its tensors are mapped, not read."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headwise.checkpoints import header
from headwise.checkpoints.stored import Stored
from headwise.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class SafetensorsFile:
    """What its head says, and the tensors on demand."""

    path: Path
    headers: dict[str, Stored]
    metadata: dict[str, str]

    def tensor(self, name: str) -> Tensor:
        """A tensor in pages of the file; those that are not looked at are not read."""
        stored = self.headers[name]
        assert stored.offset is not None
        if not stored.nbytes:
            return torch.empty(stored.shape, dtype=stored.dtype)
        raw = _mapped(self.path, stored.offset, stored.nbytes)
        if stored.offset % stored.dtype.itemsize:
            raw = raw.clone()  # a head of odd length; numbers want to stand at their multiples
        return raw.view(stored.dtype).view(stored.shape)


def read(path: Path) -> SafetensorsFile:
    """Read the head of a file.

    Raises:
        CheckpointError: it is damaged, cut off, or none.
        OSError: it cannot be opened.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(header.LENGTH), "little")
        if size < header.LENGTH or length > min(size - header.LENGTH, header.MOST):
            raise damaged(path, f"{size} bytes, which say that their head has {length}")
        text = file.read(length)
    start = header.LENGTH + length
    try:
        entries, metadata = header.decode(text, size - start)
    except header.DamageError as damage:
        raise damaged(path, str(damage)) from damage
    _require_same_reading(path, entries)
    headers = {
        name: Stored(entry.shape, entry.dtype, path, start + entry.start)
        for name, entry in entries.items()
    }
    return SafetensorsFile(path, headers, metadata)


def damaged(path: Path, why: str) -> CheckpointError:
    """What is said of a file that cannot be read."""
    return CheckpointError(
        saw=f"{path}: {why[:300]}",
        needed="a whole safetensors file",
        do="copy or download it again, and compare its checksum with that of its publisher",
    )


def _require_same_reading(path: Path, entries: Iterable[str]) -> None:
    """JSON leaves corners in which two readers differ: the library has to see the same names."""
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
    except (SafetensorError, ValueError) as error:
        raise damaged(path, str(error)) from error
    if names != set(entries):
        raise damaged(path, "the safetensors library reads other names in it")


def _mapped(path: Path, offset: int, nbytes: int) -> Tensor:
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        try:
            # Private pages: torch knows no tensors that may only be read.
            pages = mmap.mmap(
                file.fileno(), offset - start + nbytes, access=mmap.ACCESS_COPY, offset=start
            )
        except ValueError as error:
            raise damaged(path, "it became shorter while it was read") from error
    pages.madvise(mmap.MADV_WILLNEED)  # else a disk is asked for few pages at a time
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=offset - start)
