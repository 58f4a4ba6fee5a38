"""Llama 3's attention (huggingface/transformers, models/llama/modeling_llama.py)."""

import math

import torch
from torch import nn

SETTINGS = {
    "embed_dim": 72,
    "num_heads": 6,
    "num_kv_heads": 2,
    "causal": True,
    "bias": "",
    "rotary": {
        "theta": 500000.0,
        "pairing": "halves",
        "scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    },
}
TAKES = ("mask",)


def compute_inv_freq(head_dim, base, rope_scaling):
    inv_freq = 1.0 / base ** (torch.arange(0, head_dim, 2).float() / head_dim)
    factor = rope_scaling["factor"]
    low, high = rope_scaling["low_freq_factor"], rope_scaling["high_freq_factor"]
    old_context = rope_scaling["original_max_position_embeddings"]
    wavelen = 2 * math.pi / inv_freq
    smooth = (old_context / wavelen - low) / (high - low)
    mixed = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wavelen > old_context / low, inv_freq / factor, mixed)
    return torch.where(wavelen < old_context / high, inv_freq, scaled)


class LlamaRotaryEmbedding(nn.Module):
    def __init__(self, head_dim, base, rope_scaling):
        super().__init__()
        self.inv_freq = compute_inv_freq(head_dim, base, rope_scaling)

    def forward(self, position_ids):
        freqs = torch.outer(position_ids.float(), self.inv_freq.to(position_ids.device))
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def repeat_kv(hidden_states, n_rep):
    return hidden_states[:, :, None].expand(-1, -1, n_rep, -1, -1).flatten(1, 2)


class LlamaAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, num_key_value_heads, rope):
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.num_key_value_groups = num_heads // num_key_value_heads
        self.scaling = self.head_dim**-0.5
        kv_size = num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(self.head_dim, rope["theta"], rope["scaling"])

    def forward(self, hidden_states, mask=None):
        bsz, q_len, _ = hidden_states.shape
        per_head = (bsz, q_len, -1, self.head_dim)
        query_states = self.q_proj(hidden_states).view(per_head).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(per_head).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(per_head).transpose(1, 2)
        cos, sin = self.rotary_emb(torch.arange(q_len, device=hidden_states.device))
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        key_states = repeat_kv(key_states, self.num_key_value_groups)
        value_states = repeat_kv(value_states, self.num_key_value_groups)
        attn_weights = query_states @ key_states.transpose(2, 3) * self.scaling
        attn_weights = attn_weights + self.prepare_mask(mask, attn_weights)
        attn_weights = nn.functional.softmax(attn_weights, dim=-1)
        attn_output = attn_weights @ value_states
        attn_output = attn_output.transpose(1, 2).reshape(bsz, q_len, -1)
        return self.o_proj(attn_output)

    def prepare_mask(self, mask, scores):
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            allowed = allowed & mask
        min_dtype = torch.finfo(scores.dtype).min
        return torch.zeros_like(scores).masked_fill(~allowed, min_dtype)


def make(weights):
    s = SETTINGS
    port = LlamaAttention(s["embed_dim"], s["num_heads"], s["num_kv_heads"], s["rotary"])
    state = {f"{role}_proj.weight": weights[f"w{role}"] for role in "qkvo"}
    port.to(weights["wq"].dtype).load_state_dict(state)
    return port.eval()
