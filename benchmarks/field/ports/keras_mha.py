"""Keras' attention (keras-team/keras, keras/src/layers/attention/multi_head_attention.py)."""

import torch

SETTINGS = {"embed_dim": 54, "num_heads": 5, "head_dim": 12}
TAKES = ("mask",)


class EinsumDense:
    """A dense layer with an equation: its kernel keeps the axes of heads and of features apart."""

    def __init__(self, equation):
        self.equation = equation
        self.kernel = None
        self.bias = None

    def __call__(self, inputs):
        return torch.einsum(self.equation, inputs, self.kernel) + self.bias


class MultiHeadAttention:
    def __init__(self, num_heads, key_dim):
        self._num_heads = num_heads
        self._key_dim = key_dim
        self._inverse_sqrt_key_dim = 1.0 / float(key_dim) ** 0.5
        # B batch, T queries, S keys, N heads, H features of a head, D features of a token
        self._query_dense = EinsumDense("abc,cde->abde")
        self._key_dense = EinsumDense("abc,cde->abde")
        self._value_dense = EinsumDense("abc,cde->abde")
        self._output_dense = EinsumDense("abcd,cde->abe")
        self._dot_product_equation = "aecd,abcd->acbe"
        self._combine_equation = "acbe,aecd->abcd"

    def set_weights(self, arrays):
        """In the order of get_weights: kernel and bias of query, key, value and output."""
        layers = (self._query_dense, self._key_dense, self._value_dense, self._output_dense)
        for number, layer in enumerate(layers):
            layer.kernel = arrays[2 * number]
            layer.bias = arrays[2 * number + 1]

    def _masked_softmax(self, attention_scores, attention_mask=None):
        if attention_mask is not None:
            for _ in range(attention_scores.ndim - attention_mask.ndim):
                attention_mask = attention_mask.unsqueeze(1)
            adder = (1.0 - attention_mask.to(attention_scores.dtype)) * -1e9
            attention_scores = attention_scores + adder
        return torch.softmax(attention_scores, dim=-1)

    def _compute_attention(self, query, key, value, attention_mask=None):
        query = query * self._inverse_sqrt_key_dim
        attention_scores = torch.einsum(self._dot_product_equation, key, query)
        attention_scores = self._masked_softmax(attention_scores, attention_mask)
        return torch.einsum(self._combine_equation, attention_scores, value)

    def __call__(self, query, value, key=None, attention_mask=None):
        if key is None:
            key = value
        query = self._query_dense(query)
        key = self._key_dense(key)
        value = self._value_dense(value)
        attention_output = self._compute_attention(query, key, value, attention_mask)
        return self._output_dense(attention_output)


def make(weights):
    dim, heads, size = (SETTINGS[name] for name in ("embed_dim", "num_heads", "head_dim"))
    layer = MultiHeadAttention(num_heads=heads, key_dim=size)
    arrays = []
    for role in "qkv":
        arrays.append(weights[f"w{role}"].T.reshape(dim, heads, size))
        arrays.append(weights[f"b{role}"].reshape(heads, size))
    arrays.append(weights["wo"].T.reshape(heads, size, dim))
    arrays.append(weights["bo"])
    layer.set_weights(arrays)

    def port(x, mask=None):
        # Keras takes (batch, queries, keys)
        attention_mask = None if mask is None else mask[:, 0]
        return layer(x, x, attention_mask=attention_mask)

    return port
