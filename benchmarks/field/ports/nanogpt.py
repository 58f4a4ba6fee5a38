"""Causal self-attention of nanoGPT on torch's fused kernel: karpathy/nanoGPT, model.py."""
# ruff: noqa: N806

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

SETTINGS = {"embed_dim": 56, "num_heads": 7, "causal": True, "bias": ""}
TAKES = ()


@dataclass
class GPTConfig:
    block_size: int = 48
    n_head: int = 7
    n_embd: int = 56
    dropout: float = 0.1
    bias: bool = False  # no bias in the linear layers: a little faster


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.n_embd = config.n_embd
        self.dropout = config.dropout

    def forward(self, x):
        B, T, C = x.size()

        qkv = self.c_attn(x)
        q, k, v = qkv.split(self.n_embd, dim=2)
        q, k, v = (self.heads(t, B, T) for t in (q, k, v))

        # flash attention, the kernel masks and scales
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        y = y.transpose(1, 2).contiguous().view(B, T, C)

        return self.resid_dropout(self.c_proj(y))

    def heads(self, t, B, T):  # noqa: N803
        return t.view(B, T, self.n_head, self.n_embd // self.n_head).transpose(1, 2)


def make(weights):
    config = GPTConfig()
    attn = CausalSelfAttention(config).to(weights["wq"].dtype)
    state = {
        "c_attn.weight": torch.cat([weights["wq"], weights["wk"], weights["wv"]]),
        "c_proj.weight": weights["wo"],
    }
    attn.load_state_dict(state)
    attn.eval()
    return attn
