"""AlphaFold's gated attention, from JAX to NumPy (google-deepmind/alphafold, alphafold/model/modules.py)."""  # noqa: E501

import numpy as np

SETTINGS = {
    "embed_dim": 52,
    "num_heads": 6,
    "head_dim": 10,
    "bias": "o",
    "output_gate": "channel",
}
TAKES = ("mask",)
NUMPY = True


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def softmax(x, axis=-1):
    unnormalized = np.exp(x - x.max(axis=axis, keepdims=True))
    return unnormalized / unnormalized.sum(axis=axis, keepdims=True)


class Attention:
    """Multihead attention with a gate on each channel of each head."""

    def __init__(self, params, key_dim):
        self.params = params
        self.key_dim = key_dim

    def __call__(self, q_data, m_data, bias=None):
        """q_data asks m_data; bias is added to the logits: (batch, heads, queries, keys)."""
        p = self.params
        q = np.einsum("bqa,ahc->bqhc", q_data, p["query_w"]) * self.key_dim ** (-0.5)
        k = np.einsum("bka,ahc->bkhc", m_data, p["key_w"])
        v = np.einsum("bka,ahc->bkhc", m_data, p["value_w"])

        logits = np.einsum("bqhc,bkhc->bhqk", q, k)
        if bias is not None:
            logits = logits + bias
        weights = softmax(logits)
        weighted_avg = np.einsum("bhqk,bkhc->bqhc", weights, v)

        gate_values = np.einsum("bqc,chv->bqhv", q_data, p["gating_w"])
        gate_values = sigmoid(gate_values)
        weighted_avg = weighted_avg * gate_values

        output = np.einsum("bqhc,hco->bqo", weighted_avg, p["output_w"])
        return output + p["output_b"]


def mask_to_bias(mask):
    """1 for a residue that is there, 0 for padding."""
    return 1e9 * (mask - 1.0)


def make(weights):
    dim, heads, size = (SETTINGS[name] for name in ("embed_dim", "num_heads", "head_dim"))

    def kernel(matrix):
        # (heads * channels, inputs) -> (inputs, heads, channels)
        return np.transpose(matrix.reshape(heads, size, dim), (2, 0, 1))

    params = {
        "query_w": kernel(weights["wq"]),
        "key_w": kernel(weights["wk"]),
        "value_w": kernel(weights["wv"]),
        "gating_w": kernel(weights["w_gate"]),
        "output_w": weights["wo"].reshape(dim, heads, size).transpose(1, 2, 0),
        "output_b": weights["bo"],
    }
    attention = Attention(params, size)

    def port(x, mask=None):
        bias = None if mask is None else mask_to_bias(mask.astype(x.dtype))
        return attention(x, x, bias)

    return port
