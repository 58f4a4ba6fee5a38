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

from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel


def settings(**changed):
    fields = dict(n_embd=48, n_head=4, n_layer=3, vocab_size=90, n_positions=32, bos_token_id=None, eos_token_id=None,
                  attn_implementation="eager", scale_attn_by_inverse_layer_idx=False)
    fields.update(changed)
    return GPT2Config(**fields)


def from_linear(state):
    """A checkpoint with (out, in) matrices turned to the (in, out) ones of Conv1D."""
    out = {}
    for name, t in state.items():
        t = t.clone()
        if name.endswith(("c_attn.weight", "attn.c_proj.weight", "c_fc.weight", "mlp.c_proj.weight")):
            t = t.t().contiguous()
        out[name] = t
    return out


def make():
    reference = draw(GPT2LMHeadModel(settings()), 0.25, 81)
    linear = from_linear(reference.state_dict())
    port = GPT2LMHeadModel(settings())
    port.load_state_dict(from_linear(linear))
    torch.manual_seed(9)
    return port.eval(), reference, torch.randint(0, 90, (2, 12))
