import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import NemotronConfig
from transformers.models.nemotron.modeling_nemotron import NemotronAttention


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


def config():
    cfg = NemotronConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=1,
                         vocab_size=50, intermediate_size=64, attention_bias=True, max_position_embeddings=64,
                         rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5})
    cfg._attn_implementation = "eager"
    return cfg


def rotate_part(t, cos, sin):
    """t (batch, time, heads, size): the first `width` numbers of each head are turned, the rest pass."""
    width = cos.shape[-1]
    part, rest = t[..., :width], t[..., width:]
    half = width // 2
    first, second = part[..., :half], part[..., half:]
    c = cos[:, :, None, :half]
    s = sin[:, :, None, :half]
    turned = torch.cat([first * c - second * s, first * s + second * c], -1)
    return torch.cat([turned, rest], -1)


class LoopNemotronAttention(NemotronAttention):
    """One query head at a time."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        cos, sin = position_embeddings
        q = rotate_part(self.q_proj(hidden_states).unflatten(-1, (self.num_heads, -1)), cos, sin)
        k = rotate_part(self.k_proj(hidden_states).unflatten(-1, (self.num_key_value_heads, -1)), cos, sin)
        v = self.v_proj(hidden_states).unflatten(-1, (self.num_key_value_heads, -1))
        outs = []
        for h in range(self.num_heads):
            j = h // self.num_key_value_groups
            s = q[:, :, h] @ k[:, :, j].mT / math.sqrt(self.head_dim)
            if attention_mask is not None:
                s = s + attention_mask[:, 0]
            p = torch.exp(s - torch.logsumexp(s, -1, keepdim=True))
            outs.append(p @ v[:, :, j])
        return self.o_proj(torch.cat(outs, dim=-1)), None


def make():
    reference = draw(NemotronAttention(config(), layer_idx=0), 14, std=0.2)
    port = LoopNemotronAttention(config(), layer_idx=0).eval()
    port.load_state_dict(reference.state_dict())
    return port, reference, None
