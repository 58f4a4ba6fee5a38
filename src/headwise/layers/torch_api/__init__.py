"""The drop-in for torch.nn.MultiheadAttention: its signature, parameters and conventions.

`headwise.upgrade` is in a module of its own name, and not imported here: the layer alone stays
light, and ``headwise.layers.torch_api.upgrade`` stays a module.
"""

from headwise.layers.torch_api.functional_form import multi_head_attention_forward
from headwise.layers.torch_api.layer import MultiheadAttention

__all__ = ["MultiheadAttention", "multi_head_attention_forward"]
