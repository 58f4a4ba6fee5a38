"""Cross attention of latents to data, as in lucidrains/perceiver-pytorch, perceiver_pytorch.py."""

import torch
from einops import rearrange, repeat
from torch import einsum, nn

SETTINGS = {
    "embed_dim": 54,
    "source_dim": 38,
    "num_heads": 3,
    "head_dim": 14,
    "bias": "o",
}
TAKES = ("mask", "source")


def exists(val):
    return val is not None


def default(val, d):
    return val if exists(val) else d


class Attention(nn.Module):
    """Latents x attend to a context, or to themselves without one."""

    def __init__(self, query_dim, context_dim=None, heads=8, dim_head=64, dropout=0.0):
        super().__init__()
        inner_dim = dim_head * heads
        context_dim = default(context_dim, query_dim)
        self.scale = dim_head**-0.5
        self.heads = heads
        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_kv = nn.Linear(context_dim, inner_dim * 2, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.to_out = nn.Linear(inner_dim, query_dim)

    def forward(self, x, context=None, mask=None):
        h = self.heads
        context = default(context, x)
        q = self.to_q(x)
        k, v = self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (rearrange(t, "b n (h d) -> (b h) n d", h=h) for t in (q, k, v))

        sim = einsum("b i d, b j d -> b i j", q, k) * self.scale

        if exists(mask):
            # (batch, positions of the context); True may be seen
            mask = rearrange(mask, "b ... -> b (...)")
            max_neg_value = -torch.finfo(sim.dtype).max
            mask = repeat(mask, "b j -> (b h) () j", h=h)
            sim = sim.masked_fill(~mask, max_neg_value)

        attn = sim.softmax(dim=-1)
        attn = self.dropout(attn)

        out = einsum("b i j, b j d -> b i d", attn, v)
        out = rearrange(out, "(b h) n d -> b n (h d)", h=h)
        return self.to_out(out)


def make(weights):
    """Fuse k and v, and load the layer."""
    attn = Attention(
        SETTINGS["embed_dim"],
        SETTINGS["source_dim"],
        heads=SETTINGS["num_heads"],
        dim_head=SETTINGS["head_dim"],
        dropout=0.1,
    )
    attn.to(weights["wq"].dtype)
    state_dict = {
        "to_q.weight": weights["wq"],
        "to_kv.weight": torch.cat((weights["wk"], weights["wv"]), dim=0),
        "to_out.weight": weights["wo"],
        "to_out.bias": weights["bo"],
    }
    attn.load_state_dict(state_dict)
    attn.eval()

    def port(x, source=None, mask=None):
        return attn(x, context=source, mask=mask)

    return port
