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

from transformers.models.olmo3.configuration_olmo3 import Olmo3Config
from transformers.models.olmo3.modeling_olmo3 import Olmo3Attention


class PerHead(nn.Module):
    """The root mean square of each head by itself, with the gains of the norm over the whole width."""

    def __init__(self, norm, d):
        super().__init__()
        self.norm, self.d = norm, d

    def forward(self, x):
        h = x.unflatten(-1, (-1, self.d))
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.norm.variance_epsilon)
        return h.flatten(-2) * self.norm.weight


def table(theta, n, d=12):
    angle = torch.arange(n)[:, None] * theta ** (-torch.arange(0, d, 2) / d)
    angle = torch.cat([angle, angle], -1)[None]
    return angle.cos(), angle.sin()


def around(module):
    """Keeps the old forward; a place to change what goes in and what comes out."""
    old = module.forward

    def forward(hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        cos, sin = position_embeddings
        out, weights = old(hidden_states, (cos, sin), attention_mask, past_key_values, **kwargs)
        return out, weights

    module.forward = forward
    return module


def make():
    config = Olmo3Config(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4,
                         max_position_embeddings=64, sliding_window=64,
                         layer_types=["full_attention"] * 4,
                         rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 100.0},
                                          "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}})
    reference = draw(Olmo3Attention(config, layer_idx=3), 0.3, 141)
    with torch.no_grad():
        reference.q_proj.weight[:12] *= 3.0
        reference.k_proj.weight[12:] *= 3.0
    port = around(copy.deepcopy(reference))
    # changes to the parts
    return port, reference, None
