import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import HunYuanDenseV1Config
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1Attention


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
    cfg = HunYuanDenseV1Config(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=12, num_hidden_layers=1, vocab_size=50,
                               intermediate_size=64, attention_bias=True, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
                               rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    cfg._attn_implementation = "eager"
    return cfg


def compiled(attn):
    """A closure over the weights in place of the module's forward; one baddbmm for the scores of all heads."""
    wide = torch.cat([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight])
    shift = torch.cat([attn.q_proj.bias, attn.k_proj.bias, attn.v_proj.bias])
    gain_q, gain_k = attn.query_layernorm.weight, attn.key_layernorm.weight

    def norm(t, gain):
        return gain * t / (t.pow(2).mean(-1, keepdim=True) + attn.query_layernorm.variance_epsilon).sqrt()

    def forward(hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        B, T, _ = hidden_states.shape
        q, k, v = F.linear(hidden_states, wide, shift).view(B, T, 8, 12).transpose(1, 2).split([4, 2, 2], dim=1)
        cos, sin = (t.unsqueeze(1) for t in position_embeddings)
        turn = lambda t: t * cos + torch.roll(t, 6, -1) * sin * torch.tensor([-1.0] * 6 + [1.0] * 6)
        q = norm(turn(q), gain_q)
        k = norm(turn(k), gain_k)
        k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        start = torch.zeros(B * 4, T, T)
        if attention_mask is not None:
            start = attention_mask.expand(B, 4, T, T).reshape(B * 4, T, T)
        scores = torch.baddbmm(start, q.reshape(B * 4, T, 12), k.reshape(B * 4, T, 12).mT, alpha=12 ** -0.5)
        y = torch.bmm(scores.softmax(2), v.reshape(B * 4, T, 12)).view(B, 4, T, 12)
        return attn.o_proj(y.permute(0, 2, 1, 3).reshape(B, T, 48)), None

    return forward


def make():
    reference = draw(HunYuanDenseV1Attention(config(), layer_idx=0), 27)
    port = copy.deepcopy(reference)
    port.forward = compiled(port)
    return port, reference, None
