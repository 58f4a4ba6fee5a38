"""Grouped attention with a fused Wqkv and ALiBi, as in mosaicml/llm-foundry, attention.py."""

import math

import torch
from einops import rearrange
from torch import nn

SETTINGS = {
    "embed_dim": 60,
    "num_heads": 6,
    "num_kv_heads": 2,
    "causal": True,
    "bias": "",
    "alibi": True,
}
TAKES = ("mask",)


def gen_slopes(n_heads, alibi_bias_max=8):
    """Return a slope for each head, (1, heads, 1, 1)."""
    _n_heads = 2 ** math.ceil(math.log2(n_heads))
    m = torch.arange(1, _n_heads + 1, dtype=torch.float32) * (alibi_bias_max / _n_heads)
    slopes = 1.0 / torch.pow(2, m)
    if _n_heads != n_heads:
        # no power of two: the odd places of the longer series come first
        slopes = torch.cat([slopes[1::2], slopes[::2]])[:n_heads]
    return slopes.view(1, n_heads, 1, 1)


def build_alibi_bias(n_heads, seq_len, dtype):
    """Return the bias of the last query, (1, heads, 1, keys)."""
    alibi_bias = torch.arange(1 - seq_len, 1, dtype=torch.float32).view(1, 1, 1, seq_len)
    return (alibi_bias * gen_slopes(n_heads)).to(dtype)


def repeat_kv_for_gqa(hidden, n_rep):
    """Repeat (batch, tokens, kv heads, d) to (batch, tokens, kv heads * n_rep, d)."""
    if n_rep == 1:
        return hidden
    b, s, kv_n_heads, d = hidden.shape
    hidden = hidden[:, :, :, None, :].expand(b, s, kv_n_heads, n_rep, d)
    return hidden.reshape(b, s, kv_n_heads * n_rep, d)


def multihead_dot_product_attention(
    query, key, value, n_heads, kv_n_heads, scale, attn_bias, key_padding_mask=None
):
    """Attend with (batch, tokens, heads * d) inputs."""
    q = rearrange(query, "b s (h d) -> b s h d", h=n_heads)
    k = rearrange(key, "b s (h d) -> b s h d", h=kv_n_heads)
    v = rearrange(value, "b s (h d) -> b s h d", h=kv_n_heads)
    k = repeat_kv_for_gqa(k, n_heads // kv_n_heads)
    v = repeat_kv_for_gqa(v, n_heads // kv_n_heads)

    attn_weight = torch.einsum("b i h d, b j h d -> b h i j", q, k) * scale
    attn_weight = attn_weight + attn_bias
    min_val = torch.finfo(q.dtype).min
    if key_padding_mask is not None:
        hidden = ~key_padding_mask.view(-1, 1, 1, k.shape[1])
        attn_weight = attn_weight.masked_fill(hidden, min_val)
    s_q, s_k = attn_weight.shape[-2:]
    causal_mask = attn_weight.new_ones(s_q, s_k, dtype=torch.bool).tril().logical_not()
    attn_weight = attn_weight.masked_fill(causal_mask.view(1, 1, s_q, s_k), min_val)
    attn_weight = torch.softmax(attn_weight, dim=-1)

    out = torch.einsum("b h i j, b j h d -> b i h d", attn_weight, v)
    return rearrange(out, "b s h d -> b s (h d)")


class GroupedQueryAttention(nn.Module):
    """One projection for q, k and v; blocks of all heads each."""

    def __init__(self, d_model, n_heads, kv_n_heads, dtype):
        super().__init__()
        self.n_heads, self.kv_n_heads = n_heads, kv_n_heads
        self.d_model, self.head_dim = d_model, d_model // n_heads
        self.softmax_scale = 1 / math.sqrt(self.head_dim)
        kv_dim = kv_n_heads * self.head_dim
        self.Wqkv = nn.Linear(d_model, d_model + 2 * kv_dim, bias=False, dtype=dtype)
        self.out_proj = nn.Linear(d_model, d_model, bias=False, dtype=dtype)

    def forward(self, x, key_padding_mask=None):
        qkv = self.Wqkv(x)
        kv_dim = self.kv_n_heads * self.head_dim
        query, key, value = qkv.split([self.d_model, kv_dim, kv_dim], dim=-1)
        attn_bias = build_alibi_bias(self.n_heads, x.shape[1], x.dtype)
        context = multihead_dot_product_attention(
            query,
            key,
            value,
            self.n_heads,
            self.kv_n_heads,
            self.softmax_scale,
            attn_bias,
            key_padding_mask,
        )
        return self.out_proj(context)


def make(weights):
    """Fuse q, k and v, and load them."""
    wq, wk, wv = weights["wq"], weights["wk"], weights["wv"]
    attn = GroupedQueryAttention(
        SETTINGS["embed_dim"], SETTINGS["num_heads"], SETTINGS["num_kv_heads"], wq.dtype
    )
    fused = torch.cat([wq, wk, wv], dim=0)
    attn.load_state_dict({"Wqkv.weight": fused, "out_proj.weight": weights["wo"]})
    attn.eval()
    return lambda x, mask=None: attn(x, None if mask is None else mask[:, 0, 0])
