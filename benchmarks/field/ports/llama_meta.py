"""Llama's attention with complex rotations, as in meta-llama/llama, llama/model.py."""

import math

import torch
import torch.nn.functional as F
from torch import nn

SETTINGS = {
    "embed_dim": 60,
    "num_heads": 6,
    "causal": True,
    "bias": "",
    "rotary": {"theta": 10000.0, "pairing": "interleaved"},
}
TAKES = ("mask",)


def precompute_freqs_cis(dim, end, theta):
    exponents = torch.arange(0, dim, 2).float() / dim
    freqs = theta**-exponents
    angles = torch.outer(torch.arange(end).float(), freqs)
    return torch.polar(torch.ones_like(angles), angles)


def apply_rotary_emb(x, freqs_cis):
    """Rotate (batch, tokens, heads, head_dim); channels 2i and 2i + 1 are one complex number."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    turned = pairs * freqs_cis[None, :, None, :]
    return torch.view_as_real(turned).flatten(3)


def causal_mask(seqlen, like):
    mask = torch.full((seqlen, seqlen), float("-inf"), dtype=like.dtype, device=like.device)
    return torch.triu(mask, diagonal=1)


class Attention(nn.Module):
    def __init__(self, dim, n_heads, max_seq_len=512, theta=10000.0):
        super().__init__()
        self.n_heads = n_heads
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)
        self.freqs_cis = precompute_freqs_cis(self.head_dim, max_seq_len, theta)

    def forward(self, x, mask=None):
        bsz, seqlen, _ = x.shape
        shape = (bsz, seqlen, self.n_heads, self.head_dim)
        xq, xk, xv = self.wq(x).view(shape), self.wk(x).view(shape), self.wv(x).view(shape)

        freqs_cis = self.freqs_cis[:seqlen].to(x.device)
        xq = apply_rotary_emb(xq, freqs_cis)
        xk = apply_rotary_emb(xk, freqs_cis)

        xq, keys, values = xq.transpose(1, 2), xk.transpose(1, 2), xv.transpose(1, 2)
        scores = xq @ keys.transpose(2, 3) / math.sqrt(self.head_dim)
        scores = scores + causal_mask(seqlen, scores)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        probs = F.softmax(scores, dim=-1)
        output = probs @ values
        output = output.transpose(1, 2).reshape(bsz, seqlen, -1)
        return self.wo(output)


def make(weights):
    attention = Attention(SETTINGS["embed_dim"], SETTINGS["num_heads"])
    state = {f"{name}.weight": weights[name] for name in ("wq", "wk", "wv", "wo")}
    attention.to(weights["wq"].dtype).load_state_dict(state)
    return attention.eval()
