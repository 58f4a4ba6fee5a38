"""MultiHeadedAttention with four cloned linears: harvardnlp/annotated-transformer, the_annotated_transformer.py."""
# ruff: noqa: E501

import copy
import math

import torch
from torch import nn

SETTINGS = {"embed_dim": 72, "num_heads": 6}
TAKES = ("mask",)


def clones(module, N):  # noqa: N803
    "Produce N identical layers."
    return nn.ModuleList([copy.deepcopy(module) for _ in range(N)])


def attention(query, key, value, mask=None, dropout=None):
    "Scaled dot product attention, and its weights."
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model, dropout=0.1):
        "Take the number of heads and the width of the model."
        super().__init__()
        assert d_model % h == 0
        # keys and values have one width
        self.d_k = d_model // h
        self.h = h
        self.linears = clones(nn.Linear(d_model, d_model), 4)
        self.attn = None
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            # the same mask for all heads
            mask = mask.unsqueeze(1)
        nbatches = query.size(0)

        # 1) all projections at once, d_model => h x d_k
        query, key, value = [
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value), strict=False)
        ]

        # 2) attention of all heads at once
        x, self.attn = attention(query, key, value, mask=mask, dropout=self.dropout)

        # 3) heads side by side again, and a last linear
        x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
        return self.linears[-1](x)


class SelfAttention(nn.Module):
    "The sublayer of an encoder: three times the same x."

    def __init__(self, self_attn):
        super().__init__()
        self.self_attn = self_attn

    def forward(self, x, mask=None):
        src_mask = None if mask is None else mask.squeeze(1)
        return self.self_attn(x, x, x, src_mask)


def load(mha, weights):
    roles = ("q", "k", "v", "o")
    with torch.no_grad():
        for lin, role in zip(mha.linears, roles, strict=True):
            lin.weight.copy_(weights["w" + role])
            lin.bias.copy_(weights["b" + role])


def make(weights):
    mha = MultiHeadedAttention(6, 72).to(weights["wq"].dtype)
    load(mha, weights)
    return SelfAttention(mha).eval()
