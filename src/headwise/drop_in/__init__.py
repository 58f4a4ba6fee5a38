"""The drop-in for torch.nn.MultiheadAttention: its signature, parameters and conventions.

`headwise.upgrade` is in a module of its own name, and not imported here: the layer alone stays
light, and ``headwise.drop_in.upgrade`` stays a module.
"""

from headwise.drop_in.functional_form import multi_head_attention_forward
from headwise.drop_in.layer import MultiheadAttention

__all__ = ["MultiheadAttention", "multi_head_attention_forward"]
