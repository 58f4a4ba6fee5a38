"""A decoder of x-transformers (lucidrains/x-transformers, x_transformers/x_transformers.py)."""

import torch
from einops import rearrange, repeat
from torch import einsum, nn

SETTINGS = {
    "embed_dim": 56,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 12,
    "causal": True,
    "bias": "",
    "softcap": 6.0,
    "rotary": {"theta": 1e4, "pairing": "interleaved", "width": 8, "scaling": None},
}
TAKES = ("mask",)


def exists(val):
    return val is not None


def softclamp(t, value):
    return (t / value).tanh() * value


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).double() / dim))
        self.register_buffer("inv_freq", inv_freq)

    def forward(self, seq_len):
        t = torch.arange(seq_len).type_as(self.inv_freq)
        freqs = einsum("i , j -> i j", t, self.inv_freq)
        return repeat(freqs, "n d -> n (d r)", r=2)


def rotate_half(x):
    x = rearrange(x, "... (d r) -> ... d r", r=2)
    x1, x2 = x.unbind(dim=-1)
    x = torch.stack((-x2, x1), dim=-1)
    return rearrange(x, "... d r -> ... (d r)")


def apply_rotary_pos_emb(t, freqs):
    rot_dim = freqs.shape[-1]
    t, t_unrotated = t[..., :rot_dim], t[..., rot_dim:]
    t = (t * freqs.cos().to(t.dtype)) + (rotate_half(t) * freqs.sin().to(t.dtype))
    return torch.cat((t, t_unrotated), dim=-1)


class Attention(nn.Module):
    def __init__(self, dim, dim_head, heads, kv_heads, softclamp_value, rotary_emb_dim, base):
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        self.scale = dim_head**-0.5
        self.softclamp_value = softclamp_value
        self.rotary_pos_emb = RotaryEmbedding(rotary_emb_dim, base=base)

        self.to_q = nn.Linear(dim, dim_head * heads, bias=False)
        self.to_kv = nn.Linear(dim, dim_head * kv_heads * 2, bias=False)
        self.to_out = nn.Linear(dim_head * heads, dim, bias=False)

    def forward(self, x, mask=None):
        n, h, kv_h = x.shape[1], self.heads, self.kv_heads
        q, (k, v) = self.to_q(x), self.to_kv(x).chunk(2, dim=-1)
        q = rearrange(q, "b n (h d) -> b h n d", h=h)
        k, v = (rearrange(t, "b n (h d) -> b h n d", h=kv_h) for t in (k, v))

        freqs = self.rotary_pos_emb(n)
        q = apply_rotary_pos_emb(q, freqs)
        k = apply_rotary_pos_emb(k, freqs)
        k, v = (repeat(t, "b h n d -> b (h g) n d", g=h // kv_h) for t in (k, v))

        sim = einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        sim = softclamp(sim, self.softclamp_value)

        mask_value = -torch.finfo(sim.dtype).max
        if exists(mask):
            mask = rearrange(mask, "b 1 1 j -> b j")
            sim = sim.masked_fill(~rearrange(mask, "b j -> b 1 1 j"), mask_value)

        i, j = sim.shape[-2:]
        causal_mask = torch.ones((i, j), dtype=torch.bool).triu(j - i + 1)
        sim = sim.masked_fill(causal_mask, mask_value)

        attn = sim.softmax(dim=-1)
        out = einsum("b h i j, b h j d -> b h i d", attn, v)
        out = rearrange(out, "b h n d -> b n (h d)")
        return self.to_out(out)


def make(weights):
    rotary = SETTINGS["rotary"]
    attn = Attention(
        dim=SETTINGS["embed_dim"],
        dim_head=SETTINGS["head_dim"],
        heads=SETTINGS["num_heads"],
        kv_heads=SETTINGS["num_kv_heads"],
        softclamp_value=SETTINGS["softcap"],
        rotary_emb_dim=rotary["width"],
        base=rotary["theta"],
    ).to(weights["wq"].dtype)
    with torch.no_grad():
        attn.to_q.weight.copy_(weights["wq"])
        attn.to_kv.weight.copy_(torch.cat((weights["wk"], weights["wv"])))
        attn.to_out.weight.copy_(weights["wo"])
    return attn
