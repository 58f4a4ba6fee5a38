"""Mistral's attention in a sliding window (mistralai/mistral-inference, one_file_ref.py)."""

import torch
import torch.nn.functional as F
from torch import nn

SETTINGS = {
    "embed_dim": 84,
    "num_heads": 6,
    "num_kv_heads": 3,
    "causal": True,
    "bias": "",
    "window": 5,
    "rotary": {"theta": 10000.0, "pairing": "interleaved"},
}
TAKES = ("mask",)


def rope_table(dim, positions, theta):
    freqs = 1.0 / theta ** (torch.arange(0, dim, 2, device=positions.device).double() / dim)
    angles = positions[:, None] * freqs
    return angles.cos(), angles.sin()


def apply_rope(x, cos, sin):
    """Rotate (batch, tokens, heads, head_dim) in pairs of neighbours."""
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    out = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return out.flatten(-2)


def repeat_kv(keys, values, repeats):
    keys = torch.repeat_interleave(keys, repeats=repeats, dim=2)
    values = torch.repeat_interleave(values, repeats=repeats, dim=2)
    return keys, values


class Attention(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads, sliding_window, theta):
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.head_dim = dim // n_heads
        self.repeats = n_heads // n_kv_heads
        self.sliding_window = sliding_window
        self.theta = theta
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def window_mask(self, seqlen, like):
        tensor = torch.ones((seqlen, seqlen), dtype=like.dtype, device=like.device)
        band = torch.tril(tensor, diagonal=0)
        band = torch.triu(band, diagonal=1 - self.sliding_window)
        return torch.log(band)

    def forward(self, x, mask=None):
        bsz, seqlen, _ = x.shape
        xq = self.wq(x).view(bsz, seqlen, self.n_heads, self.head_dim)
        xk = self.wk(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        xv = self.wv(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim)

        positions = torch.arange(seqlen, device=x.device)
        cos, sin = rope_table(self.head_dim, positions, self.theta)
        xq = apply_rope(xq, cos, sin)
        xk = apply_rope(xk, cos, sin)
        key, value = repeat_kv(xk, xv, self.repeats)

        bias = self.window_mask(seqlen, x)[None, None]
        if mask is not None:
            bias = bias.masked_fill(~mask, float("-inf"))
        xq, key, value = xq.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        output = F.scaled_dot_product_attention(xq, key, value, attn_mask=bias)
        return self.wo(output.transpose(1, 2).reshape(bsz, seqlen, -1))


def make(weights):
    s = SETTINGS
    attention = Attention(
        dim=s["embed_dim"],
        n_heads=s["num_heads"],
        n_kv_heads=s["num_kv_heads"],
        sliding_window=s["window"],
        theta=s["rotary"]["theta"],
    )
    attention.to(weights["wq"].dtype)
    loaded = {f"{name}.weight": tensor for name, tensor in weights.items()}
    attention.load_state_dict(loaded)
    return attention.eval()
