import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention


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
    cfg = Qwen3NextConfig(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=1,
                          vocab_size=50, intermediate_size=64, layer_types=["full_attention"], max_position_embeddings=64,
                          rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5})
    cfg._attn_implementation = "sdpa"
    return cfg


def gained(norm, t):
    scale = t.square().mean(-1, keepdim=True).add(norm.eps).rsqrt()
    return t * scale * (1 + norm.weight)


def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
    B, T, _ = hidden_states.shape
    D = self.head_dim
    both = self.q_proj(hidden_states).view(B, T, -1, 2, D)
    q, gate = both[..., 0, :], both[..., 1, :]
    k = self.k_proj(hidden_states).view(B, T, -1, D)
    v = self.v_proj(hidden_states).view(B, T, -1, D)
    q, k = gained(self.q_norm, q), gained(self.k_norm, k)
    cos, sin = (t.unsqueeze(2) for t in position_embeddings)
    R = cos.shape[-1]

    def turn(t):
        a, b, rest = t[..., : R // 2], t[..., R // 2 : R], t[..., R:]
        c, s = cos[..., : R // 2], sin[..., : R // 2]
        return torch.cat([a * c - b * s, b * c + a * s, rest], -1)

    q, k = turn(q), turn(k)
    y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=attention_mask,
                                       is_causal=attention_mask is None and T > 1, enable_gqa=True)
    y = y.transpose(1, 2) * gate.sigmoid()
    return self.o_proj(y.flatten(2)), None


def make():
    reference = draw(Qwen3NextAttention(config(), layer_idx=0), 23)
    port = copy.deepcopy(reference)
    port.forward = types.MethodType(forward, port)
    return port, reference, None
