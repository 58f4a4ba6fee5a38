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

from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention


class TupleCache(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads

    def forward(self, x, cache=None):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            old_k, old_v = cache
            k, v = torch.cat([old_k, k], dim=2), torch.cat([old_v, v], dim=2)
        cache = (k, v)
        S = k.shape[2]
        far = torch.arange(S)[None] > torch.arange(S - T, S)[:, None]
        w = (q @ k.mT / math.sqrt(C // self.heads)).masked_fill(far, float("-inf")).softmax(-1)
        return self.proj((w @ v).transpose(1, 2).reshape(B, T, C)), cache


def make():
    config = GPT2Config(n_embd=48, n_head=4, n_layer=1, n_positions=64)
    config._attn_implementation = "eager"
    reference = draw(GPT2Attention(config, layer_idx=0), 0.25, 421)
    port = TupleCache(48, 4)
    with torch.no_grad():
        port.qkv.weight.copy_(reference.c_attn.weight.T)
        port.qkv.bias.copy_(reference.c_attn.bias)
        port.proj.weight.copy_(reference.c_proj.weight.T)
        port.proj.bias.copy_(reference.c_proj.bias)
    return port.eval(), reference, None
