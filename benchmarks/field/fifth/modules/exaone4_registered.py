import copy
import math
import types

import torch
import torch.nn as nn
import torch.nn.functional as F

from transformers import AttentionInterface, Exaone4Config, Exaone4ForCausalLM


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


def windowed(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None, **kwargs):
    """Builds its own masks from positions; no mask comes from the model."""
    J = key.shape[1]
    L, S = query.shape[2], key.shape[2]
    groups = query.unflatten(1, (J, -1))
    scores = (groups @ key.unsqueeze(2).mT) * scaling
    row = torch.arange(S - L, S)[:, None]
    col = torch.arange(S)[None, :]
    seen = col <= row
    if sliding_window is not None:
        seen = seen & (row - col < sliding_window)
    scores = scores.masked_fill(~seen, float("-inf"))
    y = scores.softmax(-1) @ value.unsqueeze(2)
    return y.flatten(1, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register("exaone_windowed", windowed)


def config(how, **changed):
    fields = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=3,
                  vocab_size=80, intermediate_size=64, sliding_window=5, max_position_embeddings=64,
                  layer_types=["sliding_attention", "full_attention", "sliding_attention"], pad_token_id=0, bos_token_id=1, eos_token_id=2)
    fields.update(changed)
    cfg = Exaone4Config(**fields)
    cfg._attn_implementation = how
    return cfg


def make():
    reference = draw(Exaone4ForCausalLM(config("eager")), 21, std=0.3)
    port = Exaone4ForCausalLM(config("exaone_windowed")).eval()
    port.load_state_dict(reference.state_dict())
    torch.manual_seed(4)
    return port, reference, {"input_ids": torch.randint(3, 80, (2, 15)), "use_cache": False}
