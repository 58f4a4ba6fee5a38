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

from transformers.models.gpt_neox.configuration_gpt_neox import GPTNeoXConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention, apply_rotary_pos_emb


class Attention(GPTNeoXAttention):
    def forward(self, hidden_states, attention_mask=None, layer_past=None, position_embeddings=None, **kwargs):
        B, T, C = hidden_states.shape
        H, d, r = self.config.num_attention_heads, self.head_size, self.rotary_ndims
        q, k, v = self.query_key_value(hidden_states).view(B, T, H, 3, d).unbind(3)
        cos, sin = (t.unsqueeze(2) for t in position_embeddings)

        def rotate(x):
            a, b, rest = x[..., : r // 2], x[..., r // 2 : r], x[..., r:]
            c, s = cos[..., : r // 2], sin[..., : r // 2]
            return torch.cat([a * c - b * s, b * c + a * s, rest], dim=-1)

        q, k, v = rotate(q).transpose(1, 2), rotate(k).transpose(1, 2), v.transpose(1, 2)
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        scores = torch.baddbmm(attention_mask.expand(B, H, -1, -1).flatten(0, 1), q.flatten(0, 1), k.flatten(0, 1).mT,
                               beta=1.0, alpha=self.scaling)
        y = scores.softmax(-1).bmm(v.flatten(0, 1)).view(B, H, T, d)
        return self.dense(y.permute(0, 2, 1, 3).reshape(B, T, C)), None


def make():
    config = GPTNeoXConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=64,
                           rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5})
    reference = draw(GPTNeoXAttention(config, layer_idx=0), 0.25, 111)
    port = Attention(copy.deepcopy(config), layer_idx=0)
    port.load_state_dict(reference.state_dict())
    return port.eval(), reference, None
