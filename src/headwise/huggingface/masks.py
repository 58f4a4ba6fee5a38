"""The mask function of `register_huggingface`: what reaches a model's layers as its mask.

Lazy, a `LazyMask` without queries x keys memory: causal masks, sliding windows on one or both
sides, chunks, sequences packed by their position ids, each with or without padding on either
side, and with any key/value cache. A bidirectional mask that hides nothing is None, where the
model allows that. A causal mask is never None, so causality never depends on what a layer says of
itself.

For a model that has no sdpa form the mask is a float, as eager has it: such models add it, pad it
with zeros, or read "no mask" as "all is seen".

Written, as transformers' ``sdpa_mask`` or ``eager_mask``: what a model adds by functions of its own
(images that see themselves, prefixes, blocks), every mask while compiling, tracing or exporting
and under torch.func, and the one row of a decoding step with a static cache, which a compiled
step takes as an input. Where a causal mask is all of it, a compiled graph carries beside the tensor
what it means, and drops the tensor.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel, masking_utils

from headwise.errors import OptionError
from headwise.huggingface import mask_functions
from headwise.huggingface.lazy_mask import MEANING, LazyMask
from headwise.huggingface.mask_functions import TokenPositions
from headwise.masks.clauses.band import Band
from headwise.masks.mask import Mask
from headwise.support import private_torch
from headwise.support.tracing import is_traced


def prepare() -> None:
    """Learn the installed version's mask functions now, not within some model's first call."""
    mask_functions.known()


def from_transformers(**call: Any) -> Tensor | None:
    """The mask of one forward pass, (batch, 1, queries, keys), True = may attend.

    Takes what transformers hands to a mask function, of which it reads ``batch_size``,
    ``q_length`` and ``q_offset`` (``cache_position`` in 5.0), ``kv_length``, ``kv_offset``,
    ``mask_function``, ``attention_mask`` (batch, positions), ``use_vmap``, ``device`` and
    ``allow_is_bidirectional_skip``.

    Raises:
        OptionError: the model computes attention by its own code, in which this mask means nothing.
    """
    place, device = _place(call), _device(call)
    if place is not None:
        kind: Any = type(call.get("config"))
        _require_interface(kind)
    mask = None if place is None else _mask(call, place)
    if place is None or mask is None:
        return _written(call)
    if call.get("allow_is_bidirectional_skip") and _hides_nothing(mask, place, device):
        return None
    sizes = {"batch": call["batch_size"], "queries": place.queries, "keys": place.keys}
    dtype = call.get("dtype", torch.float32) if _adds(call) else torch.bool
    return LazyMask(mask, **sizes, device=device, dtype=dtype)


# Plain functions: one that keeps its results a compiler looks into.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_made_for_eager(layer: type) -> bool:
    """Whether no model beside this layer, in its own file, has an sdpa form."""
    return _has_no_sdpa_beside(layer)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _adds_masks(config: type) -> bool:
    """Whether a model with this configuration is made for eager's masks alone: floats to add."""
    return any(not model._supports_sdpa for model in _models(config))


@cache
def _has_no_sdpa_beside(layer: type) -> bool:
    beside = vars(sys.modules[layer.__module__]).values()
    models = [m for m in beside if isinstance(m, type) and issubclass(m, PreTrainedModel)]
    own = [m for m in models if m.__module__ == layer.__module__]
    return bool(own) and not any(model._supports_sdpa for model in own)


def _adds(call: dict[str, Any]) -> bool:
    kind: Any = type(call.get("config"))
    return bool(_adds_masks(kind))


def _written(call: dict[str, Any]) -> Tensor | None:
    if _adds(call):
        added: Tensor | None = masking_utils.eager_mask(**call)
        return added
    # Never None for a causal mask: a layer without ``is_causal`` would not know.
    mask: Tensor | None = masking_utils.sdpa_mask(**{**call, "allow_is_causal_skip": False})
    if mask is not None and _is_causal_alone(call):
        setattr(mask, MEANING, Mask.causal(align="top-left"))
    return mask


def _is_causal_alone(call: dict[str, Any]) -> bool:
    """Whether a compiled graph may forget the tensor: causal from the first key on, no more.

    Only where transformers would leave the mask out for sdpa, so that no model can edit it.
    """
    return (
        torch.compiler.is_compiling()
        and bool(call.get("allow_is_causal_skip"))
        and call.get("mask_function") is masking_utils.causal_mask_function
        and call.get("attention_mask") is None
        and not isinstance(call.get("q_offset"), Tensor)
        and (call.get("q_offset"), call.get("kv_offset")) == (0, 0)
    )


