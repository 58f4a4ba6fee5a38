"""SHA-256 of every tensor: what safetensors does not carry, and what finds a flipped bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.errors import CheckpointError
from headwise.whole_files import write_whole

KIND = "headwise digests"
Digests = dict[str, dict[str, Any]]


def digests_of(state: Mapping[str, Tensor]) -> Digests:
    """name -> shape, dtype and the SHA-256 of its numbers, little-endian, in row-major order."""
    return {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "sha256": hashlib.sha256(_bytes(tensor)).hexdigest(),
        }
        for name, tensor in ((name, state[name]) for name in state)
    }


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_digests(path: Path, found: Digests) -> Path:
    """Store them as JSON."""
    return write_whole(path, json.dumps({"kind": KIND, "tensors": found}, indent=1) + "\n")


def read_digests(path: Path) -> Digests:
    """Those of a file.

    Raises:
        CheckpointError: it holds none.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _refused(path, str(error)) from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise _refused(path, "it is other JSON")
    tensors: Digests = found["tensors"]
    return tensors


def _refused(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        saw=f"{path}, which holds no digests: {why}",
        needed="a file that headwise verify --write-digests wrote",
        do="write one from a copy that is known to be whole",
    )
