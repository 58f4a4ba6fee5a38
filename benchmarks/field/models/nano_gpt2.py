"""GPT-2 as in nanoGPT, with weights of transformers: karpathy/nanoGPT, model.py.

`GPT.forward(input_ids)` takes token ids of (batch, tokens) and returns logits.
"""
# ruff: noqa: N806, RET504

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

PEER = (
    "GPT2LMHeadModel",
    {
        "vocab_size": 71,
        "n_positions": 40,
        "n_embd": 54,
        "n_layer": 4,
        "n_head": 6,
        "initializer_range": 0.2,
        "bos_token_id": 70,
        "eos_token_id": 70,
    },
)


@dataclass
class GPTConfig:
    block_size: int = 40
    vocab_size: int = 71
    n_layer: int = 4
    n_head: int = 6
    n_embd: int = 54
    dropout: float = 0.0
    bias: bool = True


class LayerNorm(nn.Module):
    """A layer norm whose bias can be left out."""

    def __init__(self, ndim, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input):  # noqa: A002
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        # q, k and v of all heads in one matrix
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.n_embd = config.n_embd
        mask = torch.tril(torch.ones(config.block_size, config.block_size))
        self.register_buffer("bias", mask.view(1, 1, config.block_size, config.block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)

        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = self.c_fc(x)
        x = self.gelu(x)
        x = self.c_proj(x)
        return self.dropout(x)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                "ln_f": LayerNorm(config.n_embd, bias=config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # tied
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, input_ids):
        _, t = input_ids.size()
        pos = torch.arange(0, t, dtype=torch.long, device=input_ids.device)

        tok_emb = self.transformer.wte(input_ids)
        pos_emb = self.transformer.wpe(pos)
        x = self.transformer.drop(tok_emb + pos_emb)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        return self.lm_head(x)


def make(peer):
    model = GPT(GPTConfig()).to(peer.dtype)
    sd = model.state_dict()
    sd_hf = peer.state_dict()
    keys = [k for k in sd if not k.endswith(".attn.bias")]  # that one is the mask
    # the checkpoint has Conv1D modules, and we want a plain Linear
    transposed = ["attn.c_attn.weight", "attn.c_proj.weight"]
    transposed += ["mlp.c_fc.weight", "mlp.c_proj.weight"]
    for k in keys:
        w = sd_hf[k]
        if k.endswith(tuple(transposed)):
            w = w.t()
        assert w.shape == sd[k].shape, k
        with torch.no_grad():
            sd[k].copy_(w)
    return model


def inputs(generator):
    return {"input_ids": torch.randint(0, 71, (2, 19), generator=generator)}