def _place(call: dict[str, Any]) -> TokenPositions | None:
    """Where the call stands; None where its mask has to be written."""
    positions = call.get("cache_position")
    queries = call["q_length"] if positions is None else positions.shape[0]
    first: Any = call.get("q_offset", 0) if positions is None else positions[0]
    if call.get("use_vmap") or not _is_eager(_device(call)):
        return None
    if isinstance(first, Tensor):
        # A static cache counts in a tensor. Its decoding step may be compiled.
        if (positions is None and queries == 1) or not _may_read(first):
            return None
        first = int(first)
    return TokenPositions(queries, call["kv_length"], first, call.get("kv_offset", 0))


@cache
def _require_interface(config: type) -> None:
    """By transformers' own test of a model's source; a model it does not know may pass."""
    for model in _models(config):
        if not model._can_set_attn_implementation():
            raise OptionError(
                saw=f'attn_implementation="headwise" for {model.__name__}',
                needed="a model whose attention goes through transformers' attention interface",
                do='attn_implementation="eager" for this model',
            )


def _models(config: type) -> list[Any]:
    """The models that transformers builds from a configuration of this class."""
    found: Any = MODEL_MAPPING.get(config, ()) if issubclass(config, PreTrainedConfig) else ()
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _device(call: dict[str, Any]) -> torch.device:
    positions = call.get("cache_position")
    return torch.device(call.get("device", "cpu") if positions is None else positions.device)


def _is_eager(device: torch.device) -> bool:
    """Whether tensors made now are plain ones, and Python runs at every call.

    Also False where this torch has no tensors without memory, which a `LazyMask` is.
    """
    return (
        private_torch.HAS_WRAPPERS
        and not torch.compiler.is_compiling()
        and device.type != "meta"
        and type(torch.empty(0, device=device)) is Tensor
        and not is_traced()
        and not private_torch.in_functorch(unknown=True)
    )


def _may_read(tensor: Tensor) -> bool:
    """In eager mode always, but while a CUDA graph is captured."""
    capturing = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    return type(tensor) is Tensor and not capturing


def _mask(call: dict[str, Any], place: TokenPositions) -> Mask | None:
    function = call.get("mask_function", masking_utils.causal_mask_function)
    mask = mask_functions.read(function, place)
    padding = call.get("attention_mask")
    if mask is None or padding is None:
        return mask
    return mask & _real_keys(padding, mask, place) if padding.dim() == 2 else None


def _real_keys(padding: Tensor, mask: Mask, place: TokenPositions) -> Mask:
    """The keys that are no padding: as lengths, as starts, or else one bool for each key."""
    end = place.first_key + place.keys
    padding = pad(padding.bool(), (0, max(0, end - padding.shape[1])))
    real = padding[:, place.first_key : end]
    by_key = Mask.may_attend(real, axes="batch keys")
    if not _may_read(real):
        return by_key
    # A static cache is longer than what it holds; its rest is hidden by causality already.
    bound = mask.bind(**_sizes(place), batch=len(real), device=real.device)
    start, stop = bound.key_range(0, place.queries)
    if bool(real[:, start:stop].all()):
        return Mask()
    lengths = real.sum(-1)
    in_length = torch.arange(place.keys, device=real.device) < lengths[:, None]
    if torch.equal(real, in_length):
        return Mask.lengths(keys=lengths)
    starts = stop - real[:, start:stop].sum(-1)
    after_start = torch.arange(start, stop, device=real.device) >= starts[:, None]
    return Mask.starts(keys=starts) if torch.equal(real[:, start:stop], after_start) else by_key


def _hides_nothing(mask: Mask, place: TokenPositions, device: torch.device) -> bool:
    bound = mask.bind(**_sizes(place), batch=1, device=device) if _is_bands(mask) else None
    return bound is not None and not bound.hiding


def _is_bands(mask: Mask) -> bool:
    return len(mask.of_kind(Band)) == len(mask.clauses)


def _sizes(place: TokenPositions) -> dict[str, int]:
    return {"heads": 1, "queries": place.queries, "keys": place.keys}
