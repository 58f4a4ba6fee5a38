"""Attention of open_lm: grouped heads, a rotation and a causal mask."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from headwise import Attention, Rotary
from tests.diagnosis.sealed.weights import draw_weights


@dataclass
class Params:
    dim: int
    n_heads: int
    n_kv_heads: int
    rope_theta: float = 10000.0


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class RotaryEmbedding(nn.Module):
    def __init__(self, dim_model, base=10000.0):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim_model, 2).float() / dim_model))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def cos_sin_tables(self, x, seq_dimension):
        t = torch.arange(x.shape[seq_dimension], device=x.device).to(self.inv_freq.dtype)
        freqs = torch.outer(t, self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1).to(x.dtype)
        shape = [1] * x.ndim
        shape[seq_dimension], shape[-1] = emb.shape
        return emb.cos().view(shape), emb.sin().view(shape)

    def rotate(self, x, seq_dimension=-2):
        cos, sin = self.cos_sin_tables(x, seq_dimension)
        return x * cos + rotate_half(x) * sin

    def forward(self, q, k):
        return self.rotate(q), self.rotate(k)


def repeat_kv(x, n_rep):
    # (b, t, n_kv_heads, d) -> (b, t, n_kv_heads * n_rep, d)
    b, t, h, d = x.shape
    return x[:, :, :, None, :].expand(b, t, h, n_rep, d).reshape(b, t, h * n_rep, d)


class CustomAttn(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.n_heads = args.n_heads
        self.n_kv_heads = args.n_kv_heads
        self.head_dim = args.dim // args.n_heads
        self.wq = nn.Linear(args.dim, args.n_heads * self.head_dim)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * self.head_dim)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * self.head_dim)
        self.wo = nn.Linear(args.n_heads * self.head_dim, args.dim)
        self.pos_embed = RotaryEmbedding(self.head_dim, args.rope_theta)

    def forward(self, x):
        b, t, _ = x.shape
        queries = self.wq(x).view(b, t, self.n_heads, self.head_dim)
        keys = self.wk(x).view(b, t, self.n_kv_heads, self.head_dim)
        vals = self.wv(x).view(b, t, self.n_kv_heads, self.head_dim)

        queries, keys = self.pos_embed(queries, keys)

        n_rep = self.n_heads // self.n_kv_heads
        keys, vals = repeat_kv(keys, n_rep), repeat_kv(vals, n_rep)

        queries, keys, vals = (y.transpose(1, 2) for y in (queries, keys, vals))
        output = F.scaled_dot_product_attention(queries, keys, vals, is_causal=True)
        output = output.transpose(1, 2).reshape(b, t, -1)
        return self.wo(output)


def make():
    """Return the port and the layer that it should be."""
    layer = Attention(96, 6, num_kv_heads=2, rotary=Rotary(), window=(None, 0))
    draw_weights(layer, 37)
    port = CustomAttn(Params(dim=96, n_heads=6, n_kv_heads=2))
    names = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "out_proj"}
    for mine, theirs in names.items():
        getattr(port, mine).load_state_dict(getattr(layer, theirs).state_dict())
    return port.eval(), layer
