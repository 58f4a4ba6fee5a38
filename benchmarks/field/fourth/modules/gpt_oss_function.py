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
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def with_sinks(module, query, key, value, attention_mask, scaling=None, dropout=0.0, s_aux=None, **kwargs):
    """Softmax whose denominator holds one more term for each head."""
    n = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(n, 1), value.repeat_interleave(n, 1)
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    sink = s_aux.view(1, -1, 1, 1)
    top = torch.maximum(scores.amax(-1, keepdim=True), sink)
    e = torch.exp(scores - top)
    weights = e / (e.sum(-1, keepdim=True) + torch.exp(sink - top))
    return (weights @ value).transpose(1, 2).contiguous(), weights


ALL_ATTENTION_FUNCTIONS.register("fourth_with_sinks", with_sinks)


def make():
    config = GptOssConfig(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=12, num_hidden_layers=2,
                          sliding_window=64, max_position_embeddings=64,
                          rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    config._attn_implementation = "eager"
    reference = draw(GptOssAttention(config, layer_idx=1), 0.3, 41)
    changed = copy.deepcopy(config)
    changed._attn_implementation = "fourth_with_sinks"
    port = GptOssAttention(changed, layer_idx=1)
    port.load_state_dict(reference.state_dict())
    return port.eval(), reference, None
