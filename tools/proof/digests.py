"""Digests of bytes: the first 128 bits of their SHA-256, in hexadecimal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Entries = Iterator[tuple[str, Any]]  # name -> a value of JSON


def digest(*parts: bytes) -> str:
    """Return the first 128 bits of the SHA-256 of some bytes, in hexadecimal."""
    return hashlib.sha256(b"".join(parts)).hexdigest()[:32]


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of the names, dtypes, shapes and bytes of tensors."""
    parts = []
    for name, x in sorted(tensors.items()):
        raw = x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        parts += [f"{name} {x.dtype} {tuple(x.shape)}\n".encode(), raw]
    return digest(*parts)


def digest_files(folder: Path) -> dict[str, str]:
    """Return the digest of every file below a folder, by its path there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): digest(path.read_bytes()) for path in files}
