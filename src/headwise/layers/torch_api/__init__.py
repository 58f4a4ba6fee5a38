"""Drop-in for torch.nn.MultiheadAttention, with its signature, parameters and conventions.

`headwise.upgrade` is not imported here: importing the layer stays fast, and the name
``headwise.layers.torch_api.upgrade`` stays that of the module.
"""

from headwise.layers.torch_api.functional_form import multi_head_attention_forward

__all__ = ["multi_head_attention_forward"]
