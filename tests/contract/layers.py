"""A drop-in layer whose projections are the identity, so that its heads are known exactly.

Products with an identity matrix are exact, so the layer's output must be the head outputs of the
reference, and the budget of the head outputs applies to it as it is.
"""

from typing import Any

import torch
from torch import Tensor

from headwise import Attention, MultiheadAttention

BATCH, HEADS, LENGTH, HEAD_DIM = 3, 5, 23, 8
EMBED = HEADS * HEAD_DIM


def identity_layer(dtype: torch.dtype = torch.float64, **options: object) -> MultiheadAttention:
    """``MultiheadAttention`` with identity weights and zero biases, batch first."""
    layer = MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=dtype, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.eye(EMBED).repeat(3, 1))
        layer.in_proj_bias.zero_()
        layer.out_proj.weight.copy_(torch.eye(EMBED))
        layer.out_proj.bias.zero_()
    return layer


def identity_attention(dtype: torch.dtype = torch.float64, **options: Any) -> Attention:
    """The native layer with identity weights and without biases."""
    biases = dict.fromkeys(["q_bias", "k_bias", "v_bias", "out_bias"], False)
    layer = Attention(EMBED, HEADS, dtype=dtype, **biases, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.eye(EMBED))
    return layer


def split(x: Tensor) -> Tensor:
    """(batch, length, embed_dim) -> (batch, heads, length, head_dim)."""
    return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)


def merge(heads: Tensor) -> Tensor:
    """(batch, heads, length, head_dim) -> (batch, length, embed_dim)."""
    return heads.transpose(1, 2).flatten(2)


def inputs(dtype: torch.dtype = torch.float64, length: int = LENGTH) -> Tensor:
    """(batch, length, embed_dim)."""
    return torch.randn(BATCH, length, EMBED, dtype=torch.float64).to(dtype)
