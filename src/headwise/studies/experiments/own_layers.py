"""The layers of headwise beside those that others wrote, filled and asked in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from headwise.layers.native.attention import Attention
from headwise.layers.torch_api.layer import MultiheadAttention
from headwise.masks.mask import Mask
from headwise.studies.peers.catalogue import PEERS
from headwise.studies.peers.peer import Peer
from headwise.studies.peers.torch_layer import TorchLayer
from headwise.studies.peers.weights import Weights


class DropIn(TorchLayer):
    """`headwise.MultiheadAttention`."""

    name = "headwise.MultiheadAttention"
    layer = MultiheadAttention


class Native(Peer):
    """`headwise.Attention`."""

    name = "headwise.Attention"
    real = True
    biased = True

    def __init__(self, embed_dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__(embed_dim, num_heads, dropout=dropout)
        self.inner = Attention(embed_dim, num_heads, dropout=dropout)

    def held(self) -> Weights:
        """Those of the projections."""
        inner = self.inner
        return Weights.of_linears(inner.q_proj, inner.k_proj, inner.v_proj, inner.out_proj)

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        """Takes a `Mask`, and refuses a bare tensor."""
        out: Tensor = self.inner(x, mask=mask)
        return out

    def spell(self, may_attend: Tensor) -> Mask:
        """Polarity and axes by name."""
        return Mask.may_attend(may_attend, axes="batch queries keys")

    def attention_weights(self, x: Tensor) -> Tensor | None:
        """Written down on demand."""
        return self.inner.matrix(x).dense()


IMPLEMENTATIONS: Mapping[str, type[Peer]] = {**PEERS, "drop_in": DropIn, "native": Native}
