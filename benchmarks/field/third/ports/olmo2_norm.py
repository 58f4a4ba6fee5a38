"""Attention of OLMo 2: norms over all of q and of k (transformers, olmo2/modeling_olmo2.py)."""

import torch
from torch import nn

SETTINGS = {
    "embed_dim": 84,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 10,
    "causal": True,
    "bias": "",
    "rotary": {"theta": 500000.0, "pairing": "interleaved"},
    "qk_norm": {"kind": "rms", "eps": 1e-6, "over": "all", "offset": 0},
}
TAKES = ("mask",)


class Olmo2RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def repeat_kv(hidden_states, n_rep):
    batch, num_kv_heads, slen, head_dim = hidden_states.shape
    hidden_states = hidden_states[:, :, None].expand(batch, num_kv_heads, n_rep, slen, head_dim)
    return hidden_states.reshape(batch, num_kv_heads * n_rep, slen, head_dim)


class Olmo2Attention(nn.Module):
    def __init__(self, hidden_size, num_heads, num_kv_heads, head_dim, rope_theta):
        super().__init__()
        self.head_dim = head_dim
        self.num_key_value_groups = num_heads // num_kv_heads
        self.scaling = head_dim**-0.5
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.q_norm = Olmo2RMSNorm(num_heads * head_dim)
        self.k_norm = Olmo2RMSNorm(num_kv_heads * head_dim)
        self.rope_theta = rope_theta

    def rope(self, length, dtype):
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        freqs = torch.outer(torch.arange(length, dtype=torch.float64), self.rope_theta**-steps)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(dtype), emb.sin().to(dtype)

    def forward(self, hidden_states, attention_mask=None):
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query_states = self.q_norm(self.q_proj(hidden_states))
        key_states = self.k_norm(self.k_proj(hidden_states))
        value_states = self.v_proj(hidden_states)
        query_states = query_states.view(hidden_shape).transpose(1, 2)
        key_states = key_states.view(hidden_shape).transpose(1, 2)
        value_states = value_states.view(hidden_shape).transpose(1, 2)

        cos, sin = self.rope(input_shape[1], hidden_states.dtype)
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)

        key_states = repeat_kv(key_states, self.num_key_value_groups)
        value_states = repeat_kv(value_states, self.num_key_value_groups)
        attn_weights = torch.matmul(query_states, key_states.transpose(2, 3)) * self.scaling
        attn_weights = attn_weights + attention_mask
        attn_weights = nn.functional.softmax(attn_weights, dim=-1)
        attn_output = torch.matmul(attn_weights, value_states).transpose(1, 2)
        return self.o_proj(attn_output.reshape(*input_shape, -1).contiguous())


def to_halves(rows, head_dim):
    """Reorder the rows of each head from pairs of neighbours to two halves."""
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def make(weights):
    dim = SETTINGS["head_dim"]
    attention = Olmo2Attention(84, 6, 2, dim, rope_theta=500000.0).to(weights["wq"].dtype)
    state = {
        "q_proj.weight": to_halves(weights["wq"], dim),
        "k_proj.weight": to_halves(weights["wk"], dim),
        "v_proj.weight": weights["wv"],
        "o_proj.weight": weights["wo"],
        "q_norm.weight": to_halves(weights["q_norm"], dim),
        "k_norm.weight": to_halves(weights["k_norm"], dim),
    }
    attention.load_state_dict(state)
    attention.eval()

    def port(x, mask=None):
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None]
        if mask is not None:
            seen = seen & mask
        lowest = torch.finfo(x.dtype).min
        return attention(x, torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, lowest))

    return port
