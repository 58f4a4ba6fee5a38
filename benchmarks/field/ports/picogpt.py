"""GPT-2's attention in plain NumPy, one sequence at a time: jaymody/picoGPT, gpt2.py."""
# ruff: noqa: RET504

import math

import numpy as np

SETTINGS = {"embed_dim": 70, "num_heads": 5, "causal": True}
TAKES = ()
NUMPY = True


def softmax(x):
    exp_x = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return exp_x / np.sum(exp_x, axis=-1, keepdims=True)


def linear(x, w, b):  # [m, in], [in, out], [out] -> [m, out]
    return x @ w + b


def attention(q, k, v, mask):  # [n_q, d_k], [n_k, d_k], [n_k, d_v], [n_q, n_k] -> [n_q, d_v]
    return softmax(q @ k.T / math.sqrt(q.shape[-1]) + mask) @ v


def mha(x, c_attn, c_proj, n_head):  # [n_seq, n_embd] -> [n_seq, n_embd]
    # one product for q, k and v
    x = linear(x, **c_attn)  # [n_seq, n_embd] -> [n_seq, 3*n_embd]

    # split into qkv
    qkv = np.split(x, 3, axis=-1)  # [n_seq, 3*n_embd] -> [3, n_seq, n_embd]

    # split into heads
    qkv_heads = [np.split(x, n_head, axis=-1) for x in qkv]  # -> [3, n_head, n_seq, n_embd/n_head]

    # what lies ahead is hidden
    causal_mask = (1 - np.tri(x.shape[0], dtype=x.dtype)) * -1e10  # [n_seq, n_seq]

    # each head for itself
    out_heads = [attention(q, k, v, causal_mask) for q, k, v in zip(*qkv_heads, strict=True)]

    # merge heads
    x = np.hstack(out_heads)  # [n_head, n_seq, n_embd/n_head] -> [n_seq, n_embd]

    # out projection
    x = linear(x, **c_proj)  # [n_seq, n_embd] -> [n_seq, n_embd]

    return x


def load_params(weights):
    """A layer of the checkpoint: w of shape [in, out], and b."""
    c_attn_w = np.concatenate([weights["wq"], weights["wk"], weights["wv"]], axis=0)
    c_attn_b = np.concatenate([weights["bq"], weights["bk"], weights["bv"]])
    return {
        "c_attn": {"w": c_attn_w.T, "b": c_attn_b},
        "c_proj": {"w": weights["wo"].T, "b": weights["bo"]},
    }


def make(weights):
    params = load_params(weights)
    n_head = 5

    def attn(x):  # [batch, n_seq, n_embd]
        return np.stack([mha(sequence, **params, n_head=n_head) for sequence in x])

    return attn
