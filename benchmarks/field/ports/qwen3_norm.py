"""Qwen3's attention with norms of q and k by head (rasbt/LLMs-from-scratch, ch05/11_qwen3)."""

import torch
from torch import nn

SETTINGS = {
    "embed_dim": 50,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 14,
    "causal": True,
    "bias": "",
    "rotary": {"theta": 1000000.0, "pairing": "halves"},
    "qk_norm": {"kind": "rms", "eps": 1e-6, "over": "head", "offset": 0},
}
TAKES = ("mask",)


class RMSNorm(nn.Module):
    def __init__(self, emb_dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(emb_dim))

    def forward(self, x):
        variance = x.pow(2).mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(variance + self.eps) * self.scale


def compute_rope_params(head_dim, theta_base=10_000.0, context_length=256):
    inv_freq = 1.0 / theta_base ** (torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.arange(context_length).float()[:, None] * inv_freq[None, :]
    angles = torch.cat([angles, angles], dim=1)
    return torch.cos(angles), torch.sin(angles)


def apply_rope(x, cos, sin):
    _, _, seq_len, head_dim = x.shape
    x1 = x[..., : head_dim // 2]
    x2 = x[..., head_dim // 2 :]
    rotated = torch.cat((-x2, x1), dim=-1)
    return x * cos[:seq_len] + rotated * sin[:seq_len]


class GroupedQueryAttention(nn.Module):
    def __init__(self, d_in, num_heads, num_kv_groups, head_dim, theta_base):
        super().__init__()
        self.num_heads, self.num_kv_groups, self.head_dim = num_heads, num_kv_groups, head_dim
        self.group_size = num_heads // num_kv_groups
        self.d_out = num_heads * head_dim
        self.W_query = nn.Linear(d_in, self.d_out, bias=False)
        self.W_key = nn.Linear(d_in, num_kv_groups * head_dim, bias=False)
        self.W_value = nn.Linear(d_in, num_kv_groups * head_dim, bias=False)
        self.out_proj = nn.Linear(self.d_out, d_in, bias=False)
        self.q_norm = RMSNorm(head_dim)
        self.k_norm = RMSNorm(head_dim)
        self.cos, self.sin = compute_rope_params(head_dim, theta_base=theta_base)

    def forward(self, x, mask=None):
        b, num_tokens, _ = x.shape
        queries = self.W_query(x)
        keys = self.W_key(x)
        values = self.W_value(x)

        queries = queries.view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        keys = keys.view(b, num_tokens, self.num_kv_groups, self.head_dim).transpose(1, 2)
        values = values.view(b, num_tokens, self.num_kv_groups, self.head_dim).transpose(1, 2)

        queries = self.q_norm(queries)
        keys = self.k_norm(keys)
        cos, sin = self.cos.to(x.device), self.sin.to(x.device)
        queries = apply_rope(queries, cos, sin)
        keys = apply_rope(keys, cos, sin)

        keys = keys.repeat_interleave(self.group_size, dim=1)
        values = values.repeat_interleave(self.group_size, dim=1)

        attn_scores = queries @ keys.transpose(2, 3)
        hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=x.device)
        hidden = torch.triu(hidden, diagonal=1)
        if mask is not None:
            hidden = hidden | ~mask
        attn_scores = attn_scores.masked_fill(hidden, -torch.inf)
        attn_weights = torch.softmax(attn_scores / self.head_dim**0.5, dim=-1)

        context = (attn_weights @ values).transpose(1, 2).reshape(b, num_tokens, self.d_out)
        return self.out_proj(context)


def make(weights):
    att = GroupedQueryAttention(
        d_in=SETTINGS["embed_dim"],
        num_heads=SETTINGS["num_heads"],
        num_kv_groups=SETTINGS["num_kv_heads"],
        head_dim=SETTINGS["head_dim"],
        theta_base=SETTINGS["rotary"]["theta"],
    ).to(weights["wq"].dtype)
    att.W_query.weight.data = weights["wq"].clone()
    att.W_key.weight.data = weights["wk"].clone()
    att.W_value.weight.data = weights["wv"].clone()
    att.out_proj.weight.data = weights["wo"].clone()
    att.q_norm.scale.data = weights["q_norm"].clone()
    att.k_norm.scale.data = weights["k_norm"].clone()
    return att.eval()
