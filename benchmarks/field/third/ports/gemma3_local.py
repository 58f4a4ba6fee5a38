"""A local layer of Gemma 3 in Google's own PyTorch (google/gemma_pytorch, gemma/model.py)."""

import torch
from torch import nn

SETTINGS = {
    "embed_dim": 70,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 12,
    "causal": True,
    "scale": 20**-0.5,
    "bias": "",
    "rotary": {"theta": 10000.0, "pairing": "halves"},
    "window": 5,
    "qk_norm": {"kind": "rms", "eps": 1e-6, "over": "head", "offset": 1},
}
TAKES = ("mask",)
CONFIG = {
    "hidden_size": 70,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 12,
    "query_pre_attn_scalar": 20,
    "sliding_window_size": 5,
    "rope_wave_length": {"local": 10_000, "global": 1_000_000},
}
MASK_VALUE = -2.3819763e38  # near the lowest float32


def precompute_freqs_cis(dim, end, theta):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim))
    freqs = torch.outer(torch.arange(end, dtype=torch.float64), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def apply_rotary_emb(x, freqs_cis):
    x_ = torch.view_as_complex(torch.stack(torch.chunk(x, 2, dim=-1), dim=-1).contiguous())
    x_out = torch.view_as_real(x_ * freqs_cis[None, :, None, :].to(x_.dtype))
    return torch.cat((x_out[..., 0], x_out[..., 1]), dim=-1)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6, add_unit_offset=True):
        super().__init__()
        self.eps = eps
        self.add_unit_offset = add_unit_offset
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        output = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return output * (1 + self.weight if self.add_unit_offset else self.weight)


class GemmaAttention(nn.Module):
    def __init__(self, config, attn_type):
        super().__init__()
        self.num_heads = config["num_attention_heads"]
        self.num_kv_heads = config["num_key_value_heads"]
        self.num_queries_per_kv = self.num_heads // self.num_kv_heads
        self.head_dim = config["head_dim"]
        self.q_size = self.num_heads * self.head_dim
        self.kv_size = self.num_kv_heads * self.head_dim
        self.scaling = config["query_pre_attn_scalar"] ** -0.5
        width = config["hidden_size"]
        self.qkv_proj = nn.Linear(width, self.q_size + 2 * self.kv_size, bias=False)
        self.o_proj = nn.Linear(self.q_size, width, bias=False)
        self.query_norm = RMSNorm(self.head_dim)
        self.key_norm = RMSNorm(self.head_dim)
        self.is_local = attn_type == "local"
        self.sliding_window_size = config["sliding_window_size"]
        self.theta = config["rope_wave_length"][attn_type]

    def forward(self, hidden_states, mask, local_mask):
        batch, length, _ = hidden_states.shape
        xq, xk, xv = self.qkv_proj(hidden_states).split(
            [self.q_size, self.kv_size, self.kv_size], dim=-1
        )
        xq = self.query_norm(xq.view(batch, -1, self.num_heads, self.head_dim))
        xk = self.key_norm(xk.view(batch, -1, self.num_kv_heads, self.head_dim))
        xv = xv.view(batch, -1, self.num_kv_heads, self.head_dim)

        freqs_cis = precompute_freqs_cis(self.head_dim, length, self.theta)
        xq = apply_rotary_emb(xq, freqs_cis)
        xk = apply_rotary_emb(xk, freqs_cis)

        key = torch.repeat_interleave(xk, self.num_queries_per_kv, dim=2).transpose(1, 2)
        value = torch.repeat_interleave(xv, self.num_queries_per_kv, dim=2).transpose(1, 2)
        q = xq.transpose(1, 2) * self.scaling
        scores = torch.matmul(q, key.transpose(2, 3))
        scores = scores + (local_mask if self.is_local else mask)
        scores = torch.softmax(scores, dim=-1)
        output = torch.matmul(scores, value)
        output = output.transpose(1, 2).contiguous().view(batch, length, -1)
        return self.o_proj(output)


def make(weights):
    attention = GemmaAttention(CONFIG, "local").to(weights["wq"].dtype)
    state = {
        "qkv_proj.weight": torch.cat((weights["wq"], weights["wk"], weights["wv"])),
        "o_proj.weight": weights["wo"],
        "query_norm.weight": weights["q_norm"],
        "key_norm.weight": weights["k_norm"],
    }
    attention.load_state_dict(state)
    attention.eval()

    def port(x, mask=None):
        length = x.shape[1]
        full = torch.full((1, 1, length, length), MASK_VALUE, dtype=x.dtype)
        causal = torch.triu(full, diagonal=1)
        local = causal + torch.tril(full, diagonal=-CONFIG["sliding_window_size"])
        padding = 0.0 if mask is None else torch.where(mask, 0.0, MASK_VALUE).to(x.dtype)
        return attention(x, causal + padding, local + padding)

    return port
