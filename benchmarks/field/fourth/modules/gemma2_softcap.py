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

from transformers.models.gemma2.configuration_gemma2 import Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def capped(module, query, key, value, attention_mask, scaling=None, softcap=None, dropout=0.0, **kwargs):
    B, H, T, d = query.shape
    G = key.shape[1]
    q = query.reshape(B, G, H // G, T, d) * scaling
    s = q @ key.unsqueeze(2).transpose(-1, -2)
    s = softcap * torch.tanh(s / softcap)
    if attention_mask is not None:
        s = s + attention_mask.unsqueeze(2)
    w = torch.softmax(s.float(), dim=-1).to(s)
    y = w @ value.unsqueeze(2)
    return y.reshape(B, H, T, d).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("fourth_capped", capped)


def make():
    config = Gemma2Config(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=2,
                          attn_logit_softcapping=2.5, query_pre_attn_scalar=10, sliding_window=64, max_position_embeddings=64)
    config._attn_implementation = "eager"
    reference = draw(Gemma2Attention(config, layer_idx=1), 0.25, 121)
    changed = copy.deepcopy(config)
    changed._attn_implementation = "fourth_capped"
    port = Gemma2Attention(changed, layer_idx=1)
    port.load_state_dict(reference.state_dict())
    return port.eval(), reference, None
