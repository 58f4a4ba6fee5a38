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

from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention


def turn(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


class PlainAttention(LlamaAttention):
    """LlamaAttention written out, without the dispatch table."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        B, T, C = hidden_states.shape
        heads, groups, d = self.config.num_attention_heads, self.config.num_key_value_heads, self.head_dim
        q = self.q_proj(hidden_states).view(B, T, heads, d).transpose(1, 2)
        k = self.k_proj(hidden_states).view(B, T, groups, d).transpose(1, 2)
        v = self.v_proj(hidden_states).view(B, T, groups, d).transpose(1, 2)
        cos, sin = (t[:, None] for t in position_embeddings)
        q = q * cos + turn(q) * sin
        k = k * cos + turn(k) * sin
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        k = k.repeat_interleave(heads // groups, dim=1)
        v = v.repeat_interleave(heads // groups, dim=1)
        scores = (q @ k.mT) / math.sqrt(d)
        if attention_mask is not None:
            scores = scores + attention_mask[..., : k.shape[2]]
        weights = scores.softmax(dim=-1)
        y = (weights @ v).transpose(1, 2).reshape(B, T, heads * d)
        return self.o_proj(y), weights


def make():
    config = LlamaConfig(hidden_size=48, num_attention_heads=6, num_key_value_heads=3, attention_bias=True,
                         max_position_embeddings=64)
    reference = draw(LlamaAttention(config, layer_idx=0), 0.3, 11)
    port = PlainAttention(copy.deepcopy(config), layer_idx=0)
    port.load_state_dict(reference.state_dict())
    return port.eval(), reference, None
