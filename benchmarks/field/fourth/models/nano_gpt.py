import copy
import math

import torch
import torch.nn.functional as F
from torch import nn


def draw(module, std, seed):
    """Weights wide enough that the softmax is not flat; biases and gains drawn too."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.endswith("sinks"):
                p.normal_(0.5, 1.0)
            elif p.dim() < 2 or "norm" in name:
                p.add_(torch.randn_like(p) * 0.3)
            else:
                p.normal_(0, std)
    return module.eval()

from dataclasses import dataclass

from transformers import GPT2Config, GPT2LMHeadModel


@dataclass
class Conf:
    block: int = 32
    vocab: int = 90
    layers: int = 2
    heads: int = 4
    width: int = 48


class SelfAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_attn = nn.Linear(c.width, 3 * c.width)
        self.c_proj = nn.Linear(c.width, c.width)
        self.heads = c.heads
        self.register_buffer("tri", torch.tril(torch.ones(c.block, c.block)), persistent=False)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.tri[:T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(c.width), SelfAttention(c), nn.LayerNorm(c.width)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(c.width, 4 * c.width), "c_proj": nn.Linear(4 * c.width, c.width)})

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab, c.width), nn.Embedding(c.block, c.width)
        self.h = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.ln_f = nn.LayerNorm(c.width)
        self.lm_head = nn.Linear(c.width, c.vocab, bias=False)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))

    @classmethod
    def from_pretrained(cls, other, c):
        mine = cls(c)
        sd = {k.removeprefix("transformer."): v for k, v in other.state_dict().items()}
        for k, p in mine.state_dict().items():
            t = sd[k]
            if k.endswith("weight") and ("attn.c_" in k or "mlp." in k):
                t = t.t()
            p.copy_(t)
        return mine


def make():
    c = Conf()
    reference = draw(GPT2LMHeadModel(GPT2Config(n_embd=c.width, n_head=c.heads, n_layer=c.layers, vocab_size=c.vocab,
                                                n_positions=c.block, bos_token_id=None, eos_token_id=None)), 0.25, 201)
    port = GPT.from_pretrained(reference, c).eval()
    return port, reference, torch.randint(0, c.vocab, (2, 13))
