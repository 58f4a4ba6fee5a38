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
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb


class Cached(LlamaAttention):
    """Does not look at the mask handed in: counts the positions in the cache and makes its own."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        B, T, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(B, T, -1, self.head_dim).transpose(1, 2)
        k = self.k_proj(hidden_states).view(B, T, -1, self.head_dim).transpose(1, 2)
        v = self.v_proj(hidden_states).view(B, T, -1, self.head_dim).transpose(1, 2)
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        past = 0
        if past_key_values is not None:
            past = past_key_values.get_seq_length(self.layer_idx)
            k, v = past_key_values.update(k, v, self.layer_idx)
        seen = torch.ones(T, past + T, dtype=torch.bool).tril(past)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2)), None


def make():
    config = LlamaConfig(hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=12, attention_bias=True,
                         max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    reference = draw(LlamaAttention(config, layer_idx=0), 0.25, 401)
    port = Cached(copy.deepcopy(config), layer_idx=0)
    port.load_state_dict(reference.state_dict())
    return port.eval(), reference, None
