"""Training batches from the corpus, and fixed batches for measurements.

Every window starts with the begin symbol, so that position 0 carries no information. One row in
eight is a slice that repeats until the window is full; half of these slices are random bytes. Only
a head that attends to the earlier copy can predict them, so induction heads form early and work for
any bytes. The first copy of a slice does not count in the loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from headwise.models.tiny import BEGIN

IGNORED = -100  # targets that cross_entropy ignores
REPEATED_ONE_IN = 8
SHORTEST_SLICE = 8


class Batch(NamedTuple):
    """Ids, the next id at each position, and the number of last rows with repeated slices."""

    ids: Int[Tensor, "batch length"]
    targets: Int[Tensor, "batch length"]
    repeated: int


def draw_batch(
    stream: Int[Tensor, " ids"], generator: torch.Generator, *, batch: int, length: int
) -> Batch:
    """Draw a training batch."""
    windows = _windows(stream, _random_starts(stream, batch, length, generator), length)
    repeated = batch // REPEATED_ONE_IN
    ignored = torch.zeros_like(windows, dtype=torch.bool)
    for number, row in enumerate(range(batch - repeated, batch)):
        if number % 2:
            windows[row, 1:] = torch.randint(256, (length,), generator=generator)
        size = int(torch.randint(SHORTEST_SLICE, length // 2, (), generator=generator))
        windows[row, 1:] = windows[row, 1 : size + 1].repeat(length // size + 1)[:length]
        ignored[row, 1 : size + 1] = True
    return _batch(windows, ignored, repeated)


def evenly_spaced_batch(stream: Int[Tensor, " ids"], *, batch: int, length: int) -> Batch:
    """Return windows at even distances over a stream."""
    last = len(stream) - length - 1
    starts = torch.linspace(0, last, batch, dtype=torch.float64).long()
    windows = _windows(stream, starts, length)
    return _batch(windows, torch.zeros_like(windows, dtype=torch.bool), 0)


def repeated_bytes(*, batch: int, bytes: int, seed: int = 0) -> Int[Tensor, "batch length"]:  # noqa: A002
    """Return the begin symbol, and random distinct bytes twice."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(256, generator=generator)[:bytes] for _ in range(batch)]
    copy = torch.stack(rows)
    return torch.cat([torch.full((batch, 1), BEGIN), copy, copy], dim=1)


def _random_starts(stream: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(len(stream) - length, (batch,), generator=generator)


def _windows(stream: Tensor, starts: Tensor, length: int) -> Tensor:
    """Return the begin symbol and ``length`` ids of the stream, (batch, length + 1)."""
    windows = stream[starts[:, None] + torch.arange(-1, length).clamp(min=0)].long()
    windows[:, 0] = BEGIN
    return windows


def _batch(windows: Tensor, ignored: Tensor, repeated: int) -> Batch:
    # The begin symbol is no target, because the end of a file is not a byte.
    targets = windows.masked_fill(ignored | (windows == BEGIN), IGNORED)
    return Batch(windows[:, :-1], targets[:, 1:], repeated)
