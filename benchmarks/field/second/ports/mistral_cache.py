"""Mistral with its rolling cache (mistralai/mistral-inference, one_file_ref.py and cache.py)."""

import torch
from torch import nn

STEPS = True
SETTINGS = {
    "embed_dim": 42,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 10,
    "causal": True,
    "bias": "",
    "rotary": {"theta": 1e6, "pairing": "interleaved"},
    "window": 3,
}
TAKES = ()


def precompute_freqs_cis(dim, end, theta):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2).double() / dim))
    t = torch.arange(end).double()
    freqs = torch.outer(t, freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def apply_rotary_emb(x, freqs_cis):
    x_ = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    out = torch.view_as_real(x_ * freqs_cis[:, None, :]).flatten(-2)
    return out.type_as(x)


def repeat_kv(keys, values, repeats):
    keys = torch.repeat_interleave(keys, repeats=repeats, dim=2)
    values = torch.repeat_interleave(values, repeats=repeats, dim=2)
    return keys, values


class RollingCache:
    """Keys and values of the last tokens; token t lies in slot t modulo the window."""

    def __init__(self, batch, window, n_kv_heads, head_dim, dtype):
        self.window, self.seen = window, 0
        self.k = torch.zeros(batch, window, n_kv_heads, head_dim, dtype=dtype)
        self.v = torch.zeros(batch, window, n_kv_heads, head_dim, dtype=dtype)

    def unrotated(self, cache):
        if self.seen <= self.window:
            return cache[:, : self.seen]
        first = self.seen % self.window
        return torch.cat([cache[:, first:], cache[:, :first]], dim=1)

    def update(self, xk, xv):
        keys = torch.cat([self.unrotated(self.k), xk], dim=1)
        values = torch.cat([self.unrotated(self.v), xv], dim=1)
        new = xk.shape[1]
        slots = torch.arange(self.seen, self.seen + new)[-self.window :] % self.window
        self.k, self.v = self.k.clone(), self.v.clone()
        self.k[:, slots] = xk[:, -self.window :]
        self.v[:, slots] = xv[:, -self.window :]
        self.seen += new
        return keys, values


class Attention(nn.Module):
    def __init__(self, args, weights):
        super().__init__()
        self.n_heads, self.n_kv_heads = args["num_heads"], args["num_kv_heads"]
        self.head_dim, self.sliding_window = args["head_dim"], args["window"]
        self.repeats = self.n_heads // self.n_kv_heads
        self.scale = self.head_dim**-0.5
        self.freqs_cis = precompute_freqs_cis(self.head_dim, 4096, args["rotary"]["theta"])
        for name in ("wq", "wk", "wv", "wo"):
            setattr(self, name, nn.Linear(*weights[name].shape[::-1], bias=False))
            getattr(self, name).weight = nn.Parameter(weights[name].clone())

    def start(self, batch):
        dtype = self.wk.weight.dtype
        return RollingCache(batch, self.sliding_window, self.n_kv_heads, self.head_dim, dtype)

    def step(self, x, state):
        bsz, seqlen, _ = x.shape
        xq = self.wq(x).view(bsz, seqlen, self.n_heads, self.head_dim)
        xk = self.wk(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        xv = self.wv(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        positions = torch.arange(state.seen, state.seen + seqlen)
        xq = apply_rotary_emb(xq, self.freqs_cis[positions])
        xk = apply_rotary_emb(xk, self.freqs_cis[positions])
        key, value = state.update(xk, xv)
        key, value = repeat_kv(key, value, self.repeats)
        last = state.seen
        key_positions = torch.arange(last - key.shape[1], last)
        back = positions[:, None] - key_positions[None, :]
        mask = (back >= 0) & (back < self.sliding_window)
        query, key, value = (t.transpose(1, 2) for t in (xq, key, value))
        scores = torch.matmul(query, key.transpose(2, 3)) * self.scale
        scores = scores.masked_fill(~mask, float("-inf"))
        scores = nn.functional.softmax(scores, dim=-1)
        output = torch.matmul(scores, value)
        output = output.transpose(1, 2).reshape(bsz, seqlen, -1)
        return self.wo(output), state


def make(weights):
    return Attention(SETTINGS, weights)
