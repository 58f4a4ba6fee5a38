"""torch.nn.MultiheadAttention itself."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from headwise.studies.peers.peer import Peer
from headwise.studies.peers.weights import Weights


class TorchLayer(Peer):
    """Called as it is by default: the weights are asked for.

    Attributes:
        layer: the class that computes; another of the same signature may take its place.
        need_weights: torch computes in another way where they are not needed.
    """

    name = "PyTorch's layer"
    real = True
    biased = True
    layer: ClassVar[type[nn.MultiheadAttention]] = nn.MultiheadAttention
    need_weights = True

    def __init__(self, embed_dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__(embed_dim, num_heads, dropout=dropout)
        self.inner = self.layer(embed_dim, num_heads, dropout=dropout, batch_first=True)

    def held(self) -> Weights:
        """The packed matrix holds the rows of the queries, the keys, the values."""
        inner, out = self.inner, self.inner.out_proj
        return Weights.packed(inner.in_proj_weight, inner.in_proj_bias, out.weight, out.bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """A mask for each sequence is one for each of its heads there."""
        if mask is not None:
            mask = mask.repeat_interleave(self.num_heads, dim=0)
        out: Tensor = self.inner(x, x, x, attn_mask=mask, need_weights=self.need_weights)[0]
        return out

    def spell(self, may_attend: Tensor) -> Tensor:
        """True may not be attended."""
        return ~may_attend

    def attention_weights(self, x: Tensor) -> Tensor | None:
        """As its default gives them."""
        weights: Tensor = self.inner(x, x, x)[1]
        return weights
