import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import Ernie4_5Config
from transformers.models.ernie4_5.modeling_ernie4_5 import Ernie4_5Attention


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


ROOM = 16


def config():
    cfg = Ernie4_5Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=1, vocab_size=50,
                         intermediate_size=64, use_bias=True, max_position_embeddings=64,
                         rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    cfg._attn_implementation = "eager"
    return cfg


def build(attn):
    w = attn.state_dict()
    D = 16

    def project(x, name):
        y = F.linear(x, w[name + "_proj.weight"], w[name + "_proj.bias"])
        return y

    def rope(t, places):
        angle = places.float()[:, None] * (10000.0 ** (-torch.arange(0, D, 2).float() / D))
        c, s = angle.cos()[:, None], angle.sin()[:, None]
        even, odd = t[..., ::2], t[..., 1::2]
        return torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)

    def attend(x, cache=None):
        B, T, _ = x.shape
        if cache is None:
            cache = (torch.zeros(B, ROOM, 2, D), torch.zeros(B, ROOM, 2, D), 0)
        keys, values, used = cache
        keys, values = keys.clone(), values.clone()
        places = torch.arange(used, used + T)
        q = rope(project(x, "q").view(B, T, 4, D), places)
        slot = places
        keys[:, slot] = rope(project(x, "k").view(B, T, 2, D), places)
        values[:, slot] = project(x, "v").view(B, T, 2, D)
        slots = torch.arange(ROOM)
        allowed = slots[None] <= places[:, None]
        k, v = (t.transpose(1, 2).repeat_interleave(2, 1) for t in (keys, values))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=allowed)
        return project(y.transpose(1, 2).flatten(2), "o"), (keys, values, used + T)

    return attend


def make():
    reference = draw(Ernie4_5Attention(config(), layer_idx=0), 34, std=0.2)
    return build(reference), reference, None
