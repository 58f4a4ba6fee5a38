"""The attention matrix beside the fused kernel, whose weights cannot be had."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.case import Case
from headwise import AttentionMatrix, Mask
from headwise.testing import Budget

LEFT = 256


def statistics_tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a causal (batch 1, heads 12, length 8192, head_dim 64) matrix."""
    return _tensors(1, 12, 8192, 64)


def _statistics() -> Case:
    q, k, v = statistics_tensors()
    matrix = AttentionMatrix(q, k, mask=Mask.causal())

    def fused() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    name = "logsumexp, entropy, maximum, received"
    return Case("causal (1, 12, 8192, 64)", name, matrix.statistics, {"fused forward": fused}, 2.5)


def _window() -> Case:
    q, k, v = _tensors(1, 8, 16384, 64)
    matrix = AttentionMatrix(q, k, mask=Mask.window(LEFT, 0))

    def ours() -> Tensor:
        return matrix @ v

    def fused() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    # The first queries, whose window reaches the first key, are those of the causal matrix.
    first = [x[:, :, : LEFT + 1] for x in (q, k, v)]
    budget = Budget.for_head_outputs(*first, mask=Mask.causal())
    budget.assert_holds(ours()[:, :, : LEFT + 1])
    name = f"(1, 8, 16384, 64), window {LEFT}"
    return Case("causal window, A @ v", name, ours, {"fused, no window": fused}, 0.13)


def _tensors(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(shape), torch.randn(shape), torch.randn(shape)


MAKERS = (_statistics, _window)
