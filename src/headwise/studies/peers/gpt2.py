"""transformers' GPT2Attention itself: one fused projection, its matrices stored transposed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headwise.studies.peers.of_transformers import OfTransformers
from headwise.studies.peers.peer import PURPOSE
from headwise.studies.peers.weights import Weights
from headwise.support.extras import require

LAYERS = 12  # those of GPT-2: its output projections start narrower the more there are


class GPT2(OfTransformers):
    """The layer alone: a causal mask is made by the model around it."""

    name = "GPT-2"

    def _layer(self) -> Any:
        transformers = require("transformers.models.gpt2.modeling_gpt2", purpose=PURPOSE)
        config = transformers.GPT2Config(
            n_embd=self.embed_dim,
            n_head=self.num_heads,
            n_layer=LAYERS,
            attn_pdrop=self.p,
            resid_pdrop=self.p,
            attn_implementation=self.implementation,
            vocab_size=1,
            n_positions=1,
            n_inner=1,
            bos_token_id=None,
            eos_token_id=None,
        )
        return transformers.GPT2Model(config).h[0].attn

    def held(self) -> Weights:
        """Conv1D stores (in, out): the transpose of a linear layer."""
        fused, out = self.inner.c_attn, self.inner.c_proj
        q, k, v = fused.weight.mT.chunk(3)
        return Weights(q, k, v, out.weight.mT, (*fused.bias.chunk(3), out.bias))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The projections, the attention between them, and the output's dropout."""
        out: Tensor = self.inner(x, attention_mask=None if mask is None else mask[:, None])[0]
        return out
