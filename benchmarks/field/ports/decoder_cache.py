"""Causal decoder with a key/value cache that keeps a window: huggingface/transformers, models/starcoder2/modeling_starcoder2.py."""
# ruff: noqa: E501

import torch
from torch import nn

SETTINGS = {
    "embed_dim": 54,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 10,
    "causal": True,
    "window": 5,
    "rotary": {"theta": 1e5, "pairing": "halves", "width": 10},
}
STEPS = True


class DynamicCache:
    """Keys (after rotary) and values so far, (batch, kv heads, tokens, head_dim)."""

    def __init__(self, keys, values, seen_tokens):
        self.keys, self.values = keys, values
        self.seen_tokens = seen_tokens  # also those that have left the window

    def update(self, keys, values):
        self.keys = torch.cat([self.keys, keys], dim=2)
        self.values = torch.cat([self.values, values], dim=2)
        self.seen_tokens += keys.shape[2]
        return self.keys, self.values

    def crop(self, length):
        if self.keys.shape[2] > length:
            self.keys = self.keys[:, :, -length:]
            self.values = self.values[:, :, -length:]


def repeat_kv(hidden_states, n_rep):
    b, kv, s, d = hidden_states.shape
    hidden_states = hidden_states[:, :, None].expand(b, kv, n_rep, s, d)
    return hidden_states.reshape(b, kv * n_rep, s, d)


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class Attention(nn.Module):
    def __init__(self, hidden_size=54, heads=6, kv_heads=2, head_dim=10, window=5, theta=1e5):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.window, self.theta = window, theta
        self.q_proj = nn.Linear(hidden_size, heads * head_dim)
        self.k_proj = nn.Linear(hidden_size, kv_heads * head_dim)
        self.v_proj = nn.Linear(hidden_size, kv_heads * head_dim)
        self.o_proj = nn.Linear(heads * head_dim, hidden_size)

    def rope(self, x, position_ids):
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        angles = position_ids[:, None].double() * self.theta**-exponents
        emb = torch.cat([angles, angles], dim=-1)
        cos, sin = emb.cos().to(x.dtype), emb.sin().to(x.dtype)
        return x * cos + rotate_half(x) * sin

    def start(self, batch):
        empty = self.k_proj.weight.new_empty(batch, self.kv_heads, 0, self.head_dim)
        return DynamicCache(empty, empty, 0)

    def step(self, x, cache):
        b, t, _ = x.shape
        past = cache.seen_tokens
        q = self.q_proj(x).view(b, t, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)

        position_ids = torch.arange(past, past + t)
        q, k = self.rope(q, position_ids), self.rope(k, position_ids)
        keys, values = cache.update(k, v)

        # keys may have left the cache: the last one is that of the last query
        key_ids = torch.arange(keys.shape[2]) + past + t - keys.shape[2]
        back = position_ids[:, None] - key_ids[None, :]
        seen = (back >= 0) & (back < self.window)
        n_rep = self.heads // self.kv_heads
        scores = q @ repeat_kv(keys, n_rep).transpose(2, 3) * self.head_dim**-0.5
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        out = scores.softmax(-1) @ repeat_kv(values, n_rep)
        cache.crop(self.window - 1)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1)), cache


def make(weights):
    attn = Attention().to(weights["wq"].dtype)
    for role in "qkvo":
        layer = getattr(attn, f"{role}_proj")
        layer.weight.data.copy_(weights[f"w{role}"])
        layer.bias.data.copy_(weights[f"b{role}"])
    return attn.eval()
