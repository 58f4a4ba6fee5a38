"""x-transformers' Attention itself."""

from __future__ import annotations

from torch import Tensor

from headwise.studies.peers.peer import PURPOSE, Peer
from headwise.studies.peers.weights import Weights
from headwise.support.extras import require


class XTransformers(Peer):
    """With its defaults but for the sizes."""

    name = "x-transformers"
    real = True
    biased = False

    def __init__(self, embed_dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__(embed_dim, num_heads, dropout=dropout)
        layer = require("x_transformers.x_transformers", purpose=PURPOSE).Attention
        self.inner = layer(embed_dim, heads=num_heads, dim_head=self.head_dim, dropout=dropout)

    def held(self) -> Weights:
        """Those of the linear layers."""
        inner = self.inner
        return Weights.of_linears(inner.to_q, inner.to_k, inner.to_v, inner.to_out)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Its ``attn_mask`` may have one for each sequence and head."""
        out: Tensor = self.inner(x, attn_mask=None if mask is None else mask[:, None])
        return out

    def spell(self, may_attend: Tensor) -> Tensor:
        """True may be attended."""
        return may_attend

    def attention_weights(self, x: Tensor) -> Tensor | None:
        """Among what it keeps when it is told to."""
        weights: Tensor = self.inner(x, return_intermediates=True)[1].post_softmax_attn
        return weights
