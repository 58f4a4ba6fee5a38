"""SHA-256 digests of tensors: they reveal a flipped bit, for which safetensors has no check."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.checkpoints.plan import tensor_bytes
from headwise.errors import CheckpointError
from headwise.support.files import write_whole

KIND = "headwise digests"
Digests = dict[str, dict[str, Any]]


def compute_digests(state: Mapping[str, Tensor]) -> Digests:
    """Return name -> shape, dtype and SHA-256 of the numbers, little-endian and row-major."""
    return {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "sha256": hashlib.sha256(tensor_bytes(tensor)).hexdigest(),
        }
        for name, tensor in ((name, state[name]) for name in state)
    }


def write_digests(path: Path, digests: Digests) -> Path:
    """Write digests as JSON."""
    return write_whole(path, json.dumps({"kind": KIND, "tensors": digests}, indent=1) + "\n")


def read_digests(path: Path) -> Digests:
    """Return the digests of a file.

    Raises:
        CheckpointError: the file holds no digests.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _no_digests_error(path, str(error)) from error
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise _no_digests_error(path, "it is JSON of another kind")
    tensors = content.get("tensors")
    if not isinstance(tensors, dict) or not all(isinstance(x, dict) for x in tensors.values()):
        raise _no_digests_error(path, "its tensors are not listed by name")
    return tensors


def _no_digests_error(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        saw=f"{path} holds no digests: {why}",
        needed="a file from headwise verify --write-digests",
        do="run headwise verify --write-digests on an intact copy of the weights",
    )
