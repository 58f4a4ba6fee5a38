"""Cross-attention of Stable Diffusion (CompVis/stable-diffusion, ldm/modules/attention.py)."""

import torch
from einops import rearrange, repeat
from torch import einsum, nn

SETTINGS = {"embed_dim": 50, "num_heads": 5, "head_dim": 14, "bias": "o", "source_dim": 34}
TAKES = ("mask", "source")


def exists(val):
    return val is not None


class CrossAttention(nn.Module):
    def __init__(self, query_dim, context_dim=None, heads=8, dim_head=64, dropout=0.0):
        super().__init__()
        inner_dim = dim_head * heads
        context_dim = context_dim if exists(context_dim) else query_dim
        self.scale = dim_head**-0.5
        self.heads = heads
        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_k = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_v = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, query_dim), nn.Dropout(dropout))

    def forward(self, x, context=None, mask=None):
        h = self.heads
        context = context if exists(context) else x

        q = self.to_q(x)
        k = self.to_k(context)
        v = self.to_v(context)

        q = rearrange(q, "b n (h d) -> (b h) n d", h=h)
        k = rearrange(k, "b n (h d) -> (b h) n d", h=h)
        v = rearrange(v, "b n (h d) -> (b h) n d", h=h)

        sim = einsum("b i d, b j d -> b i j", q, k) * self.scale

        if exists(mask):
            mask = rearrange(mask, "b ... -> b (...)")
            max_neg_value = -torch.finfo(sim.dtype).max
            mask = repeat(mask, "b j -> (b h) () j", h=h)
            sim = sim.masked_fill(~mask, max_neg_value)

        attn = sim.softmax(dim=-1)
        out = einsum("b i j, b j d -> b i d", attn, v)
        out = rearrange(out, "(b h) n d -> b n (h d)", h=h)
        return self.to_out(out)


def load_attn(state, dtype):
    attn = CrossAttention(
        SETTINGS["embed_dim"],
        context_dim=SETTINGS["source_dim"],
        heads=SETTINGS["num_heads"],
        dim_head=SETTINGS["head_dim"],
    )
    attn = attn.to(dtype)
    attn.load_state_dict(state)
    return attn.eval()


def make(weights):
    state = {
        "to_q.weight": weights["wq"],
        "to_k.weight": weights["wk"],
        "to_v.weight": weights["wv"],
        "to_out.0.weight": weights["wo"],
        "to_out.0.bias": weights["bo"],
    }
    attn = load_attn(state, weights["wq"].dtype)

    def port(x, source=None, mask=None):
        return attn(x, context=source, mask=mask)

    return port
