"""Recorded inputs and outputs of an encoder's attention layers over a text."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Projections:
    """The weights of one attention layer, packed as in `torch.nn.MultiheadAttention`.

    ``in_proj_weight`` has the rows of the queries, then of the keys, then of the values.
    """

    in_proj_weight: Float[Tensor, "three_embed_dim embed_dim"]
    in_proj_bias: Float[Tensor, " three_embed_dim"]
    out_proj_weight: Float[Tensor, "embed_dim embed_dim"]
    out_proj_bias: Float[Tensor, " embed_dim"]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention layer during the model's own forward pass.

    ``output`` is the result of the output projection, before the residual and the LayerNorm.
    """

    x: Float[Tensor, "batch queries embed_dim"]
    output: Float[Tensor, "batch queries embed_dim"]
    projections: Projections


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """Attention calls of an encoder over a text, and a shorter text padded to its length.

    Attributes:
        model: the model's name.
        num_heads: heads of each layer.
        tokens: the tokens of the whole text, which is sequence 0 of the batch and has no padding.
        real: True where a position holds a token, False where it is padding.
        calls: the call of each layer, in order.
    """

    model: str
    num_heads: int
    tokens: tuple[str, ...]
    real: Bool[Tensor, "batch keys"]
    calls: tuple[AttentionCall, ...]
