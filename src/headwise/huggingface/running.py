"""Attention of running transformers models: by headwise, or observed as they compute it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.huggingface import NAME, register_huggingface
from headwise.layers.hooks import call_hook
from headwise.support.tracing import call_for_kernel

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
SDPA = "sdpa"


@contextmanager
def using_headwise_attention(model: nn.Module) -> Iterator[None]:
    """Use `AttentionMatrix` in all modules of ``model`` with transformers' attention interface.

    Modules that compute attention in their own code do not change. On exit, every configuration
    has its previous implementation again.
    """
    if "transformers" not in sys.modules:  # then ``model`` has no transformers modules
        yield
        return
    from transformers import PreTrainedModel

    members = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    configs = _all_configs([m.config for m in members])
    before = [getattr(config, "_attn_implementation_internal", None) for config in configs]
    register_huggingface()
    try:
        for member in members:
            if member._can_set_attn_implementation():
                member.config._attn_implementation_internal = NAME
        # Nested configurations may belong to no module of their own.
        direct = {id(member.config) for member in members}
        switched = [m.config for m in members if m.config._attn_implementation_internal == NAME]
        for config in _all_configs(switched):
            if id(config) not in direct:
                config._attn_implementation_internal = NAME
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation


def _all_configs(roots: list[Any]) -> list[Any]:
    configs: dict[int, Any] = {}
    pending = list(roots)
    while pending:
        config = pending.pop()
        if config is None or id(config) in configs:
            continue
        configs[id(config)] = config
        pending += [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return list(configs.values())


@contextmanager
def observe_attention() -> Iterator[None]:
    """Report every call of transformers' attention interface to the active hook, in this block.

    Models keep their implementation, their masks and their outputs. A call is reported as an
    `AttentionMatrix` of the operands, with the head outputs that the implementation returned. The
    two disagree where an implementation does not do what its operands state.
    """
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
    # Here, since both import transformers, which this module is to do without.
    from headwise.huggingface.attention import attend, build_matrix_and_values

    if function is attend:
        return function  # it reports its calls itself

    def observed(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        used = attention_mask
        if isinstance(used, Tensor) and used.dtype == torch.float64:
            # transformers computes the softmax in float32, where the lowest number of float64 is
            # -inf, and a row without keys is NaN.
            used = used.clamp(min=torch.finfo(torch.float32).min)
        outputs, weights = call_for_kernel(function, module, query, key, value, used, **options)
        stated = dict(options)
        if attention_mask is None:
            stated["sliding_window"] = None
            if name != SDPA:  # no other rule for a call without a mask
                stated["is_causal"] = False
        mask = _mask_as_tensor(attention_mask, query, key)
        matrix, value = build_matrix_and_values(module, query, key, value, mask, stated)
        head_outputs = call_hook(matrix, value, outputs.transpose(1, 2))
        return head_outputs.transpose(1, 2).contiguous(), weights

    return observed


def _mask_as_tensor(mask: Any, query: Tensor, key: Tensor) -> Any:
    flex = sys.modules.get("torch.nn.attention.flex_attention")  # slow to import
    if flex is not None and isinstance(mask, flex.BlockMask):
        sizes = len(query), 1, query.shape[2], key.shape[2]
        return flex.create_mask(mask.mask_mod, *sizes, device=str(query.device))
    if isinstance(mask, Tensor) and mask.shape[-1] > key.shape[2]:
        return mask[..., : key.shape[2]]
    return mask
