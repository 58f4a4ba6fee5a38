import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import SeedOssConfig
from transformers.models.seed_oss.modeling_seed_oss import SeedOssAttention


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
    cfg = SeedOssConfig(hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=8, num_hidden_layers=1, vocab_size=50,
                        intermediate_size=64, attention_bias=True, attention_out_bias=True, max_position_embeddings=64)
    cfg._attn_implementation = "eager"
    return cfg


def turn(t, cos, sin):
    a, b = t.chunk(2, -1)
    return t * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]


class DecodeSeedOss(SeedOssAttention):
    """Two paths: one token at a time without any mask, and chunks with a mask made here."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        B, T, _ = hidden_states.shape
        split = lambda t: t.view(B, T, -1, self.head_dim).transpose(1, 2)
        q, k, v = split(self.q_proj(hidden_states)), split(self.k_proj(hidden_states)), split(self.v_proj(hidden_states))
        q = turn(q, *position_embeddings)
        k = turn(k, *position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        S = k.shape[2]
        if T == 1:
            G = self.num_key_value_groups
            one = q.view(B, -1, G, self.head_dim)
            p = (one @ k.mT * self.scaling).softmax(-1)
            y = (p @ v).reshape(B, 1, -1)
        else:
            k, v = (t.repeat_interleave(self.num_key_value_groups, 1) for t in (k, v))
            seen = torch.ones(T, S, dtype=torch.bool).tril(S - T)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).reshape(B, T, -1)
        return self.o_proj(y), None


def make():
    reference = draw(SeedOssAttention(config(), layer_idx=0), 31)
    port = DecodeSeedOss(config(), layer_idx=0).eval()
    port.load_state_dict(reference.state_dict())
    return port, reference, None
