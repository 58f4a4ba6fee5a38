"""Gemma's attention: window, softcap, norms of q and k (google/gemma_pytorch, gemma/model.py)."""

import torch
import torch.nn.functional as F
from torch import nn

SETTINGS = {
    "embed_dim": 60,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 22,
    "causal": True,
    "bias": "",
    "scale": 15**-0.5,
    "window": 7,
    "softcap": 6.0,
    "rotary": {"theta": 10000.0, "pairing": "halves"},
    "qk_norm": {"kind": "rms", "eps": 1e-6, "over": "head", "offset": 1},
}
TAKES = ("mask",)


def precompute_freqs_cis(dim, end, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2).float() / dim))
    angles = torch.outer(torch.arange(end).float(), freqs)
    return torch.polar(torch.ones_like(angles), angles)


def apply_rotary_emb(x, freqs_cis):
    """Rotate (batch, heads, tokens, head_dim): the first half is real, the second imaginary."""
    real, imaginary = x.chunk(2, dim=-1)
    turned = torch.complex(real, imaginary) * freqs_cis
    return torch.cat((turned.real, turned.imag), dim=-1)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6, add_unit_offset=True):
        super().__init__()
        self.eps = eps
        self.add_unit_offset = add_unit_offset
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        output = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return output * (1 + self.weight) if self.add_unit_offset else output * self.weight


class GemmaAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_heads, self.num_kv_heads = config["num_heads"], config["num_kv_heads"]
        self.head_dim, self.hidden_size = config["head_dim"], config["hidden_size"]
        self.q_size = self.num_heads * self.head_dim
        self.kv_size = self.num_kv_heads * self.head_dim
        self.scaling = config["query_pre_attn_scalar"] ** -0.5
        self.attn_logit_softcapping = config["attn_logit_softcapping"]
        self.sliding_window_size = config["sliding_window_size"]
        self.qkv_proj = nn.Linear(self.hidden_size, self.q_size + 2 * self.kv_size, bias=False)
        self.o_proj = nn.Linear(self.q_size, self.hidden_size, bias=False)
        self.query_norm = RMSNorm(self.head_dim)
        self.key_norm = RMSNorm(self.head_dim)
        self.freqs_cis = precompute_freqs_cis(self.head_dim, 256)

    def local_mask(self, n, device):
        all_ones = torch.ones(n, n, dtype=torch.bool, device=device)
        return torch.tril(all_ones) & torch.triu(all_ones, -self.sliding_window_size + 1)

    def forward(self, hidden_states, mask=None):
        b, n, _ = hidden_states.shape
        qkv = self.qkv_proj(hidden_states)
        xq, xk, xv = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        xq = xq.view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        xk = xk.view(b, n, self.num_kv_heads, self.head_dim).transpose(1, 2)
        xv = xv.view(b, n, self.num_kv_heads, self.head_dim).transpose(1, 2)
        xq, xk = self.query_norm(xq), self.key_norm(xk)
        freqs_cis = self.freqs_cis[:n].to(xq.device)
        xq, xk = apply_rotary_emb(xq, freqs_cis), apply_rotary_emb(xk, freqs_cis)
        groups = self.num_heads // self.num_kv_heads
        key, value = (torch.repeat_interleave(t, groups, dim=1) for t in (xk, xv))
        scores = (xq * self.scaling) @ key.transpose(2, 3)
        scores = torch.tanh(scores / self.attn_logit_softcapping) * self.attn_logit_softcapping
        allowed = self.local_mask(n, scores.device)
        if mask is not None:
            allowed = allowed & mask
        scores = torch.where(allowed, scores, -2.3819763e38)
        probs = F.softmax(scores, dim=-1)
        output = (probs @ value).transpose(1, 2).reshape(b, n, self.q_size)
        return self.o_proj(output)


def make(weights):
    config = {
        "hidden_size": SETTINGS["embed_dim"],
        "num_heads": SETTINGS["num_heads"],
        "num_kv_heads": SETTINGS["num_kv_heads"],
        "head_dim": SETTINGS["head_dim"],
        "query_pre_attn_scalar": 15,
        "attn_logit_softcapping": 6.0,
        "final_logit_softcapping": 3.6,
        "sliding_window_size": 7,
    }
    state = {
        "qkv_proj.weight": torch.cat([weights["wq"], weights["wk"], weights["wv"]]),
        "o_proj.weight": weights["wo"],
        "query_norm.weight": weights["q_norm"],
        "key_norm.weight": weights["k_norm"],
    }
    attention = GemmaAttention(config).to(weights["wq"].dtype)
    attention.load_state_dict(state)
    return attention.eval()
