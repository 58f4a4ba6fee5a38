"""Attention function of `register_huggingface`: the attention of one layer by `AttentionMatrix`.

    scores = scaling * q.k, softcap, + position_bias (+ a float mask), mask;  output = weights @ v

Supported keywords of a model are ``scaling``, ``softcap`` (Gemma 2), ``s_aux`` (the sinks of
gpt-oss), ``position_bias`` (T5), ``is_causal``, ``dropout``, ``output_attentions``,
``cu_seq_lens_q``/``cu_seq_lens_k`` of sequences packed into one row, and the keys that each query
chose: ``indices`` (DeepSeek V3.2) or ``block_indices`` (MiniMax M3). A query may attend to the
chosen keys that its mask allows. ``sliding_window`` is part of
the model's mask, and applies by itself if there is no mask. The keywords of `UNSUPPORTED` raise an
error. Other keywords do not affect attention and are ignored.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.huggingface.masks import MEANING, LazyMask, file_has_no_sdpa
from headwise.layers.hooks import call_hook, has_attention_hook
from headwise.masks.clauses.chosen import Chosen
from headwise.masks.clauses.segments import Segments
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias, cast_bias, split_additive_mask
from headwise.matrix.operator import AttentionMatrix
from headwise.support.text import describe_value
from headwise.support.tracing import cast_like_autocast

AXES = "batch heads queries keys"

# keyword -> the feature that an AttentionMatrix does not have
UNSUPPORTED = {
    "cache": "continuous batching, which keeps keys and values in pages",
    "sinks": "a sink for each query",
    "head_mask": "factors on the weights of each head",
}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of one layer for a transformers model.

    Shapes:
        query: (batch, heads, queries, head_dim).
        key, value: (batch, kv_heads, keys, head_dim) and (batch, kv_heads, keys, value_dim).
        attention_mask: broadcastable to (batch, heads, queries, keys). In a bool mask, True = may
            attend. A float mask is added to the scores, and hides a key at or below half of its
            dtype's lowest number, as transformers does (in a `ScoreBias` only -inf hides). None
            means causal from the first key on, if there is more than one query and ``is_causal``
            (by default the module's ``is_causal``) is True. A query without keys is padding and
            gets zeros; in eager mode such a query gets the mean of the values.
        returns: (batch, queries, heads, value_dim), and the weights (batch, heads, queries, keys)
            before dropout if ``output_attentions`` requests them, else None.

    Raises:
        OptionError: an option is not supported.
        MaskError, ShapeError, DTypeError, DeviceError: the tensors do not fit together.
    """
    matrix, value = build_matrix_and_values(module, query, key, value, attention_mask, options)
    dropout = float(options.get("dropout", 0.0))
    outputs = matrix @ value if dropout == 0 else matrix.dropped(value, dropout_p=dropout)
    weights = matrix.dense(limit=None) if _weights_requested(options) else None
    return call_hook(matrix, value, outputs).transpose(1, 2).contiguous(), weights


def build_matrix_and_values(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    options: dict[str, Any],
) -> tuple[AttentionMatrix, Tensor]:
    """Return the attention matrix that the operands of `attend` state, and the values."""
    for name, what in UNSUPPORTED.items():
        if options.get(name) is not None:
            _raise_unsupported(name, what, module)
    query, key, value = cast_like_autocast(query, key, value)
    if query.shape[0] != key.shape[0]:  # the batch shares learned queries
        batch, given = max(query.shape[0], key.shape[0]), (query, key, value)
        query, key, value = (x.expand(batch, -1, -1, -1) if x.shape[0] == 1 else x for x in given)
    mask, score_bias = _read_mask_and_bias(module, query, key, attention_mask, options)
    scale = options.get("scaling")
    scale = float(scale) if isinstance(scale, int) else scale  # 1 in Dia
    stated: dict[str, Any] = {"scale": scale, "softcap": options.get("softcap")}
    stated |= {"mask": mask, "score_bias": score_bias, "sink": options.get("s_aux")}
    return AttentionMatrix(query, key, **stated), value


