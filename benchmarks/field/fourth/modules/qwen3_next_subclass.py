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

from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, apply_rotary_pos_emb


class Gated(Qwen3NextAttention):
    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        B, T, _ = hidden_states.shape
        d = self.head_dim
        both = self.q_proj(hidden_states).view(B, T, -1, 2 * d)
        q, gate = both[..., :d], both[..., d:]
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(B, T, -1, d)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(B, T, -1, d).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, enable_gqa=True)
        y = y.transpose(1, 2) * torch.sigmoid(gate)
        return self.o_proj(y.flatten(2)), None


def make():
    config = Qwen3NextConfig(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=4,
                             max_position_embeddings=64,
                             rope_parameters={"rope_type": "default", "rope_theta": 200.0, "partial_rotary_factor": 0.25})
    reference = draw(Qwen3NextAttention(config, layer_idx=3), 0.3, 61)
    port = Gated(copy.deepcopy(config), layer_idx=3)
    port.load_state_dict(reference.state_dict())
    return port.eval(), reference, None
