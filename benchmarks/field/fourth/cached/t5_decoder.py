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

from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5Attention


class Decoder(nn.Module):
    """Self-attention of a T5 decoder with buckets of its own and a growing cache."""

    def __init__(self, dim, heads, d, buckets, far):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, heads * d, bias=False) for _ in range(3))
        self.o, self.table = nn.Linear(heads * d, dim, bias=False), nn.Embedding(buckets, heads)
        self.heads, self.d, self.n, self.far = heads, d, buckets, far

    def forward(self, x, past_key_values=None):
        B, T, _ = x.shape
        q, k, v = (p(x).view(B, T, self.heads, self.d) for p in (self.q, self.k, self.v))
        if past_key_values is not None:
            k, v = (torch.cat([a, b], 1) for a, b in zip(past_key_values, (k, v)))
        S = k.shape[1]
        back = torch.arange(S - T, S)[:, None] - torch.arange(S)[None]
        half = self.n // 2
        ago = back.clamp(min=0)
        logs = half + (torch.log(ago.clamp(min=1) / half) / math.log(self.far / half) * half).long()
        bias = self.table(torch.where(ago < half, ago, logs.clamp(max=self.n - 1))).permute(2, 0, 1)
        bias = bias.masked_fill(back < 0, float("-inf"))
        w = (torch.einsum("bthd,bshd->bhts", q, k) + bias).softmax(-1)
        return self.o(torch.einsum("bhts,bshd->bthd", w, v).flatten(2)), (k, v)


def make():
    config = T5Config(d_model=40, d_kv=10, num_heads=4, relative_attention_num_buckets=8, relative_attention_max_distance=16,
                      is_decoder=True, num_layers=1)
    config._attn_implementation = "eager"
    reference = draw(T5Attention(config, has_relative_attention_bias=True, layer_idx=0, is_causal=True), 0.25, 431)
    with torch.no_grad():
        reference.relative_attention_bias.weight.normal_(0, 1.5)
    port = Decoder(40, 4, 10, 8, 16)
    sd = reference.state_dict()
    port.load_state_dict({k.replace("relative_attention_bias", "table"): v for k, v in sd.items()})
    return port.eval(), reference, None
