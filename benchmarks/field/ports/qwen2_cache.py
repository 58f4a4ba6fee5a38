"""Qwen2's attention with a cache (huggingface/transformers, cache_utils.py, modeling_qwen2.py)."""

import torch
from torch import nn

SETTINGS = {
    "embed_dim": 56,
    "num_heads": 4,
    "num_kv_heads": 2,
    "causal": True,
    "bias": "qkv",
    "window": 5,
    "rotary": {"theta": 1000000.0, "pairing": "halves"},
}
STEPS = True


class SlidingCache:
    """Keys and values of the last tokens, and the number of all tokens so far."""

    def __init__(self, batch, heads, head_dim, sliding_window, dtype):
        self.keys = torch.zeros(batch, heads, 0, head_dim, dtype=dtype)
        self.values = torch.zeros(batch, heads, 0, head_dim, dtype=dtype)
        self.sliding_window = sliding_window
        self.seen_tokens = 0

    def update(self, key_states, value_states):
        keys = torch.cat([self.keys, key_states], dim=2)
        values = torch.cat([self.values, value_states], dim=2)
        self.seen_tokens = self.seen_tokens + key_states.shape[2]
        keep = self.sliding_window - 1
        self.keys = keys[:, :, -keep:]
        self.values = values[:, :, -keep:]
        return keys, values


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rope(x, positions, theta):
    dim = x.shape[-1]
    inv_freq = 1.0 / theta ** (torch.arange(0, dim, 2).double() / dim)
    freqs = positions[:, None] * inv_freq
    emb = torch.cat((freqs, freqs), dim=-1).to(x.dtype)
    return x * emb.cos() + rotate_half(x) * emb.sin()


class Qwen2Attention(nn.Module):
    def __init__(self, hidden_size, num_heads, num_key_value_heads, sliding_window, rope_theta):
        super().__init__()
        self.num_heads, self.num_key_value_heads = num_heads, num_key_value_heads
        self.head_dim = hidden_size // num_heads
        self.num_key_value_groups = num_heads // num_key_value_heads
        self.sliding_window, self.rope_theta = sliding_window, rope_theta
        kv_size = num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=True)
        self.k_proj = nn.Linear(hidden_size, kv_size, bias=True)
        self.v_proj = nn.Linear(hidden_size, kv_size, bias=True)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)

    def start(self, batch):
        dtype = self.q_proj.weight.dtype
        window = self.sliding_window
        return SlidingCache(batch, self.num_key_value_heads, self.head_dim, window, dtype)

    def step(self, x, state):
        bsz, q_len, _ = x.shape
        query = self.q_proj(x).view(bsz, q_len, -1, self.head_dim).transpose(1, 2)
        key = self.k_proj(x).view(bsz, q_len, -1, self.head_dim).transpose(1, 2)
        value = self.v_proj(x).view(bsz, q_len, -1, self.head_dim).transpose(1, 2)

        past = state.seen_tokens
        cache_position = torch.arange(past, past + q_len)
        query = rope(query, cache_position, self.rope_theta)
        key = rope(key, cache_position, self.rope_theta)
        key, value = state.update(key, value)

        key = key.repeat_interleave(self.num_key_value_groups, dim=1)
        value = value.repeat_interleave(self.num_key_value_groups, dim=1)
        scores = query @ key.transpose(2, 3) / self.head_dim**0.5
        kv_position = torch.arange(key.shape[2]) + past + q_len - key.shape[2]
        distance = cache_position[:, None] - kv_position[None, :]
        visible = (distance >= 0) & (distance < self.sliding_window)
        scores = scores.masked_fill(~visible, float("-inf"))
        probs = torch.softmax(scores, dim=-1)
        output = (probs @ value).transpose(1, 2).reshape(bsz, q_len, -1)
        return self.o_proj(output), state


def make(weights):
    s = SETTINGS
    attention = Qwen2Attention(
        s["embed_dim"], s["num_heads"], s["num_kv_heads"], s["window"], s["rotary"]["theta"]
    )
    attention.to(weights["wq"].dtype)
    state = {f"{role}_proj.weight": weights[f"w{role}"] for role in "qkvo"}
    state |= {f"{role}_proj.bias": weights[f"b{role}"] for role in "qkv"}
    attention.load_state_dict(state)
    return attention.eval()
