"""What is timed: each case is two functions that do the same job, and the ratio it must reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from headwise import AttentionMatrix, Mask, MultiheadAttention

# (batch, length, embed_dim, heads)
SHAPES = (
    (32, 12, 512, 8),
    (8, 128, 512, 8),
    (8, 512, 512, 8),
    (2, 2048, 512, 8),
    (8, 512, 768, 12),
    (64, 64, 256, 4),
)
LONG = (2, 2048, 512, 8)


@dataclass(frozen=True)
class Case:
    """``ours`` against ``peer``; ``limit`` is the largest ratio of their times."""

    group: str
    name: str  # for a layer: (batch, length, embed_dim, heads)
    ours: Callable[[], object]
    peer: Callable[[], object]
    limit: float | None


def cases() -> Iterator[Case]:
    """Every case, one at a time, so that only its own tensors are alive."""
    for batch_first in (True, False):
        order = "batch first" if batch_first else "length first"
        # The limits are for torch's layer in the order the shapes are written in.
        inference, training = (0.97, 1.0) if batch_first else (None, None)
        for shape in SHAPES:
            yield _layer_case(f"inference, {order}", shape, batch_first, False, False, inference)
        for shape in SHAPES:
            yield _layer_case(f"training, {order}", shape, batch_first, True, False, training)
    yield _layer_case("need_weights, inference", LONG, True, False, True, 0.8)
    yield _layer_case("need_weights, training", LONG, True, True, True, 0.8)
    yield _statistics_case()


def _layer_case(
    group: str,
    shape: tuple[int, int, int, int],
    batch_first: bool,
    training: bool,
    need_weights: bool,
    limit: float | None,
) -> Case:
    batch, length, embed_dim, heads = shape
    peer = nn.MultiheadAttention(embed_dim, heads, batch_first=batch_first).train(training)
    ours = MultiheadAttention(embed_dim, heads, batch_first=batch_first).train(training)
    ours.load_state_dict(peer.state_dict())
    x = torch.randn(batch, length, embed_dim)
    x = x if batch_first else x.transpose(0, 1).contiguous()
    run = _training_step if training else _inference
    return Case(
        group,
        f"({batch}, {length}, {embed_dim}, {heads})",
        lambda: run(ours, x, need_weights),
        lambda: run(peer, x, need_weights),
        limit,
    )


def _inference(layer: nn.MultiheadAttention, x: Tensor, need_weights: bool) -> Tensor:
    with torch.no_grad():
        out: Tensor = layer(x, x, x, need_weights=need_weights)[0]
        return out


def _training_step(layer: nn.MultiheadAttention, x: Tensor, need_weights: bool) -> None:
    x = x.detach().requires_grad_()
    layer(x, x, x, need_weights=need_weights)[0].sum().backward()
    layer.zero_grad()


def _statistics_case() -> Case:
    q, k, v = statistics_tensors()
    matrix = AttentionMatrix(q, k, mask=Mask.causal())

    def fused() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    name = "logsumexp, entropy, maximum, received"
    return Case("causal (1, 12, 8192, 64)", name, matrix.statistics, fused, 2.5)


def statistics_tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a causal (batch 1, heads 12, length 8192, head_dim 64) matrix."""
    return tuple(torch.randn(1, 12, 8192, 64) for _ in range(3))  # type: ignore[return-value]
