"""Gemma 2 in plain PyTorch (google/gemma_pytorch, gemma/model.py)."""

import torch
import torch.nn.functional as F
from torch import nn

SETTINGS = {
    "embed_dim": 50,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 12,
    "causal": True,
    "scale": 20**-0.5,
    "bias": "",
    "rotary": {"theta": 1e4, "pairing": "halves"},
    "window": 6,
    "softcap": 2.0,
}
TAKES = ("mask",)
CONFIG = {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0, "sliding_window_size": 6}
MASKED = -2.3819763e38


def precompute_freqs_cis(dim, end, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].double() / dim))
    t = torch.arange(end)
    freqs = torch.outer(t, freqs)
    return torch.polar(torch.ones_like(freqs), freqs)  # complex, [end, dim / 2]


def apply_rotary_emb(x, freqs_cis):  # [batch, tokens, heads, head_dim]
    x_ = torch.view_as_complex(torch.stack(torch.chunk(x, 2, dim=-1), dim=-1))
    x_out = torch.view_as_real(x_ * freqs_cis.view(1, x.shape[1], 1, -1)).type_as(x)
    x_out = torch.cat(torch.chunk(x_out, 2, dim=-1), dim=-2)
    return x_out.reshape(*x.shape)


class GemmaAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, num_kv_heads, head_dim):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.num_queries_per_kv = num_heads // num_kv_heads
        self.q_size, self.kv_size = num_heads * head_dim, num_kv_heads * head_dim
        self.scaling = CONFIG["query_pre_attn_scalar"] ** -0.5
        self.qkv_proj = nn.Linear(hidden_size, self.q_size + 2 * self.kv_size, bias=False)
        self.o_proj = nn.Linear(self.q_size, hidden_size, bias=False)
        self.sliding_window_size = CONFIG["sliding_window_size"]
        self.attn_logit_softcapping = CONFIG["attn_logit_softcapping"]

    def forward(self, hidden_states, mask=None):
        batch_size, input_len, _ = hidden_states.shape
        min_value = torch.full((1, 1, input_len, input_len), MASKED, dtype=hidden_states.dtype)
        local_mask = torch.triu(min_value, diagonal=1)
        if mask is not None:
            local_mask = torch.where(mask, local_mask, MASKED)
        freqs_cis = precompute_freqs_cis(self.head_dim, input_len)

        qkv = self.qkv_proj(hidden_states)
        xq, xk, xv = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        xq = xq.reshape(batch_size, -1, self.num_heads, self.head_dim)
        xk = xk.reshape(batch_size, -1, self.num_kv_heads, self.head_dim)
        xv = xv.reshape(batch_size, -1, self.num_kv_heads, self.head_dim)
        xq = apply_rotary_emb(xq, freqs_cis=freqs_cis)
        xk = apply_rotary_emb(xk, freqs_cis=freqs_cis)

        key = torch.repeat_interleave(xk, self.num_queries_per_kv, dim=2)
        value = torch.repeat_interleave(xv, self.num_queries_per_kv, dim=2)
        q, k, v = xq.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

        scores = torch.matmul(q * self.scaling, k.transpose(2, 3))
        all_ones = torch.ones_like(local_mask)
        sliding_mask = torch.triu(all_ones, -1 * self.sliding_window_size + 1)
        local_mask = torch.where(sliding_mask == 1, local_mask, MASKED)
        scores = scores / self.attn_logit_softcapping
        scores = torch.tanh(scores)
        scores = scores * self.attn_logit_softcapping
        scores = scores + local_mask
        scores = F.softmax(scores, dim=-1)
        output = torch.matmul(scores, v)
        output = output.transpose(1, 2).contiguous().view(batch_size, input_len, -1)
        return self.o_proj(output)


def make(weights):
    sizes = (SETTINGS[n] for n in ("embed_dim", "num_heads", "num_kv_heads", "head_dim"))
    attn = GemmaAttention(*sizes)
    qkv = torch.cat([weights["wq"], weights["wk"], weights["wv"]])
    attn.qkv_proj.weight = nn.Parameter(qkv)
    attn.o_proj.weight = nn.Parameter(weights["wo"].clone())
    return attn
