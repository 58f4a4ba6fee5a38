# ruff: noqa: N803, N806
"""Textbook attention with transpose_qkv and masked_softmax, as in d2l-ai/d2l-en, d2l/torch.py."""

import math

import torch
from torch import nn

SETTINGS = {"embed_dim": 56, "num_heads": 7, "bias": ""}
TAKES = ("mask",)


def masked_softmax(X, valid=None):
    """Softmax over the last axis, in which hidden positions get no weight."""
    if valid is not None:
        X = X.masked_fill(~valid, -1e6)
    return nn.functional.softmax(X, dim=-1)


class DotProductAttention(nn.Module):
    """Scaled dot products of (batch * heads, tokens, d)."""

    def __init__(self, dropout):
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, queries, keys, values, valid=None):
        d = queries.shape[-1]
        scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(d)
        self.attention_weights = masked_softmax(scores, valid)
        return torch.bmm(self.dropout(self.attention_weights), values)


class MultiHeadAttention(nn.Module):
    """All heads at once; the heads are folded into the batch."""

    def __init__(self, num_hiddens, num_heads, dropout, bias=False, dtype=None):
        super().__init__()
        self.num_heads = num_heads
        self.attention = DotProductAttention(dropout)
        self.W_q = nn.LazyLinear(num_hiddens, bias=bias, dtype=dtype)
        self.W_k = nn.LazyLinear(num_hiddens, bias=bias, dtype=dtype)
        self.W_v = nn.LazyLinear(num_hiddens, bias=bias, dtype=dtype)
        self.W_o = nn.LazyLinear(num_hiddens, bias=bias, dtype=dtype)

    def forward(self, queries, keys, values, valid=None):
        queries = self.transpose_qkv(self.W_q(queries))
        keys = self.transpose_qkv(self.W_k(keys))
        values = self.transpose_qkv(self.W_v(values))
        if valid is not None:
            # a copy for each head: item 0 heads times, then item 1, and so on
            valid = torch.repeat_interleave(valid, repeats=self.num_heads, dim=0)
        output = self.attention(queries, keys, values, valid)
        return self.W_o(self.transpose_output(output))

    def transpose_qkv(self, X):
        """From (batch, tokens, num_hiddens) to (batch * heads, tokens, d)."""
        X = X.reshape(X.shape[0], X.shape[1], self.num_heads, -1)
        X = X.permute(0, 2, 1, 3)
        return X.reshape(-1, X.shape[2], X.shape[3])

    def transpose_output(self, X):
        """Undo transpose_qkv."""
        X = X.reshape(-1, self.num_heads, X.shape[1], X.shape[2])
        X = X.permute(0, 2, 1, 3)
        return X.reshape(X.shape[0], X.shape[1], -1)


def make(weights):
    """Load the weights and return self-attention."""
    net = MultiHeadAttention(
        SETTINGS["embed_dim"], SETTINGS["num_heads"], dropout=0.1, dtype=weights["wq"].dtype
    )
    state = {f"W_{role}.weight": weights[f"w{role}"] for role in "qkvo"}
    net.load_state_dict(state)
    net.eval()

    def port(x, mask=None):
        valid = None if mask is None else mask[:, 0]  # (batch, 1, keys)
        return net(x, x, x, valid)

    return port
