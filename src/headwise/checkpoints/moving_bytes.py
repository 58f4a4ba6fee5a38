"""Bytes from file to file, and from memory to file, all of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import torch
from torch import Tensor

from headwise.errors import CheckpointError

CHUNK = 8 * 2**20
# The kernel or the disk cannot copy by itself; reading and writing still may.
_UNABLE = {errno.ENOSYS, errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM}
_UNRESERVED = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's numbers, the last axis fastest."""
    # A single number is contiguous whatever its stride, which as_strided leaves behind.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def copy(source: int, start: int, target: int, offset: int, count: int, *, path: Path) -> None:
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
