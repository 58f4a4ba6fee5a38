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

import types

from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM, apply_rotary_pos_emb


def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
    B, T, _ = hidden_states.shape
    q = self.q_proj(hidden_states).view(B, T, -1, self.head_dim)
    k = self.k_proj(hidden_states).view(B, T, -1, self.head_dim)
    v = self.v_proj(hidden_states).view(B, T, -1, self.head_dim).transpose(1, 2)
    q, k = self.q_norm(q), self.k_norm(k)
    cos, sin = position_embeddings
    q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    past = k.shape[2] - T
    allowed = torch.ones(T, past + T, dtype=torch.bool).tril(past)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
    y = y.transpose(1, 2).flatten(2)
    return self.o_proj(y), None


def make():
    config = Qwen3Config(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=64,
                         num_hidden_layers=2, vocab_size=90, max_position_embeddings=64, attention_bias=True,
                         rope_parameters={"rope_type": "default", "rope_theta": 1000.0}, bos_token_id=None, eos_token_id=None,
                         pad_token_id=None)
    config._attn_implementation = "eager"
    reference = draw(Qwen3ForCausalLM(config), 0.25, 21)
    port = copy.deepcopy(reference)
    for i, layer in enumerate(port.model.layers):
        layer.self_attn.forward = types.MethodType(forward, layer.self_attn)
        # patched
    torch.manual_seed(5)
    return port, reference, torch.randint(0, 90, (2, 13))
