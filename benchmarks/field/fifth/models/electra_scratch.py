import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import ElectraConfig, ElectraModel


def draw(net, seed, std=0.25):
    """Weights large enough that no softmax is flat; gains spread about their start; biases drawn."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.dim() == 1 and "norm" in name.lower() and name.endswith("weight"):
                p.add_(0.3 * torch.randn_like(p))
            elif p.dim() == 1:
                p.copy_(0.4 * torch.randn_like(p))
            else:
                p.copy_(std * torch.randn_like(p))
    return net.eval()


C, N, V = 48, 4, 90


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(C, C) for _ in range(4))
        self.drop = nn.Dropout(0.1)

    def heads(self, t):
        b, n, _ = t.size()
        return t.view(b, n, N, C // N).permute(0, 2, 1, 3)

    def forward(self, x, mask):
        q, k, v = self.heads(self.wq(x)), self.heads(self.wk(x)), self.heads(self.wv(x))
        scores = torch.matmul(q, k.permute(0, 1, 3, 2)) / (C // N) ** 0.5
        scores = scores + (1.0 - mask[:, None, None, :].float()) * -10000.0
        probs = self.drop(F.softmax(scores, dim=-1))
        context = torch.matmul(probs, v).permute(0, 2, 1, 3).contiguous()
        context = context.view(x.size(0), x.size(1), C)
        return self.wo(context)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.att, self.ln1, self.ln2 = SelfAttention(), nn.LayerNorm(C, eps=1e-12), nn.LayerNorm(C, eps=1e-12)
        self.ff1, self.ff2 = nn.Linear(C, 96), nn.Linear(96, C)

    def forward(self, x, mask):
        x = self.ln1(x + self.att(x, mask))
        return self.ln2(x + self.ff2(F.gelu(self.ff1(x))))


class Electra(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places, self.kinds = nn.Embedding(V, 32), nn.Embedding(40, 32), nn.Embedding(2, 32)
        self.ln, self.widen = nn.LayerNorm(32, eps=1e-12), nn.Linear(32, C)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])

    def forward(self, input_ids, attention_mask):
        x = self.words(input_ids) + self.places.weight[: input_ids.size(1)] + self.kinds.weight[0]
        x = self.widen(self.ln(x))
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x


NAMES = [("embeddings.word_embeddings", "words"), ("embeddings.position_embeddings", "places"), ("embeddings.token_type_embeddings", "kinds"),
         ("embeddings.LayerNorm", "ln"), ("embeddings_project", "widen"), ("encoder.layer.", "layers."), ("attention.self.query", "att.wq"),
         ("attention.self.key", "att.wk"), ("attention.self.value", "att.wv"), ("attention.output.dense", "att.wo"),
         ("attention.output.LayerNorm", "ln1"), ("intermediate.dense", "ff1"), ("output.dense", "ff2"), ("output.LayerNorm", "ln2")]


def rename(name):
    for old, new in NAMES:
        name = name.replace(old, new)
    return name


def make():
    cfg = ElectraConfig(vocab_size=V, embedding_size=32, hidden_size=C, num_hidden_layers=2, num_attention_heads=N, intermediate_size=96,
                        max_position_embeddings=40, pad_token_id=0)
    cfg._attn_implementation = "eager"
    reference = draw(ElectraModel(cfg), 52)
    port = Electra()
    port.load_state_dict({rename(n): w for n, w in reference.state_dict().items()})
    port.eval()
    torch.manual_seed(2)
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, 9:] = 0
    return port, reference, {"input_ids": torch.randint(3, V, (2, 13)), "attention_mask": mask}
