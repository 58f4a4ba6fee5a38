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

from transformers import BertConfig, BertModel


class Head(nn.Module):
    """One head with its own three small matrices."""

    def __init__(self, dim, d):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(dim, d), nn.Linear(dim, d), nn.Linear(dim, d)

    def forward(self, x, valid=None):
        q, k, v = self.q(x), self.k(x), self.v(x)
        score = torch.bmm(q, k.transpose(1, 2)) / q.size(-1) ** 0.5
        if valid is not None:
            score = score.masked_fill(valid[:, None, :] == 0, float("-inf"))
        return torch.bmm(score.softmax(dim=-1), v)


class Encoder(nn.Module):
    def __init__(self, dim, n, ff, eps):
        super().__init__()
        self.heads = nn.ModuleList(Head(dim, dim // n) for _ in range(n))
        self.out, self.up, self.down = nn.Linear(dim, dim), nn.Linear(dim, ff), nn.Linear(ff, dim)
        self.n1, self.n2 = nn.LayerNorm(dim, eps), nn.LayerNorm(dim, eps)

    def forward(self, x, valid):
        y = torch.cat([h(x, valid) for h in self.heads], dim=-1)
        x = self.n1(x + self.out(y))
        return self.n2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    def __init__(self, vocab, dim, n, ff, layers, positions, eps=1e-12):
        super().__init__()
        self.tok, self.pos, self.seg = nn.Embedding(vocab, dim), nn.Embedding(positions, dim), nn.Embedding(2, dim)
        self.norm = nn.LayerNorm(dim, eps)
        self.layers = nn.ModuleList(Encoder(dim, n, ff, eps) for _ in range(layers))

    def forward(self, input_ids, attention_mask=None):
        x = self.tok(input_ids) + self.pos.weight[: input_ids.shape[1]] + self.seg.weight[0]
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x


def load(mine, bert):
    def put(a, b):
        a.weight.data.copy_(b.weight)
        if getattr(a, "bias", None) is not None:
            a.bias.data.copy_(b.bias)

    e = bert.embeddings
    for a, b in ((mine.tok, e.word_embeddings), (mine.pos, e.position_embeddings), (mine.seg, e.token_type_embeddings), (mine.norm, e.LayerNorm)):
        put(a, b)
    for a, b in zip(mine.layers, bert.encoder.layer):
        s = b.attention.self
        for name, whole in (("q", s.query), ("k", s.key), ("v", s.value)):
            n = len(a.heads)
            for j, h in enumerate(a.heads):
                part = getattr(h, name)
                part.weight.data.copy_(whole.weight.chunk(n)[j])
                part.bias.data.copy_(whole.bias.chunk(n)[j])
        for x, y in ((a.out, b.attention.output.dense), (a.n1, b.attention.output.LayerNorm), (a.up, b.intermediate.dense),
                     (a.down, b.output.dense), (a.n2, b.output.LayerNorm)):
            put(x, y)
    return mine


def make():
    cfg = BertConfig(hidden_size=48, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64, vocab_size=80,
                     max_position_embeddings=32)
    reference = draw(BertModel(cfg, add_pooling_layer=False), 0.25, 231)
    port = load(Bert(80, 48, 4, 64, 2, 32), reference).eval()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 9:] = 0
    return port, reference, {"input_ids": torch.randint(0, 80, (2, 12)), "attention_mask": mask}
