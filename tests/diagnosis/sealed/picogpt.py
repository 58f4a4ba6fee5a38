"""Attention of picoGPT, with a causal mask in NumPy."""

import numpy as np

from headwise import Attention
from tests.diagnosis.sealed.weights import draw_weights


def softmax(x):
    exp_x = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return exp_x / np.sum(exp_x, axis=-1, keepdims=True)


def linear(x, w, b):
    # [m, in], [in, out], [out] -> [m, out]
    return x @ w + b


def causal_mask(n_seq):
    # 1 where a position may be attended to
    return np.tril(np.ones((n_seq, n_seq), dtype=bool))


def split_heads(x, n_head):
    n_batch, n_seq, n_embd = x.shape
    return x.reshape(n_batch, n_seq, n_head, n_embd // n_head).transpose(0, 2, 1, 3)


def merge_heads(x):
    n_batch, n_head, n_seq, n_dim = x.shape
    return x.transpose(0, 2, 1, 3).reshape(n_batch, n_seq, n_head * n_dim)


def attention(q, k, v, mask):
    score = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
    score = np.where(mask, score, 1e-9)
    return softmax(score) @ v


def build_mha(params, n_head):
    """Return the attention block as a function of x, [n_batch, n_seq, n_embd]."""
    w_q, b_q = params["query/kernel"], params["query/bias"]
    w_k, b_k = params["key/kernel"], params["key/bias"]
    w_v, b_v = params["value/kernel"], params["value/bias"]
    w_o, b_o = params["out/kernel"], params["out/bias"]

    def mha(x):
        q = split_heads(linear(x, w_q, b_q), n_head)
        k = split_heads(linear(x, w_k, b_k), n_head)
        v = split_heads(linear(x, w_v, b_v), n_head)
        out = attention(q, k, v, causal_mask(x.shape[1]))
        return linear(merge_heads(out), w_o, b_o)

    return mha


def make():
    """Return the port and the layer that it should be."""
    layer = Attention(70, 5, window=(None, 0))
    draw_weights(layer, 23)
    named = {"query": layer.q_proj, "key": layer.k_proj, "value": layer.v_proj}
    params = {}
    for name, linear_ in {**named, "out": layer.out_proj}.items():
        params[f"{name}/kernel"] = linear_.weight.detach().numpy().T.copy()
        params[f"{name}/bias"] = linear_.bias.detach().numpy().copy()
    return build_mha(params, 5), layer
