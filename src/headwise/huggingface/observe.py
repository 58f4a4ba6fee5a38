"""Context manager that reports the attention of transformers models as they compute it.

The model keeps its implementation, its masks and its outputs. Each call of the attention interface
is reported as an `AttentionMatrix` of the operands, with the head outputs that the implementation
returned. The two disagree where an implementation does not do what its operands state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headwise.layers.hooks import call_hook
from headwise.support.tracing import call_for_kernel

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
SDPA = "sdpa"


@contextmanager
def observe_attention() -> Iterator[None]:
    """Report every call of transformers' attention interface to the active hook, in this block."""
    if "transformers" not in sys.modules:  # then no model of transformers runs
        yield
        return
    from transformers import AttentionInterface

    look_up = AttentionInterface.get_interface

    def observed_interface(
        self: AttentionInterface, attn_implementation: str, default: AttentionFunction
    ) -> AttentionFunction:
        function = look_up(self, attn_implementation, default)
        return _wrap_with_observer(function, attn_implementation)

    AttentionInterface.get_interface = observed_interface  # type: ignore[method-assign]
    try:
        yield
    finally:
        AttentionInterface.get_interface = look_up  # type: ignore[method-assign]


def _wrap_with_observer(function: AttentionFunction, name: str) -> AttentionFunction:
    """Return an attention function that also reports its calls."""
    # Here, since both import transformers, which this module is to do without.
    from headwise.huggingface.attention import attend, build_matrix_and_values

    if function is attend:
        return function  # it reports its calls itself

    def observed(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        used = _clamp_mask_to_float32(attention_mask)
        outputs, weights = call_for_kernel(function, module, query, key, value, used, **options)
        stated = options
        if attention_mask is None and name != SDPA:  # no other rule for a call without a mask
            stated = {**options, "is_causal": False, "sliding_window": None}
        elif attention_mask is None:
            stated = {**options, "sliding_window": None}
        matrix, value = build_matrix_and_values(
            module, query, key, value, _mask_as_tensor(attention_mask, query, key), stated
        )
        head_outputs = call_hook(matrix, value, outputs.transpose(1, 2))
        return head_outputs.transpose(1, 2).contiguous(), weights

    return observed


def _clamp_mask_to_float32(mask: Any) -> Any:
    """Return a mask whose hidden keys stay finite in float32.

    transformers computes the softmax in float32 in a float64 model too. There the lowest number of
    float64 is -inf, and a row without keys is NaN, unlike in the float32 model.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.float64:
        return mask
    return mask.clamp(min=torch.finfo(torch.float32).min)


def _mask_as_tensor(mask: Any, query: Tensor, key: Tensor) -> Any:
    """Return a mask as a tensor, cut to the keys."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")  # slow to import
    if flex is not None and isinstance(mask, flex.BlockMask):
        sizes = len(query), 1, query.shape[2], key.shape[2]
        return flex.create_mask(mask.mask_mod, *sizes, device=str(query.device))
    if isinstance(mask, Tensor) and mask.shape[-1] > key.shape[2]:
        return mask[..., : key.shape[2]]
    return mask
