"""Llama attention in NumPy with a preallocated cache, as in likejazz/llama3.np, llama3.py."""

import math

import numpy as np

SETTINGS = {
    "embed_dim": 60,
    "num_heads": 6,
    "num_kv_heads": 2,
    "causal": True,
    "bias": "",
    "rotary": {"theta": 1e4, "pairing": "interleaved"},
}
NUMPY = True
STEPS = True


def softmax(x):
    exp_x = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return exp_x / np.sum(exp_x, axis=-1, keepdims=True)


def compute_cos_sin_cache(head_dim, max_seq_len, base=10000):
    """Return cosines and sines of (max_seq_len, head_dim / 2)."""
    inv_freq = 1.0 / base ** (np.arange(0, head_dim, 2) / head_dim)
    freqs = np.outer(np.arange(max_seq_len), inv_freq)
    return np.cos(freqs), np.sin(freqs)


def apply_rotary_emb(x, freqs_cos, freqs_sin):
    """Turn the pairs of neighbours of (batch, tokens, heads, head_dim)."""
    pairs = x.reshape((*x.shape[:-1], -1, 2))
    x_r, x_i = pairs[..., 0], pairs[..., 1]
    cos, sin = freqs_cos[None, :, None, :], freqs_sin[None, :, None, :]
    out_r = x_r * cos - x_i * sin
    out_i = x_r * sin + x_i * cos
    return np.stack([out_r, out_i], axis=-1).reshape(x.shape)


def repeat_kv(x, n_rep):
    if n_rep == 1:
        return x
    return np.repeat(x, n_rep, axis=2)


class Attention:
    """One layer; start gives an empty cache, step reads the next tokens."""

    def __init__(self, weights, n_heads, n_kv_heads, head_dim, max_seq_len=16):
        self.q_weight = weights["q_proj"].T
        self.k_weight = weights["k_proj"].T
        self.v_weight = weights["v_proj"].T
        self.o_weight = weights["o_proj"].T
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.n_rep = n_heads // n_kv_heads
        self.max_seq_len = max_seq_len
        cos, sin = compute_cos_sin_cache(head_dim, max_seq_len)
        dtype = self.q_weight.dtype
        self.cos, self.sin = cos.astype(dtype), sin.astype(dtype)

    def start(self, batch):
        shape = (batch, self.max_seq_len, self.n_kv_heads, self.head_dim)
        empty = np.zeros(shape, self.k_weight.dtype)
        return {"k": empty, "v": empty.copy(), "start_pos": 0}

    def step(self, x, state):
        B, L, _ = x.shape  # noqa: N806
        start_pos = state["start_pos"]
        end_pos = start_pos + L
        xq = (x @ self.q_weight).reshape(B, L, self.n_heads, self.head_dim)
        xk = (x @ self.k_weight).reshape(B, L, self.n_kv_heads, self.head_dim)
        xv = (x @ self.v_weight).reshape(B, L, self.n_kv_heads, self.head_dim)

        freqs_cos, freqs_sin = self.cos[start_pos:end_pos], self.sin[start_pos:end_pos]
        xq = apply_rotary_emb(xq, freqs_cos, freqs_sin)
        xk = apply_rotary_emb(xk, freqs_cos, freqs_sin)

        # the cache holds keys that are turned already
        state["k"][:, start_pos:end_pos] = xk
        state["v"][:, start_pos:end_pos] = xv
        ks = state["k"][:, :end_pos]
        vs = state["v"][:, :end_pos]
        xk = repeat_kv(ks, self.n_rep)
        xv = repeat_kv(vs, self.n_rep)

        xq, xk, xv = (each.transpose(0, 2, 1, 3) for each in (xq, xk, xv))
        attention = xq @ xk.transpose(0, 1, 3, 2) / math.sqrt(self.head_dim)
        if L > 1:
            mask = np.full((L, attention.shape[-1]), float("-inf"), dtype=x.dtype)
            attention = attention + np.triu(mask, k=start_pos + 1)[None, None]
        attention = softmax(attention)
        output = (attention @ xv).transpose(0, 2, 1, 3).reshape(B, L, -1)
        state["start_pos"] = end_pos
        return output @ self.o_weight, state


def make(weights):
    """Rename the weights and build the layer."""
    named = {f"{role}_proj": weights[f"w{role}"] for role in "qkvo"}
    n_heads = SETTINGS["num_heads"]
    head_dim = SETTINGS["embed_dim"] // n_heads
    return Attention(named, n_heads, SETTINGS["num_kv_heads"], head_dim)
