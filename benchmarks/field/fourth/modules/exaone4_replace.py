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

from transformers.models.exaone4.configuration_exaone4 import Exaone4Config
from transformers.models.exaone4.modeling_exaone4 import Exaone4Attention, Exaone4ForCausalLM, apply_rotary_pos_emb


class LocalGlobalAttention(Exaone4Attention):
    """Builds its own mask; rotates in the local layers only."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        B, T, _ = hidden_states.shape
        split = lambda t: t.view(B, T, -1, self.head_dim).transpose(1, 2)
        q, k, v = split(self.q_proj(hidden_states)), split(self.k_proj(hidden_states)), split(self.v_proj(hidden_states))
        q, k = self.q_norm(q), self.k_norm(k)
        rotate = self.is_sliding
        if rotate:
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        back = torch.arange(T)[:, None] - torch.arange(T)[None]
        seen = back >= 0
        if self.is_sliding:
            seen = seen & (back < self.sliding_window)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True, scale=self.scaling)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1)), None


def make():
    config = Exaone4Config(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=12, intermediate_size=64,
                           num_hidden_layers=3, vocab_size=70, max_position_embeddings=64, sliding_window=6,
                           sliding_window_pattern=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                           rope_parameters={"rope_type": "default", "rope_theta": 100.0},
                           bos_token_id=None, eos_token_id=None, pad_token_id=None, attn_implementation="eager")
    reference = draw(Exaone4ForCausalLM(config), 0.25, 71)
    port = copy.deepcopy(reference)
    for i, layer in enumerate(port.model.layers):
        mine = LocalGlobalAttention(config, i)
        mine.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = mine
    torch.manual_seed(8)
    return port.eval(), reference, torch.randint(0, 70, (2, 15))
