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
    cfg = GptOssConfig(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=1, vocab_size=50,
                       intermediate_size=64, num_local_experts=2, num_experts_per_tok=1, attention_bias=True,
                       layer_types=["full_attention"], max_position_embeddings=64, initial_context_length=64,
                       rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    cfg._attn_implementation = "eager"
    return cfg


def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
    B, T, _ = hidden_states.shape
    D = self.head_dim
    q, k, v = (f(hidden_states).view(B, T, -1, D).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
    cos, sin = (t[:, None] for t in position_embeddings)
    turn = lambda t: torch.cat([t[..., : D // 2] * cos - t[..., D // 2 :] * sin, t[..., D // 2 :] * cos + t[..., : D // 2] * sin], -1)
    q, k = turn(q), turn(k)
    before = 0
    if past_key_values is not None:
        before = past_key_values.get_seq_length(self.layer_idx)
        k, v = past_key_values.update(k, v, self.layer_idx)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    s = q @ k.mT * self.scaling
    here = torch.arange(before, before + T)[:, None]
    there = torch.arange(before + T)
    s = s.masked_fill(there > here, float("-inf"))
    sink = self.sinks[None, :, None, None].expand(B, -1, T, 1)
    p = torch.cat([sink, s], -1).softmax(-1)[..., 1:]
    return self.o_proj((p @ v).transpose(1, 2).reshape(B, T, -1)), None


def make():
    reference = draw(GptOssAttention(config(), layer_idx=0), 32)
    with torch.no_grad():
        reference.sinks.copy_(torch.tensor([2.0, 0.5, 3.0, 1.0]))
    port = copy.deepcopy(reference)
    port.forward = types.MethodType(forward, port)
    return port, reference, None
