"""SHA-256 digests of tensors: they reveal a flipped bit, for which safetensors has no check."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.checkpoints.safetensors import tensor_bytes
from headwise.errors import CheckpointError
from headwise.support.files import parse_json_object, write_whole

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
    """Return the digests of a file; raise CheckpointError if it holds none."""
    try:
        content = parse_json_object(path.read_bytes())
        why = "" if content.get("kind") == KIND else "it is JSON of another kind"
    except (OSError, ValueError) as error:
        why = f"it {error}"
    if not why:
        tensors = content.get("tensors")
        if isinstance(tensors, dict) and all(isinstance(x, dict) for x in tensors.values()):
            return tensors
        why = "its tensors are not listed by name"
    raise CheckpointError(
        saw=f"{path} holds no digests: {why}",
        needed="a file from headwise verify --write-digests",
        do="run headwise verify --write-digests on an intact copy of the weights",
    )
