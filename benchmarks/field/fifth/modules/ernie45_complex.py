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


def config():
    cfg = Ernie4_5Config(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=1,
                         vocab_size=50, intermediate_size=64, use_bias=True, max_position_embeddings=64)
    cfg._attn_implementation = "eager"
    return cfg


def as_complex(t):
    return torch.view_as_complex(t.float().unflatten(-1, (-1, 2)).contiguous())


class ComplexErnieAttention(Ernie4_5Attention):
    """Rotation as a product of complex numbers; pairs are neighbours."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        B, T, _ = hidden_states.shape
        cos, sin = position_embeddings
        phase = torch.complex(cos, sin)[:, :, None, : self.head_dim // 2]
        q = self.q_proj(hidden_states).view(B, T, -1, self.head_dim)
        k = self.k_proj(hidden_states).view(B, T, -1, self.head_dim)
        v = self.v_proj(hidden_states).view(B, T, -1, self.head_dim)
        q = torch.view_as_real(as_complex(q) * phase).flatten(-2)
        k = torch.view_as_real(as_complex(k) * phase).flatten(-2)
        k, v = (t.repeat_interleave(self.num_key_value_groups, dim=2) for t in (k, v))
        s = torch.einsum("bqhd,bkhd->bhqk", q * self.scaling, k)
        if attention_mask is not None:
            s = s + attention_mask
        y = torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)
        return self.o_proj(y.flatten(2)), None


def make():
    reference = draw(Ernie4_5Attention(config(), layer_idx=0), 16)
    port = ComplexErnieAttention(config(), layer_idx=0).eval()
    port.load_state_dict(reference.state_dict())
    return port, reference, None
