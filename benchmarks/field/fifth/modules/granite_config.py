import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import GraniteConfig, GraniteForCausalLM


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


def config(**changed):
    fields = dict(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, vocab_size=80,
                  intermediate_size=64, attention_multiplier=0.11, residual_multiplier=0.6, embedding_multiplier=3.0,
                  attention_bias=True, rope_parameters={"rope_type": "default", "rope_theta": 500.0}, pad_token_id=0)
    fields.update(changed)
    cfg = GraniteConfig(**fields)
    cfg._attn_implementation = "eager"
    return cfg


def wrap(attn):
    inner = attn.forward

    def forward(*args, **kwargs):
        out, weights = inner(*args, **kwargs)
        return out, weights

    attn.forward = forward


def make():
    reference = draw(GraniteForCausalLM(config()), 13)
    port = GraniteForCausalLM(config()).eval()
    weights = dict(reference.state_dict())
    port.load_state_dict(weights)
    for i, layer in enumerate(port.model.layers):
        wrap(layer.self_attn)
    torch.manual_seed(2)
    return port, reference, {"input_ids": torch.randint(3, 80, (2, 14))}
