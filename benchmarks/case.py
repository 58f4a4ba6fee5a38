"""Benchmark cases: a function of headwise, and peers that compute the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# (batch, length, embed_dim, heads)
Shape = tuple[int, int, int, int]
SHAPES: tuple[Shape, ...] = (
    (32, 12, 512, 8),
    (8, 128, 512, 8),
    (8, 512, 512, 8),
    (2, 2048, 512, 8),
    (8, 512, 768, 12),
    (64, 64, 256, 4),
)
ONE_TOKEN: Shape = (1, 1, 768, 12)

Work = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """``ours`` against the fastest of ``peers``; ``limit`` is the largest ratio of their times."""

    group: str
    name: str  # for a layer: (batch, length, embed_dim, heads)
    ours: Work
    peers: dict[str, Work]
    limit: float | None


# Makers create one case at a time, so that only its tensors are in memory.
Make = Callable[[], Case]


def step(
    layer: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, *, training: bool
) -> Callable[[], Tensor]:
    """Return a function that runs one inference or training step, and returns the output."""
    layer.train(training)

    def infer() -> Tensor:
        with torch.no_grad():
            return call(x)

    def train() -> Tensor:
        out = call(x.detach().requires_grad_())
        out.sum().backward()
        layer.zero_grad()
        return out.detach()

    return train if training else infer