def _read_mask_and_bias(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: object, options: dict[str, Any]
) -> tuple[Mask, ScoreBias]:
    mask, score_bias = Mask(), ScoreBias()
    if isinstance(attention_mask, LazyMask) and attention_mask.is_edited():
        attention_mask = attention_mask.written
    if attention_mask is None:
        mask = _default_mask(module, query, options)
    elif isinstance(attention_mask, LazyMask):
        mask = attention_mask.mask
    elif not isinstance(attention_mask, Tensor):
        kind = type(attention_mask).__name__
        _raise_unsupported("attention_mask", f"a {kind} instead of a tensor", module)
    elif attention_mask.dtype == torch.bool:
        meaning: Mask | None = getattr(attention_mask, MEANING, None)
        mask = meaning or Mask.may_attend(_add_leading_axes(attention_mask), axes=AXES)
    else:
        added = _add_leading_axes(_narrow_float64(attention_mask, query))
        mask, score_bias = split_additive_mask(added, axes=AXES)
    if options.get("cu_seq_lens_q") is not None and not mask.clauses_of_kind(Segments):
        if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
            what = "packed sequences in a batch, or with earlier keys"
            _raise_unsupported("cu_seq_lens_q", what, module)
        mask &= Mask.packed(options["cu_seq_lens_q"], options.get("cu_seq_lens_k"))
    if (bias := options.get("position_bias")) is not None:
        score_bias += ScoreBias.dense(_add_leading_axes(_narrow_float64(bias, query)), axes=AXES)
    return mask & _read_chosen_keys(module, query, key, options), score_bias


def _read_chosen_keys(
    module: nn.Module, query: Tensor, key: Tensor, options: dict[str, Any]
) -> Mask:
    """Return the mask of the keys that each query chose, which hides nothing without a choice.

    ``indices`` (batch, queries, K) are numbers of keys; ``block_indices`` (batch, groups of heads,
    queries, K) are numbers of blocks of ``module.indexer.block_size`` keys.
    """
    batch, heads, queries, _ = query.shape
    clauses = []
    block_size = getattr(getattr(module, "indexer", None), "block_size", None)
    for name, size in (("indices", 1), ("block_indices", block_size)):
        if (indices := options.get(name)) is None:
            continue
        is_by_key = name == "indices"
        grouped = indices[:, None] if is_by_key else indices
        is_integer = not (grouped.is_floating_point() or grouped.dtype == torch.bool)
        sizes = grouped.shape[:3:2] if grouped.dim() == 4 else ()
        if size is None or not is_integer or sizes != (batch, queries) or heads % grouped.shape[1]:
            between = "" if is_by_key else f"a divisor of {heads} heads, "
            beside = "" if is_by_key else f", and indexer.block_size, which is {size}"
            raise OptionError(
                saw=f"{name} from {type(module).__name__}: {describe_value(indices)}",
                needed=f"integers (batch {batch}, {between}queries {queries}, K){beside}",
                do="pass the numbers that each query chose, -1 for a place without a choice",
            )
        clauses.append(Chosen.from_indices(grouped, heads=heads, keys=key.shape[2], size=size))
    return Mask(tuple(clauses))


def _narrow_float64(added: Tensor, query: Tensor) -> Tensor:
    """Return a float64 mask in the dtype of the scores; no other dtype is wider than that."""
    if added.dtype != torch.float64:
        return added
    return cast_bias(added, torch.promote_types(query.dtype, torch.float32))


def _default_mask(module: nn.Module, query: Tensor, options: dict[str, Any]) -> Mask:
    causal = options.get("is_causal")
    if causal is None:
        # In a model with float masks only, None means that every key may be attended.
        causal = getattr(module, "is_causal", True) and not file_has_no_sdpa(type(module))
    window = options.get("sliding_window")
    reach = None if window is None else window - 1
    if causal and query.shape[2] > 1:
        return Mask.window(reach, 0, align="top-left")
    return Mask() if reach is None else Mask.window(reach, reach, align="bottom-right")


def _add_leading_axes(tensor: Tensor) -> Tensor:
    return tensor[(None,) * (len(AXES.split()) - tensor.dim())]


def _weights_requested(options: dict[str, Any]) -> bool:
    """Check whether the model's caller requested weights; some models do not pass this on."""
    if options.get("output_attentions"):
        return True
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if torch.compiler.is_compiling() or not hasattr(capturing, "_active_collector"):
        return False
    collected = capturing._active_collector.get()  # type: ignore[union-attr]
    return any("attentions" in name for name in collected or ())


def _raise_unsupported(name: str, what: str, module: nn.Module) -> NoReturn:
    needed = "scores of q.k, a softcap, a score bias, a mask, and one sink for each head"
    do = 'load this model with attn_implementation="eager" or "sdpa"'
    if has_attention_hook():  # the recording replaces or observes the model's implementation
        do = 'call the model itself with "eager" and output_attentions=True for its weights'
    raise OptionError(saw=f"{name} from {type(module).__name__}: {what}", needed=needed, do=do)
