"""Watch of torch's functions: attention that they compute, and attention by explicit products.

`scaled_dot_product_attention` runs unchanged, and its operands are recorded as a matrix. Calls of
`multi_head_attention_forward`, as from `torch.nn.MultiheadAttention`, run headwise's functional
form, which is the same function. While the mode is on, torch's layers leave their fused inference
path by themselves.

Attention by explicit products is a product of two activations (the scores), a softmax along the
last axis of a tensor of its size (the weights), and a product of two activations with such weights.
Parameters are no activations, so a router or a classifier is none of this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from headwise.function import stages
from headwise.layers.hooks import call_hook
from headwise.layers.torch_api.layer import multi_head_attention_forward
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias, split_additive_mask
from headwise.matrix.operator import AttentionMatrix
from headwise.scanning.call import ModuleCall
from headwise.support.tensors import iterate_leaves
from headwise.support.tracing import cast_like_autocast, is_kernel_call

AXES = "batch heads queries keys"
SOFTMAXES = frozenset((torch.softmax, torch.special.softmax, Tensor.softmax, F.softmax))
_OPERATORS = (Tensor.__matmul__, Tensor.__rmatmul__, torch.einsum)
_NAMED = (getattr(place, x) for x in ("matmul", "bmm", "baddbmm") for place in (torch, Tensor))
PRODUCTS = frozenset((*_OPERATORS, *_NAMED))


class TorchCalls(TorchFunctionMode):
    """Mode in which torch's attention functions notify the attention hook.

    Explicit products belong to the running module that ``find_owner`` returns.
    """

    def __init__(
        self, find_owner: Callable[[], ModuleCall], on_explicit: Callable[[ModuleCall], None]
    ) -> None:
        super().__init__()
        self._find_owner, self._on_explicit = find_owner, on_explicit

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, and record attention."""
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            return multi_head_attention_forward(*args, **kwargs)
        if func is F.scaled_dot_product_attention and not is_kernel_call():
            return _record_attention(func(*args, **kwargs), *args, **kwargs)
        result = func(*args, **kwargs)
        if func in PRODUCTS:
            operands = [x for x in iterate_leaves((args, kwargs)) if _is_batched_activation(x)]
            if len(operands) > 1:
                owner = self._find_owner()
                if any(_size(x) in owner.weights for x in operands):
                    self._on_explicit(owner)
                else:
                    owner.scores.add(_size(result))
        elif func in SOFTMAXES:
            x: Any = args[0] if args else kwargs.get("input")
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            if _is_batched_activation(x) and dim in (-1, x.dim() - 1):
                owner = self._find_owner()
                owner.weights |= owner.scores & {_size(x)}
        return result


def _is_batched_activation(x: Any) -> bool:
    if not isinstance(x, Tensor) or x.dim() < 3 or isinstance(x, nn.Parameter):
        return False
    return x.is_inference() or not isinstance(x._base, nn.Parameter)  # of which x is a view


def _size(x: Tensor) -> tuple[int, int]:
    """Return what broadcasts and views with other leading axes leave as it is."""
    return x.numel(), x.shape[-1]


def _record_attention(
    outputs: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001 (torch's signature)
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    axes = _Axes(outputs.shape[:-2], is_grouped=enable_gqa)
    head_outputs = axes.with_four_axes(outputs)
    heads = head_outputs.shape[1]
    query, key, value = cast_like_autocast(query, key, value)
    q, k, v = axes.with_four_axes(query, heads=heads), *map(axes.with_four_axes, (key, value))
    if k.shape[1] != v.shape[1]:  # a layer has one number of kv heads
        k, v = (stages.repeat_kv_heads(x, heads=heads) for x in (k, v))
    mask, score_bias = Mask(), ScoreBias()
    if is_causal:
        mask = Mask.causal(align="top-left")
    elif attn_mask is not None:
        torch_mask = axes.mask_with_four_axes(attn_mask)
        if torch_mask.dtype == torch.bool:
            mask = Mask.may_attend(torch_mask, axes=AXES)
        else:
            mask, score_bias = split_additive_mask(torch_mask, axes=AXES)
    matrix = AttentionMatrix(q, k, mask=mask, score_bias=score_bias, scale=scale)
    return call_hook(matrix, v, head_outputs).reshape(outputs.shape)


@dataclass(frozen=True)
class _Axes:
    """The leading axes of one call of torch, of any number, as batch and heads.

    The last is heads and the others are batch. A single axis is batch, unless heads are grouped.
    """

    leading: tuple[int, ...]  # of the outputs, to which torch broadcast all operands
    is_grouped: bool

    def with_four_axes(self, x: Tensor, *, heads: int | None = None) -> Tensor:
        """Return (batch, heads, length, width); with the heads of ``x`` if ``heads`` is None."""
        *batch, _ = self._batch_and_heads(self.leading)
        x = self._make_broadcastable(x)
        heads = x.shape[-3] if heads is None else heads
        return x.expand(*batch, heads, -1, -1).flatten(0, -4)

    def mask_with_four_axes(self, mask: Tensor) -> Tensor:
        """Return a mask with four axes; a mask for the whole batch is not repeated."""
        single = self._make_broadcastable(mask)
        is_shared = single.shape[:-3].numel() == 1
        return single.flatten(0, -4) if is_shared else self.with_four_axes(mask)

    def _make_broadcastable(self, x: Tensor) -> Tensor:
        leading = x.shape[:-2]
        missing = (1,) * (len(self.leading) - len(leading))
        return x.reshape(*self._batch_and_heads((*missing, *leading)), *x.shape[-2:])

    def _batch_and_heads(self, leading: tuple[int, ...]) -> tuple[int, ...]:
        if len(leading) == 1 and not self.is_grouped:
            return (*leading, 1)
        return (*(1,) * (2 - len(leading)), *leading)
