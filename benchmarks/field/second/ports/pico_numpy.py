"""GPT-2 in a few lines of NumPy (jaymody/picoGPT, gpt2.py)."""

import numpy as np

NUMPY = True
SETTINGS = {"embed_dim": 44, "num_heads": 4, "causal": True}
TAKES = ()


def softmax(x):
    exp_x = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return exp_x / np.sum(exp_x, axis=-1, keepdims=True)


def linear(x, w, b):  # [m, in], [in, out], [out] -> [m, out]
    return x @ w + b


def attention(q, k, v, mask):  # [n_q, d_k], [n_k, d_k], [n_k, d_v], [n_q, n_k] -> [n_q, d_v]
    return softmax(q @ k.T / q.shape[-1] ** 0.5 + mask) @ v


def mha(x, c_attn, c_proj, n_head):  # [n_seq, n_embd] -> [n_seq, n_embd]
    # one projection for q, k and v
    x = linear(x, **c_attn)  # [n_seq, n_embd] -> [n_seq, 3 * n_embd]

    # split into q, k, v
    qkv = np.split(x, 3, axis=-1)

    # split into heads
    qkv_heads = [np.split(part, n_head, axis=-1) for part in qkv]

    # hide what comes later
    n_seq = x.shape[0]
    causal_mask = (1 - np.tri(n_seq, dtype=x.dtype)) * -1e10

    # attention of each head
    q_heads, k_heads, v_heads = qkv_heads
    out_heads = []
    for i in range(n_head):
        q, k, v = q_heads[i], k_heads[i], v_heads[i]
        out_heads.append(attention(q, k, v, causal_mask))

    # merge heads
    x = np.concatenate(out_heads, axis=-1)

    # out projection
    return linear(x, **c_proj)


def load_params(weights):
    """Collect parameters in the shapes of the checkpoint of TensorFlow."""
    c_attn_w = [weights["wq"].T, weights["wk"].T, weights["wv"].T]
    c_attn_b = [weights["bq"], weights["bk"], weights["bv"]]
    return {
        "c_attn": {"w": np.concatenate(c_attn_w, axis=1), "b": np.concatenate(c_attn_b)},
        "c_proj": {"w": weights["wo"].T.copy(), "b": weights["bo"].copy()},
    }


def make(weights):
    params = load_params(weights)
    n_head = SETTINGS["num_heads"]

    def port(x):
        return np.stack([mha(row, n_head=n_head, **params) for row in x])

    return port
