"""transformers' GPT2Attention itself: one fused projection, its matrices stored transposed."""

from __future__ import annotations

from torch import Tensor

from headwise.extras import require
from headwise.peers.hf_masks import mask_for
from headwise.peers.peer import PURPOSE, Peer
from headwise.peers.weights import Weights

LAYERS = 12  # those of GPT-2: its output projections start narrower the more there are


class GPT2(Peer):
    """The first layer of a model, so that its weights start as a model's do.

    Args:
        implementation: transformers' ``attn_implementation``, the kernel.
    """

    name = "GPT-2"
    real = True
    biased = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        implementation: str = "eager",
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout=dropout)
        transformers = require("transformers.models.gpt2.modeling_gpt2", purpose=PURPOSE)
        config = transformers.GPT2Config(
            n_embd=embed_dim,
            n_head=num_heads,
            n_layer=LAYERS,
            attn_pdrop=dropout,
            resid_pdrop=dropout,
            attn_implementation=implementation,
            # What is not looked at is as small as it can be.
            vocab_size=1,
            n_positions=1,
            n_inner=1,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.inner = transformers.GPT2Model(config).h[0].attn
        self.implementation = implementation

    def held(self) -> Weights:
        """Conv1D stores (in, out): the transpose of a linear layer."""
        fused, out = self.inner.c_attn, self.inner.c_proj
        q, k, v = fused.weight.mT.chunk(3)
        return Weights(q, k, v, out.weight.mT, (*fused.bias.chunk(3), out.bias))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The layer alone: a causal mask is made by the model around it."""
        out: Tensor = self.inner(x, attention_mask=None if mask is None else mask[:, None])[0]
        return out

    def spell(self, may_attend: Tensor) -> Tensor:
        """By transformers' own function."""
        return mask_for(self.implementation, may_attend, dtype=self.inner.c_attn.weight.dtype)

    def attention_weights(self, x: Tensor) -> Tensor | None:
        """Its second result."""
        weights: Tensor | None = self.inner(x)[1]
        return weights
