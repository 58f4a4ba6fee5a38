"""Windows of the corpus to train on, and fixed ones to measure on.

Every window begins with the begin symbol, so that position 0 says nothing of the text. One row in
eight is no text but a slice that repeats until the window is full, every other one of them of
random bytes: only a head that finds the earlier copy can foretell them, so that induction heads
form early and hold for bytes of any kind. The first copy of such a slice is not asked for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from headwise.bundled_models.tiny.symbols import BEGIN

IGNORED = -100  # what cross_entropy leaves out
REPEATED_ONE_IN = 8
SHORTEST_SLICE = 8


class Batch(NamedTuple):
    """Ids, what comes next at each, and how many of the last rows are repeated slices."""

    ids: Int[Tensor, "batch length"]
    targets: Int[Tensor, "batch length"]
    repeated: int


def draw(
    stream: Int[Tensor, " ids"], generator: torch.Generator, *, batch: int, length: int
) -> Batch:
    """One batch to train on."""
    windows = _windows(stream, _places(stream, batch, length, generator), length)
    repeated = batch // REPEATED_ONE_IN
    ignored = torch.zeros_like(windows, dtype=torch.bool)
    for number, row in enumerate(range(batch - repeated, batch)):
        if number % 2:
            windows[row, 1:] = torch.randint(256, (length,), generator=generator)
        size = int(torch.randint(SHORTEST_SLICE, length // 2, (), generator=generator))
        windows[row, 1:] = windows[row, 1 : size + 1].repeat(length // size + 1)[:length]
        ignored[row, 1 : size + 1] = True
    return _batch(windows, ignored, repeated)


def spread(stream: Int[Tensor, " ids"], *, batch: int, length: int) -> Batch:
    """Windows at even distances over a stream, the same each time."""
    last = len(stream) - length - 1
    places = torch.linspace(0, last, batch, dtype=torch.float64).long()
    windows = _windows(stream, places, length)
    return _batch(windows, torch.zeros_like(windows, dtype=torch.bool), 0)


def twice(*, batch: int, bytes: int, seed: int = 0) -> Int[Tensor, "batch length"]:  # noqa: A002
    """The begin symbol and random bytes, no two of them equal, twice."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(256, generator=generator)[:bytes] for _ in range(batch)]
    copy = torch.stack(rows)
    return torch.cat([torch.full((batch, 1), BEGIN), copy, copy], dim=1)


def _places(stream: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(len(stream) - length, (batch,), generator=generator)


def _windows(stream: Tensor, places: Tensor, length: int) -> Tensor:
    """(batch, length + 1): the begin symbol, and ``length`` ids of the stream."""
    windows = stream[places[:, None] + torch.arange(-1, length).clamp(min=0)].long()
    windows[:, 0] = BEGIN
    return windows


def _batch(windows: Tensor, ignored: Tensor, repeated: int) -> Batch:
    # The begin symbol is never foretold: where a file ends is not a byte.
    targets = windows.masked_fill(ignored | (windows == BEGIN), IGNORED)
    return Batch(windows[:, :-1], targets[:, 1:], repeated)
