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

from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def keys_masked(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * (query.shape[-1] ** -0.5)
    if attention_mask is not None:
        hidden = attention_mask < 0
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    weights = F.softmax(scores, dim=-1)
    return torch.einsum("bhqk,bhkd->bqhd", weights, value), weights


ALL_ATTENTION_FUNCTIONS.register("fourth_keys_masked", keys_masked)
try:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask

    ALL_MASK_ATTENTION_FUNCTIONS.register("fourth_keys_masked", eager_mask)
except ImportError:
    pass


def make():
    config = BertConfig(hidden_size=48, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64, vocab_size=80,
                        max_position_embeddings=32)
    config._attn_implementation = "eager"
    reference = draw(BertModel(config, add_pooling_layer=False), 0.25, 91)
    changed = copy.deepcopy(config)
    changed._attn_implementation = "fourth_keys_masked"
    port = BertModel(changed, add_pooling_layer=False)
    port.load_state_dict(reference.state_dict())
    torch.manual_seed(10)
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[1, 8:] = 0
    return port.eval(), reference, {"input_ids": torch.randint(0, 80, (2, 13)), "attention_mask": mask}
