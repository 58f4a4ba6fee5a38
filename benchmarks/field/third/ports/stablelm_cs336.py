"""Causal attention of stanford-cs336/assignment1-basics, tests/adapters.py; StableLM 2's norms."""

import math

import torch
from einops import einsum, rearrange, repeat
from torch import nn

SETTINGS = {
    "embed_dim": 72,
    "num_heads": 6,
    "num_kv_heads": 3,
    "causal": True,
    "bias": "qkv",
    "rotary": {"theta": 1e4, "pairing": "halves", "width": 8},
    "qk_norm": {"kind": "layer", "eps": 1e-5, "over": "head"},
}
TAKES = ("mask",)


class Linear(nn.Module):
    def __init__(self, d_in, d_out, bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.bias = nn.Parameter(torch.zeros(d_out)) if bias else None

    def forward(self, x):
        y = einsum(x, self.weight, "... d_in, d_out d_in -> ... d_out")
        return y if self.bias is None else y + self.bias


class HeadLayerNorm(nn.Module):
    def __init__(self, d_head, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_head))
        self.bias = nn.Parameter(torch.zeros(d_head))
        self.eps = eps

    def forward(self, x):
        x = x - x.mean(dim=-1, keepdim=True)
        var = x.pow(2).mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(var + self.eps) * self.weight + self.bias


class RotaryPositionalEmbedding(nn.Module):
    """Turns the first d_rot features of each head."""

    def __init__(self, theta, d_rot, max_seq_len):
        super().__init__()
        self.d_rot = d_rot
        inv_freq = theta ** -(torch.arange(0, d_rot, 2, dtype=torch.float64) / d_rot)
        positions = torch.arange(max_seq_len, dtype=torch.float64)
        angles = einsum(positions, inv_freq, "t, f -> t f")
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x, token_positions):
        rot, rest = x[..., : self.d_rot], x[..., self.d_rot :]
        x1, x2 = rot.chunk(2, dim=-1)
        cos, sin = self.cos[token_positions], self.sin[token_positions]
        return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos, rest], dim=-1)


def scaled_dot_product_attention(Q, K, V, mask):  # noqa: N803
    """Attend; mask is True where a query may see a key."""
    scores = einsum(Q, K, "... q d, ... k d -> ... q k") / math.sqrt(Q.shape[-1])
    scores = scores.masked_fill(~mask, float("-inf"))
    scores = scores - scores.amax(dim=-1, keepdim=True)
    probs = scores.exp() / scores.exp().sum(dim=-1, keepdim=True)
    return einsum(probs, V, "... q k, ... k d -> ... q d")


class CausalMultiHeadSelfAttention(nn.Module):
    def __init__(self, d_model, num_heads, num_kv_heads, d_rot, theta, max_seq_len=64):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        d_head = d_model // num_heads
        self.q_proj = Linear(d_model, num_heads * d_head, bias=True)
        self.k_proj = Linear(d_model, num_kv_heads * d_head, bias=True)
        self.v_proj = Linear(d_model, num_kv_heads * d_head, bias=True)
        self.output_proj = Linear(num_heads * d_head, d_model)
        self.q_layernorm = HeadLayerNorm(d_head)
        self.k_layernorm = HeadLayerNorm(d_head)
        self.rope = RotaryPositionalEmbedding(theta, d_rot, max_seq_len)

    def forward(self, x, mask=None):
        seq = x.shape[-2]
        q = rearrange(self.q_proj(x), "b s (h d) -> b h s d", h=self.num_heads)
        k = rearrange(self.k_proj(x), "b s (g d) -> b g s d", g=self.num_kv_heads)
        v = rearrange(self.v_proj(x), "b s (g d) -> b g s d", g=self.num_kv_heads)
        q, k = self.q_layernorm(q), self.k_layernorm(k)
        positions = torch.arange(seq, device=x.device)
        q, k = self.rope(q, positions), self.rope(k, positions)
        copies = self.num_heads // self.num_kv_heads
        k, v = (repeat(t, "b g s d -> b (g r) s d", r=copies) for t in (k, v))
        seen = torch.ones(seq, seq, dtype=torch.bool, device=x.device).tril()
        seen = seen if mask is None else seen & mask
        out = scaled_dot_product_attention(q, k, v, seen)
        return self.output_proj(rearrange(out, "b h s d -> b s (h d)"))


def make(weights):
    attn = CausalMultiHeadSelfAttention(72, 6, 3, d_rot=8, theta=1e4)
    attn.to(weights["wq"].dtype)
    state = {"output_proj.weight": weights["wo"]}
    for role in "qkv":
        state[f"{role}_proj.weight"] = weights[f"w{role}"]
        state[f"{role}_proj.bias"] = weights[f"b{role}"]
    for role in "qk":
        state[f"{role}_layernorm.weight"] = weights[f"{role}_norm"]
        state[f"{role}_layernorm.bias"] = weights[f"{role}_norm_bias"]
    attn.load_state_dict(state)
    return attn
