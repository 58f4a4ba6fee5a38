"""Attention of a large ViT with einsum (google/flax, flax/linen/attention.py), in NumPy."""

import numpy as np

NUMPY = True
SETTINGS = {
    "embed_dim": 48,
    "num_heads": 4,
    "head_dim": 13,
    "qk_norm": {"kind": "layer", "eps": 1e-6, "over": "head"},
}
TAKES = ("mask",)


def dense_general(inputs, params):
    """(batch, length, features) to (batch, length, heads, head_dim)."""
    return np.einsum("bld,dhk->blhk", inputs, params["kernel"]) + params["bias"]


def layer_norm(x, params, epsilon=1e-6):
    mean = np.mean(x, axis=-1, keepdims=True)
    var = np.mean(np.square(x), axis=-1, keepdims=True) - np.square(mean)
    y = (x - mean) / np.sqrt(var + epsilon)
    return y * params["scale"] + params["bias"]


def softmax(x, axis):
    unnormalized = np.exp(x - x.max(axis=axis, keepdims=True))
    return unnormalized / unnormalized.sum(axis=axis, keepdims=True)


def dot_product_attention_weights(query, key, mask=None):
    depth = query.shape[-1]
    query = query / depth**0.5
    attn_weights = np.einsum("...qhd,...khd->...hqk", query, key)
    if mask is not None:
        big_neg = np.finfo(attn_weights.dtype).min
        attn_weights = np.where(mask, attn_weights, big_neg)
    return softmax(attn_weights, axis=-1)


def dot_product_attention(query, key, value, mask=None):
    attn_weights = dot_product_attention_weights(query, key, mask=mask)
    return np.einsum("...hqk,...khd->...qhd", attn_weights, value)


def multi_head_dot_product_attention(params, inputs, mask=None):
    query = dense_general(inputs, params["query"])
    key = dense_general(inputs, params["key"])
    value = dense_general(inputs, params["value"])
    query = layer_norm(query, params["query_ln"])
    key = layer_norm(key, params["key_ln"])
    x = dot_product_attention(query, key, value, mask=mask)
    out = np.einsum("blhk,hkd->bld", x, params["out"]["kernel"])
    return out + params["out"]["bias"]


def to_params(w):
    """Give rank-3 kernels (features, heads, head_dim) and biases (heads, head_dim)."""
    heads, head_dim = SETTINGS["num_heads"], SETTINGS["head_dim"]
    params = {}
    for name, role in (("query", "q"), ("key", "k"), ("value", "v")):
        kernel = w[f"w{role}"].T.reshape(-1, heads, head_dim)
        params[name] = {"kernel": kernel, "bias": w[f"b{role}"].reshape(heads, head_dim)}
    params["query_ln"] = {"scale": w["q_norm"], "bias": w["q_norm_bias"]}
    params["key_ln"] = {"scale": w["k_norm"], "bias": w["k_norm_bias"]}
    params["out"] = {"kernel": w["wo"].T.reshape(heads, head_dim, -1), "bias": w["bo"]}
    return params


def make(weights):
    params = to_params(weights)
    return lambda x, mask=None: multi_head_dot_product_attention(params, x, mask=mask)
