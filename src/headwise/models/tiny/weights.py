"""Weights of the tiny model, and the measurements of their training."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as tensors_in
from safetensors.torch import save as bytes_of

from headwise.models.tiny.model import Tiny, TinySizes

WEIGHTS, TRAINING = "weights.safetensors", "training.json"


def load() -> Tiny:
    """Return the trained model in float32 and eval mode; the file holds float16.

    The parameters require no gradient. For further training, use
    ``load().requires_grad_().train()``.
    """
    return load_model_from_bytes(
        resources.files("headwise.models.tiny").joinpath(WEIGHTS).read_bytes()
    )


def training_measurements() -> dict[str, Any]:
    """Return the measurements from the training of the shipped weights."""
    file = resources.files("headwise.models.tiny").joinpath(TRAINING)
    measurements: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return measurements


def load_model_from_bytes(raw: bytes, sizes: TinySizes | None = None) -> Tiny:
    """Load a model in float32 from the bytes of a file from `write_weights`."""
    with torch.device("meta"):
        model = Tiny(sizes or TinySizes())
    state = {name: tensor.float() for name, tensor in tensors_in(raw).items()}
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()


def write_weights(model: Tiny, path: Path) -> None:
    """Save a model in float16."""
    half = {name: t.detach().half().contiguous() for name, t in model.state_dict().items()}
    path.write_bytes(bytes_of(half))
