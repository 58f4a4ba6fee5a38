"""Attention that a model computes by torch's own functions, shown as a matrix.

`scaled_dot_product_attention` runs as it is, and is shown beside; what goes through
`multi_head_attention_forward`, as `torch.nn.MultiheadAttention` does, is computed by headwise's
functional form, which is the same function. While the mode is on, torch's layers leave their fused
inference path by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from headwise import reference
from headwise.attention_matrix import AttentionMatrix
from headwise.layers.hooks import call_hook
from headwise.layers.torch_api.functional_form import multi_head_attention_forward
from headwise.masks.additive_mask import taken_apart
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.support.kernel_calls import is_own_call
from headwise.support.tracing import as_autocast_has_it

AXES = "batch heads queries keys"


class TorchCalls(TorchFunctionMode):
    """While it is on, torch's attention functions are shown to the watcher."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Any function of torch."""
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            return multi_head_attention_forward(*args, **kwargs)
        if func is F.scaled_dot_product_attention and not is_own_call():
            return _attend(func(*args, **kwargs), *args, **kwargs)
        return func(*args, **kwargs)


def _attend(
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
    """The outputs after the watcher has seen them, shaped as they were."""
    axes = _Axes(outputs.shape[:-2], is_grouped=enable_gqa)
    head_outputs = axes.four(outputs)
    heads = head_outputs.shape[1]
    query, key, value = as_autocast_has_it(query, key, value)
    q, k, v = axes.four(query, heads=heads), axes.four(key), axes.four(value)
    if k.shape[1] != v.shape[1]:  # a layer has one number of kv heads
        k, v = (reference.share_heads(x, heads=heads) for x in (k, v))
    mask, score_bias = Mask(), ScoreBias()
    if is_causal:
        mask = Mask.causal(align="top-left")
    elif attn_mask is not None:
        given = axes.four_of_mask(attn_mask)
        if given.dtype == torch.bool:
            mask = Mask.may_attend(given, axes=AXES)
        else:
            mask, score_bias = taken_apart(given, axes=AXES)
    matrix = AttentionMatrix(q, k, mask=mask, score_bias=score_bias, scale=scale)
    return call_hook(matrix, v, head_outputs).reshape(outputs.shape)


@dataclass(frozen=True)
class _Axes:
    """The leading axes of one call, as batch and heads: torch takes none, or any number of them.

    Those of the outputs are what torch broadcast all operands to. The last is heads, and those
    before it are batch; where it is alone it is batch, unless heads are grouped.
    """

    leading: tuple[int, ...]
    is_grouped: bool

    def four(self, x: Tensor, *, heads: int | None = None) -> Tensor:
        """(batch, heads, length, width) of the whole batch; its own number of heads if not said."""
        *batch, _ = self._batch_and_heads(self.leading)
        x = self._broadcastable(x)
        heads = x.shape[-3] if heads is None else heads
        return x.expand(*batch, heads, -1, -1).flatten(0, -4)

    def four_of_mask(self, mask: Tensor) -> Tensor:
        """The same, but what serves the whole batch is not repeated for it."""
        once = self._broadcastable(mask)
        return once.flatten(0, -4) if once.shape[:-3].numel() == 1 else self.four(mask)

    def _broadcastable(self, x: Tensor) -> Tensor:
        own = x.shape[:-2]
        missing = (1,) * (len(self.leading) - len(own))
        return x.reshape(*self._batch_and_heads((*missing, *own)), *x.shape[-2:])

    def _batch_and_heads(self, leading: tuple[int, ...]) -> tuple[int, ...]:
        if len(leading) == 1 and not self.is_grouped:
            return (*leading, 1)
        return (*(1,) * (2 - len(leading)), *leading)
