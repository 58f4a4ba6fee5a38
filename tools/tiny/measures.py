"""Measurements of a model: bits per byte, and the best previous-token and induction heads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from headwise.models.tiny import Tiny
from tools.tiny import batches
from tools.tiny.batches import IGNORED

COPY = 96  # bytes of each of the two copies that measure induction
ROWS = 16  # windows of a batch


@dataclass(frozen=True)
class Head:
    """The head with the highest score, and its score."""

    layer: int
    head: int
    score: float


@torch.no_grad()
def bits_per_byte(model: Tiny, stream: Int[Tensor, " ids"], *, windows: int, length: int) -> float:
    """Return the mean loss of all bytes in windows at even distances."""
    sample = batches.evenly_spaced_batch(stream, batch=windows, length=length)
    nats, count = 0.0, 0
    for ids, targets in zip(sample.ids.split(ROWS), sample.targets.split(ROWS), strict=True):
        nats += float(token_losses(model(ids), targets).sum(dtype=torch.float64))
        count += int((targets != IGNORED).sum())
    return nats / count / math.log(2)


def token_losses(
    logits: Float[Tensor, "batch length vocabulary"], targets: Int[Tensor, "batch length"]
) -> Float[Tensor, "batch length"]:
    """Return the loss of each byte in nats, 0 for ignored targets."""
    return F.cross_entropy(logits.float().mT, targets, ignore_index=IGNORED, reduction="none")


def previous_token_scores(
    model: Tiny, ids: Int[Tensor, "batch length"]
) -> Float[Tensor, "layers heads"]:
    """Return the mean weight on the previous key, over queries that have one."""
    return torch.stack([d.mean((0, 2)) for d in _diagonals(model, ids, -1)])


def induction_scores(
    model: Tiny, *, batch: int = 8, copy: int = COPY
) -> Float[Tensor, "layers heads"]:
    """Return the mean weight on the key after the same byte, over the second of two copies.

    The bytes of a copy are random and distinct, so that each has one earlier occurrence.
    """
    ids = batches.repeated_bytes(batch=batch, bytes=copy)
    # The key after a byte's first occurrence; the queries are the second copy.
    return torch.stack([d[..., -copy:].mean((0, 2)) for d in _diagonals(model, ids, 1 - copy)])


def best_head(scores: Float[Tensor, "layers heads"]) -> Head:
    """Return the head with the highest score."""
    index = int(scores.argmax())
    layer, head = divmod(index, scores.shape[1])
    return Head(layer, head, round(float(scores[layer, head]), 4))


@torch.no_grad()
def measure_model(
    model: Tiny, held_out: Int[Tensor, " ids"], *, windows: int, length: int
) -> dict[str, object]:
    """Return all three measurements for training.json."""
    text = batches.evenly_spaced_batch(held_out, batch=ROWS, length=length).ids
    return {
        "held_out_bits_per_byte": round(
            bits_per_byte(model, held_out, windows=windows, length=length), 4
        ),
        "previous_token": asdict(best_head(previous_token_scores(model, text))),
        "induction": asdict(best_head(induction_scores(model))),
    }


@torch.no_grad()
def _diagonals(model: Tiny, ids: Tensor, offset: int) -> Iterator[Tensor]:
    for matrix in model.matrices(ids):
        yield matrix.diagonal(offset)
