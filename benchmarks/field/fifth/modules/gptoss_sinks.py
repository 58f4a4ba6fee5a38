import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention


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
    cfg = GptOssConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=8, num_hidden_layers=1,
                       vocab_size=50, intermediate_size=64, num_local_experts=2, num_experts_per_tok=1, attention_bias=True,
                       layer_types=["full_attention"], max_position_embeddings=64, initial_context_length=64,
                       rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    cfg._attn_implementation = "eager"
    return cfg


class SinkAttention(GptOssAttention):
    """The sink enters the denominator by hand."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        B, T, _ = hidden_states.shape
        D, J = self.head_dim, self.config.num_key_value_heads
        cos, sin = (t[:, None] for t in position_embeddings)

        def turn(t):
            a, b = t.split(D // 2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

        q = turn(self.q_proj(hidden_states).view(B, T, -1, D).transpose(1, 2))
        k = turn(self.k_proj(hidden_states).view(B, T, J, D).transpose(1, 2))
        v = self.v_proj(hidden_states).view(B, T, J, D).transpose(1, 2)
        k, v = k.repeat_interleave(q.shape[1] // J, 1), v.repeat_interleave(q.shape[1] // J, 1)
        s = q @ k.mT * self.scaling
        if attention_mask is not None:
            s = s + attention_mask
        sink = self.sinks.view(1, -1, 1, 1)
        top = torch.maximum(s.amax(-1, keepdim=True), sink)
        up = (s - top).exp()
        p = up / (up.sum(-1, keepdim=True) + (sink - top).exp())
        return self.o_proj((p @ v).transpose(1, 2).flatten(2)), None


def make():
    reference = draw(GptOssAttention(config(), layer_idx=0), 22)
    with torch.no_grad():
        reference.sinks.copy_(torch.tensor([2.0, -1.0, 1.5, 0.5, -0.5, 3.0, 1.0, 0.0]))
    port = SinkAttention(config(), layer_idx=0).eval()
    port.load_state_dict(reference.state_dict())
    return port, reference, None
