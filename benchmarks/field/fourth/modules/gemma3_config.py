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

from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3ForCausalLM


def settings(**changed):
    fields = dict(hidden_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=12, intermediate_size=64,
                  num_hidden_layers=3, vocab_size=80, max_position_embeddings=64, sliding_window=5,
                  query_pre_attn_scalar=20, layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                  rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                                   "full_attention": {"rope_type": "linear", "rope_theta": 4000.0, "factor": 4.0}},
                  bos_token_id=None, eos_token_id=None, pad_token_id=None, attn_implementation="eager")
    fields.update(changed)
    return Gemma3TextConfig(**fields)


def convert(state):
    """The tensors of a checkpoint that keeps plain gains for the norms of q and k."""
    out = {}
    for name, t in state.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            plain = t + 1.0
            t = plain - 1.0
        out[name] = t.clone()
    return out


def make():
    reference = draw(Gemma3ForCausalLM(settings()), 0.25, 31)
    port = Gemma3ForCausalLM(settings())
    port.load_state_dict(convert(reference.state_dict()))
    torch.manual_seed(6)
    return port.eval(), reference, torch.randint(0, 80, (2, 14))
