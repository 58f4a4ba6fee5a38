"""One small module for each head, as in lecture notes: karpathy/ng-video-lecture, gpt.py."""
# ruff: noqa: N806, RET504, RUF059

import torch
from torch import nn
from torch.nn import functional as F

SETTINGS = {"embed_dim": 65, "num_heads": 5, "causal": True, "bias": "o"}
TAKES = ()

# hyperparameters
block_size = 50
n_embd = 65
n_head = 5
dropout = 0.2


class Head(nn.Module):
    """One head of self-attention."""

    def __init__(self, head_size):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        B, T, C = x.shape
        k = self.key(x)  # (B, T, hs)
        q = self.query(x)  # (B, T, hs)
        # affinities of the tokens
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5  # (B, T, hs) @ (B, hs, T) -> (B, T, T)
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))  # (B, T, T)
        wei = F.softmax(wei, dim=-1)  # (B, T, T)
        wei = self.dropout(wei)
        # weighted sum of the values
        v = self.value(x)  # (B, T, hs)
        out = wei @ v  # (B, T, T) @ (B, T, hs) -> (B, T, hs)
        return out


class MultiHeadAttention(nn.Module):
    """Several heads side by side."""

    def __init__(self, num_heads, head_size):
        super().__init__()
        self.heads = nn.ModuleList([Head(head_size) for _ in range(num_heads)])
        self.proj = nn.Linear(head_size * num_heads, n_embd)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        out = torch.cat([h(x) for h in self.heads], dim=-1)
        out = self.dropout(self.proj(out))
        return out


@torch.no_grad()
def make(weights):
    head_size = n_embd // n_head
    sa = MultiHeadAttention(n_head, head_size).to(weights["wq"].dtype)
    for i, head in enumerate(sa.heads):
        rows = slice(i * head_size, (i + 1) * head_size)
        head.query.weight.copy_(weights["wq"][rows])
        head.key.weight.copy_(weights["wk"][rows])
        head.value.weight.copy_(weights["wv"][rows])
    sa.proj.weight.copy_(weights["wo"])
    sa.proj.bias.copy_(weights["bo"])
    sa.eval()
    return sa
