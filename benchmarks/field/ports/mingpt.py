"""Causal self-attention of minGPT, loaded from GPT-2's Conv1D: karpathy/minGPT, mingpt/model.py."""
# ruff: noqa: N806, RET504

import math

import torch
from torch import nn
from torch.nn import functional as F

SETTINGS = {"embed_dim": 60, "num_heads": 5, "causal": True}
TAKES = ()


class CfgNode:
    """Just enough of a configuration."""

    n_embd = 60
    n_head = 5
    block_size = 64
    attn_pdrop = 0.1
    resid_pdrop = 0.1


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        # one layer for the three projections of all heads
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.attn_dropout = nn.Dropout(config.attn_pdrop)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)
        # a token sees itself and those to its left
        seen = torch.tril(torch.ones(config.block_size, config.block_size))
        self.register_buffer("bias", seen.view(1, 1, config.block_size, config.block_size))
        self.n_head = config.n_head
        self.n_embd = config.n_embd

    def forward(self, x):
        B, T, C = x.size()
        hs = C // self.n_head

        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q = q.view(B, T, self.n_head, hs).transpose(1, 2)  # (B, nh, T, hs)
        k = k.view(B, T, self.n_head, hs).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(B, T, self.n_head, hs).transpose(1, 2)  # (B, nh, T, hs)

        # (B, nh, T, hs) x (B, nh, hs, T) -> (B, nh, T, T)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(hs))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v  # (B, nh, T, T) x (B, nh, T, hs) -> (B, nh, T, hs)
        y = y.transpose(1, 2).contiguous().view(B, T, C)

        y = self.resid_dropout(self.c_proj(y))
        return y


def gpt2_checkpoint(weights):
    """The weights as a GPT-2 checkpoint holds them: Conv1D, that is (in, out)."""
    rows = [weights[name] for name in ("wq", "wk", "wv")]
    biases = [weights[name] for name in ("bq", "bk", "bv")]
    return {
        "attn.c_attn.weight": torch.cat(rows, dim=0).t().contiguous(),
        "attn.c_attn.bias": torch.cat(biases),
        "attn.c_proj.weight": weights["wo"].t().contiguous(),
        "attn.c_proj.bias": weights["bo"],
    }


def make(weights):
    torch_dtype = weights["wq"].dtype
    model = CausalSelfAttention(CfgNode()).to(torch_dtype)
    sd = model.state_dict()
    sd_hf = gpt2_checkpoint(weights)

    # Conv1D of the checkpoint is Linear here: these are transposed
    transposed = ["attn.c_attn.weight", "attn.c_proj.weight"]
    with torch.no_grad():
        for name, tensor in sd_hf.items():
            ours = sd[name.removeprefix("attn.")]
            if any(name.endswith(w) for w in transposed):
                assert tensor.shape[::-1] == ours.shape
                ours.copy_(tensor.t())
            else:
                assert tensor.shape == ours.shape
                ours.copy_(tensor)
    model.eval()
    return model
