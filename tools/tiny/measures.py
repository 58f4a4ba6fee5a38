"""What is measured of a model: bits for each byte, and the two heads that everybody looks for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from headwise.bundled_models.tiny.model import Tiny
from tools.tiny import batches
from tools.tiny.batches import IGNORED

COPY = 96  # bytes that stand twice where induction is measured
ROWS = 16  # windows that are read at once


@dataclass(frozen=True)
class Head:
    """The head with the highest score, and its score."""

    layer: int
    head: int
    score: float


@torch.no_grad()
def bits_per_byte(model: Tiny, stream: Int[Tensor, " ids"], *, windows: int, length: int) -> float:
    """The loss on windows at even distances; every byte of a window counts, the early ones too."""
    sample = batches.spread(stream, batch=windows, length=length)
    nats, count = 0.0, 0
    for ids, targets in zip(sample.ids.split(ROWS), sample.targets.split(ROWS), strict=True):
        nats += float(losses(model(ids), targets).sum(dtype=torch.float64))
        count += int((targets != IGNORED).sum())
    return nats / count / math.log(2)


def losses(
    logits: Float[Tensor, "batch length vocabulary"], targets: Int[Tensor, "batch length"]
) -> Float[Tensor, "batch length"]:
    """Nats for each byte, 0 where none was asked for."""
    return F.cross_entropy(logits.float().mT, targets, ignore_index=IGNORED, reduction="none")


def previous_token_scores(
    model: Tiny, ids: Int[Tensor, "batch length"]
) -> Float[Tensor, "layers heads"]:
    """The mean weight on the key before, over all queries that have one."""
    return torch.stack([d.mean((0, 2)) for d in _diagonals(model, ids, -1)])


def induction_scores(
    model: Tiny, *, batch: int = 8, copy: int = COPY
) -> Float[Tensor, "layers heads"]:
    """The mean weight on what followed the same byte, over the second of two equal copies.

    The bytes of a copy are random and differ, so that each has one earlier occurrence.
    """
    ids = batches.twice(batch=batch, bytes=copy)
    # From a byte to the key after its first occurrence; the queries are those of the second copy.
    return torch.stack([d[..., -copy:].mean((0, 2)) for d in _diagonals(model, ids, 1 - copy)])


def best(scores: Float[Tensor, "layers heads"]) -> Head:
    """The head with the highest score."""
    place = int(scores.argmax())
    layer, head = divmod(place, scores.shape[1])
    return Head(layer, head, round(float(scores[layer, head]), 4))


@torch.no_grad()
def measured(
    model: Tiny, held_out: Int[Tensor, " ids"], *, windows: int, length: int
) -> dict[str, object]:
    """All three, as they go into training.json."""
    text = batches.spread(held_out, batch=ROWS, length=length).ids
    return {
        "held_out_bits_per_byte": round(
            bits_per_byte(model, held_out, windows=windows, length=length), 4
        ),
        "previous_token": asdict(best(previous_token_scores(model, text))),
        "induction": asdict(best(induction_scores(model))),
    }


@torch.no_grad()
def _diagonals(model: Tiny, ids: Tensor, offset: int) -> Iterator[Tensor]:
    for matrix in model.matrices(ids):
        yield matrix.diagonal(offset)
