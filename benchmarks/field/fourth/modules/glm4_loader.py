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

from transformers.models.glm4.configuration_glm4 import Glm4Config
from transformers.models.glm4.modeling_glm4 import Glm4Attention

HEADS, GROUPS, DIM = 4, 2, 16


def config():
    return Glm4Config(hidden_size=64, num_attention_heads=HEADS, num_key_value_heads=GROUPS, head_dim=DIM, attention_bias=True,
                      max_position_embeddings=64,
                      rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5})


def fuse(module):
    """One table of rows q, k, v as the original checkpoints have it."""
    rows = torch.cat([module.q_proj.weight, module.k_proj.weight, module.v_proj.weight])
    bias = torch.cat([module.q_proj.bias, module.k_proj.bias, module.v_proj.bias])
    return {"qkv.weight": rows, "qkv.bias": bias, "dense.weight": module.o_proj.weight}


def unfuse(table, module):
    sizes = [HEADS * DIM, GROUPS * DIM, GROUPS * DIM]
    q, k, v = table["qkv.weight"].split(sizes)
    bq, bk, bv = table["qkv.bias"].split(sizes)
    with torch.no_grad():
        for linear, w, b in ((module.q_proj, q, bq), (module.k_proj, k, bk), (module.v_proj, v, bv)):
            linear.weight.copy_(w)
            linear.bias.copy_(b)
        module.o_proj.weight.copy_(table["dense.weight"])
    return module


def make():
    reference = draw(Glm4Attention(config(), layer_idx=0), 0.25, 51)
    port = unfuse(fuse(reference), Glm4Attention(config(), layer_idx=0))
    return port.eval(), reference, None
