"""What a layer is made of: its sizes, its options and its submodules, by name and type."""

from __future__ import annotations

from torch import Tensor, nn

from headwise.layers.native.projection import Projection
from headwise.layers.native.qk_norm import QKNorm
from headwise.layers.positions import Rotary


class Parts(nn.Module):
    """The attributes that a layer has once it is constructed; described in `Attention`."""

    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    out_dim: int
    source_dim: int
    rotary: Rotary | None
    qk_norm: QKNorm | None
    window: tuple[int | None, int | None] | None
    scale: float | None
    softcap: float | None
    dropout: float
    q_proj: Projection
    k_proj: Projection
    v_proj: Projection
    out_proj: Projection
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    score_bias: nn.Module | None
    sink: Tensor | None
    identity: str  # what its caches know it by

    @property
    def drops(self) -> bool:
        """Whether a forward pass now drops weights."""
        return self.training and self.dropout > 0
