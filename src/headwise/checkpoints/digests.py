"""SHA-256 of every tensor: what safetensors does not carry, and what finds a flipped bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.checkpoints.output_plan import bytes_of
from headwise.errors import CheckpointError
from headwise.support.atomic_write import write_whole

KIND = "headwise digests"
Digests = dict[str, dict[str, Any]]


def digests_of(state: Mapping[str, Tensor]) -> Digests:
    """name -> shape, dtype and the SHA-256 of its numbers, little-endian, in row-major order."""
    return {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "sha256": hashlib.sha256(bytes_of(tensor)).hexdigest(),
        }
        for name, tensor in ((name, state[name]) for name in state)
    }


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
    except (OSError, ValueError, RecursionError) as error:
        raise _refused(path, str(error)) from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise _refused(path, "it is other JSON")
    tensors = found.get("tensors")
    if not isinstance(tensors, dict) or not all(isinstance(x, dict) for x in tensors.values()):
        raise _refused(path, "its tensors are not listed by name")
    return tensors


def _refused(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        saw=f"{path}, which holds no digests: {why}",
        needed="a file that headwise verify --write-digests wrote",
        do="write one from a copy that is known to be whole",
    )
