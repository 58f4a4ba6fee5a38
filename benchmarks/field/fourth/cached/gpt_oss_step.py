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

from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, apply_rotary_pos_emb


class WithSinks(GptOssAttention):
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        B, T, _ = hidden_states.shape
        q, k, v = (p(hidden_states).view(B, T, -1, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        n = self.num_key_value_groups
        s = q @ k.repeat_interleave(n, 1).mT * self.scaling
        if attention_mask is not None:
            s = s + attention_mask
        z = s.logsumexp(-1, keepdim=True)
        share = torch.sigmoid(z - self.sinks.view(1, -1, 1, 1))
        y = s.softmax(-1) * share @ v.repeat_interleave(n, 1)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1)), None


def make():
    config = GptOssConfig(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=12, num_hidden_layers=2,
                          sliding_window=64, max_position_embeddings=64,
                          layer_types=["full_attention", "full_attention"],
                          rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    config._attn_implementation = "eager"
    reference = draw(GptOssAttention(config, layer_idx=0), 0.25, 441)
    port = WithSinks(copy.deepcopy(config), layer_idx=0)
    port.load_state_dict(reference.state_dict())
    return port.eval(), reference, None
