import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import MinistralConfig
from transformers.models.ministral.modeling_ministral import MinistralAttention


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
    cfg = MinistralConfig(hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=8, num_hidden_layers=1,
                          vocab_size=50, intermediate_size=64, sliding_window=None, layer_types=["full_attention"])
    cfg._attn_implementation = "eager"
    return cfg


def turn(t, cos, sin):
    lo, hi = t.chunk(2, dim=-1)
    return t * cos + torch.cat([-hi, lo], dim=-1) * sin


class GroupedMinistralAttention(MinistralAttention):
    """Never repeats keys: query heads are laid out as (key head, member of its group)."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        B, T, _ = hidden_states.shape
        J, G, D = self.config.num_key_value_heads, self.num_key_value_groups, self.head_dim
        q = self.q_proj(hidden_states).view(B, T, J, G, D)
        k = self.k_proj(hidden_states).view(B, T, J, D)
        v = self.v_proj(hidden_states).view(B, T, J, D)
        cos, sin = position_embeddings
        q = turn(q, cos[:, :, None, None], sin[:, :, None, None])
        k = turn(k, cos[:, :, None], sin[:, :, None])
        scores = torch.einsum("bqjgd,bkjd->bjgqk", q, k) * self.scaling
        if attention_mask is not None:
            scores = scores + attention_mask[:, :, None]
        weights = scores.softmax(dim=-1)
        mixed = torch.einsum("bjgqk,bkjd->bqjgd", weights, v)
        return self.o_proj(mixed.reshape(B, T, J * G * D)), None


def make():
    reference = draw(MinistralAttention(config(), layer_idx=0), 11)
    port = GroupedMinistralAttention(config(), layer_idx=0).eval()
    port.load_state_dict(reference.state_dict())
    return port, reference, None
