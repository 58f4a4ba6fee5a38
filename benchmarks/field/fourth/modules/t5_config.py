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

from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5EncoderModel


def settings(**changed):
    fields = dict(d_model=40, d_kv=8, num_heads=4, d_ff=64, num_layers=2, vocab_size=70, relative_attention_num_buckets=12,
                  relative_attention_max_distance=20, attn_implementation="eager")
    fields.update(changed)
    return T5Config(**fields)


def make():
    reference = draw(T5EncoderModel(settings()), 0.3, 101)
    with torch.no_grad():
        for name, p in reference.named_parameters():
            if "relative_attention_bias" in name:
                p.normal_(0, 1.5)
    port = T5EncoderModel(settings())
    port.load_state_dict(reference.state_dict())
    port = port.eval()
    # changes to the modules
    torch.manual_seed(12)
    return port, reference, torch.randint(0, 70, (2, 16))
