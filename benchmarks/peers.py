"""Self-attention layers of other libraries, with the weights of a headwise layer.

Each takes ``x`` (batch, length, embed_dim) and returns only the output. Llama's and
x-transformers' projections have no biases, so the headwise layer must have none either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from x_transformers.x_transformers import Attention as XAttention

from headwise import Attention


class Torch(nn.Module):
    """nn.MultiheadAttention(need_weights=False)."""

    def __init__(self, ours: Attention) -> None:
        super().__init__()
        projections = (ours.q_proj, ours.k_proj, ours.v_proj)
        biases: list[Tensor] = [p.bias for p in projections if p.bias is not None]
        self.inner = nn.MultiheadAttention(
            ours.embed_dim, ours.num_heads, bias=bool(biases), batch_first=True
        )
        weights: list[Tensor] = [p.weight for p in projections]
        self.inner.in_proj_weight = nn.Parameter(torch.cat(weights))
        if biases:
            self.inner.in_proj_bias = nn.Parameter(torch.cat(biases))
        self.inner.out_proj.weight = ours.out_proj.weight
        self.inner.out_proj.bias = ours.out_proj.bias

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        result: Tensor = self.inner(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return result


class Llama(nn.Module):
    """transformers' LlamaAttention through torch's fused kernel.

    The layer always rotates. Cosines and sines are inputs, as in a model. If the headwise layer has
    no rotary embedding, they are those of angle 0.
    """

    def __init__(self, ours: Attention, *, length: int, first: int = 0) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "hidden_size": ours.embed_dim,
            "num_attention_heads": ours.num_heads,
            "num_key_value_heads": ours.num_kv_heads,
            "head_dim": ours.head_dim,
            "attn_implementation": "sdpa",
        }
        config = LlamaConfig(**options)
        self.inner = LlamaAttention(config, 0)
        self.inner.is_causal = False
        self.inner.q_proj.weight = ours.q_proj.weight
        self.inner.k_proj.weight = ours.k_proj.weight
        self.inner.v_proj.weight = ours.v_proj.weight
        self.inner.o_proj.weight = ours.out_proj.weight
        positions = torch.arange(first, first + length)[None]
        cos, sin = LlamaRotaryEmbedding(config)(ours.q_proj.weight, positions)
        if ours.rotary is None:
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def cache(self, k: Tensor, v: Tensor) -> DynamicCache:
        """Return a cache with these keys and values."""
        cache = DynamicCache(config=self.inner.config)
        cache.update(k, v, self.inner.layer_idx)
        return cache

    def forward(self, x: Tensor, cache: DynamicCache | None = None) -> Tensor:
        result: Tensor = self.inner(
            x,
            position_embeddings=(self.cos, self.sin),
            attention_mask=None,
            past_key_values=cache,
        )[0]
        return result


class XTransformers(nn.Module):
    """x_transformers' Attention(flash=True)."""

    def __init__(self, ours: Attention) -> None:
        super().__init__()
        self.inner = XAttention(
            ours.embed_dim, heads=ours.num_heads, dim_head=ours.head_dim, flash=True
        )
        self.inner.to_q.weight = ours.q_proj.weight
        self.inner.to_k.weight = ours.k_proj.weight
        self.inner.to_v.weight = ours.v_proj.weight
        self.inner.to_out.weight = ours.out_proj.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result
