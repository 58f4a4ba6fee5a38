"""Attention of Phi with a partial rotation (transformers, models/phi/modeling_phi.py)."""

import math

import torch
from torch import nn

SETTINGS = {
    "embed_dim": 72,
    "num_heads": 6,
    "causal": True,
    "bias": "qkvo",
    "rotary": {"theta": 10000.0, "pairing": "halves", "width": 6},
}
TAKES = ("mask",)


class PhiRotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))

    def forward(self, x, position_ids):
        freqs = torch.outer(position_ids.double(), self.inv_freq.double())
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


class PhiAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, partial_rotary_factor, rope_theta):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.rotary_ndims = int(self.head_dim * partial_rotary_factor)
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=True)
        self.k_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=True)
        self.v_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=True)
        self.dense = nn.Linear(num_heads * self.head_dim, hidden_size, bias=True)
        self.rotary_emb = PhiRotaryEmbedding(self.rotary_ndims, base=rope_theta)

    def forward(self, hidden_states, attention_mask=None):
        bsz, q_len, _ = hidden_states.shape
        shape = (bsz, q_len, self.num_heads, self.head_dim)
        query_states = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(shape).transpose(1, 2)

        cos, sin = self.rotary_emb(value_states, torch.arange(q_len))
        query_rot, query_pass = query_states.tensor_split([self.rotary_ndims], dim=-1)
        key_rot, key_pass = key_states.tensor_split([self.rotary_ndims], dim=-1)
        query_rot, key_rot = apply_rotary_pos_emb(query_rot, key_rot, cos, sin)
        query_states = torch.cat((query_rot, query_pass), dim=-1)
        key_states = torch.cat((key_rot, key_pass), dim=-1)

        attn_weights = torch.matmul(query_states, key_states.transpose(2, 3))
        attn_weights = attn_weights / math.sqrt(self.head_dim)
        causal = torch.ones(q_len, q_len, dtype=torch.bool).tril()
        allowed = causal if attention_mask is None else causal & attention_mask
        attn_weights = attn_weights.masked_fill(~allowed, float("-inf"))
        attn_weights = nn.functional.softmax(attn_weights, dim=-1)
        attn_output = torch.matmul(attn_weights, value_states)

        attn_output = attn_output.transpose(1, 2).contiguous()
        return self.dense(attn_output.reshape(bsz, q_len, -1))


def convert_mixer(state, num_heads):
    """Turn the fused mixer of the first release into three projections."""
    converted = {}
    for kind in ("weight", "bias"):
        wqkv = state[f"mixer.Wqkv.{kind}"]
        wqkv = wqkv.reshape(3, num_heads, -1, *wqkv.shape[1:])
        for name, part in zip("qkv", wqkv.unbind(0), strict=True):
            converted[f"{name}_proj.{kind}"] = part.flatten(0, 1)
        converted[f"dense.{kind}"] = state[f"mixer.out_proj.{kind}"]
    return converted


def make(weights):
    state = {
        "mixer.Wqkv.weight": torch.cat([weights["wq"], weights["wk"], weights["wv"]]),
        "mixer.Wqkv.bias": torch.cat([weights["bq"], weights["bk"], weights["bv"]]),
        "mixer.out_proj.weight": weights["wo"],
        "mixer.out_proj.bias": weights["bo"],
    }
    attention = PhiAttention(SETTINGS["embed_dim"], SETTINGS["num_heads"], 0.5, 10000.0)
    attention = attention.to(weights["wq"].dtype).eval()
    attention.load_state_dict(convert_mixer(state, SETTINGS["num_heads"]))

    def port(x, mask=None):
        return attention(x, mask)

    return port
