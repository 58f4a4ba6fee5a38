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

from transformers.models.hunyuan_v1_dense.configuration_hunyuan_v1_dense import HunYuanDenseV1Config
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1Attention, apply_rotary_pos_emb


class Rewritten(HunYuanDenseV1Attention):
    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        B, T, _ = hidden_states.shape
        q, k, v = (p(hidden_states).view(B, T, -1, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        q, k = self.query_layernorm(q), self.key_layernorm(k)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2)), None


def make():
    config = HunYuanDenseV1Config(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                                  attention_bias=True, max_position_embeddings=64,
                                  rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    reference = draw(HunYuanDenseV1Attention(config, layer_idx=0), 0.25, 131)
    with torch.no_grad():
        reference.query_layernorm.weight.add_(torch.randn(16) * 0.6)
        reference.key_layernorm.weight.add_(torch.randn(16) * 0.6)
    port = Rewritten(copy.deepcopy(config), layer_idx=0)
    port.load_state_dict(reference.state_dict())
    return port.eval(), reference, None
