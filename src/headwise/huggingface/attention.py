"""The attention function of `register_huggingface`: one layer's attention as an `AttentionMatrix`.

    scores = scaling * q.k, softcap, + position_bias (+ a float mask), mask;  output = weights @ v

What a model hands over by keyword is honoured: ``scaling``, ``softcap`` (Gemma 2), ``s_aux`` (the
sinks of gpt-oss), ``position_bias`` (T5), ``is_causal``, ``dropout``, ``output_attentions``, and
``cu_seq_lens_q``/``cu_seq_lens_k`` of sequences packed into one row. ``sliding_window`` is part of
the mask that a model builds; where there is no mask it is honoured by itself. What cannot be
honoured raises. Other keywords do not shape attention and are ignored.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from headwise.attention_matrix import AttentionMatrix
from headwise.errors import OptionError
from headwise.huggingface.lazy_mask import MEANING, LazyMask
from headwise.huggingface.masks import is_made_for_eager
from headwise.layers.hooks import call_hook
from headwise.masks.additive_mask import taken_apart
from headwise.masks.bias_dtype import cast_bias
from headwise.masks.clauses.segments import Segments
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.support.tracing import as_autocast_has_it

AXES = "batch heads queries keys"

# keyword -> what it asks for that a matrix has no place for
REFUSED = {
    "cache": "continuous batching, which keeps keys and values in pages",
    "indices": "chosen keys for each query (sparse attention)",
    "block_indices": "chosen blocks of keys for each query (sparse attention)",
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
    """Attention of one layer, called by a model of transformers.

    Shapes:
        query: (batch, heads, queries, head_dim).
        key, value: (batch, kv_heads, keys, head_dim) and (batch, kv_heads, keys, value_dim).
        attention_mask: broadcastable to (batch, heads, queries, keys). Bool, True = may attend;
            a float is added to the scores, and hides where it is at or below half of its dtype's
            lowest number, which is how transformers writes "hidden" (in a `ScoreBias` only -inf
            hides); None is causal for more than one query if ``is_causal`` (or else the module's
            own ``is_causal``) says so, from the first key on. A query that a mask of either kind
            hides everything from is padding, and gets zeros; eager gives it the mean of the values.
        returns: (batch, queries, heads, value_dim), and the weights (batch, heads, queries, keys)
            before dropout where ``output_attentions`` asks for them, None elsewhere.

    Raises:
        OptionError: an option that cannot be honoured.
        MaskError, ShapeError, DTypeError, DeviceError: what does not fit together.
    """
    for name, what in REFUSED.items():
        if options.get(name) is not None:
            _refuse(name, what, module)
    query, key, value = _settled(query, key, value)
    scores = _scores(module, query, key, attention_mask, options)
    matrix = AttentionMatrix(
        query,
        key,
        mask=scores.mask,
        score_bias=scores.score_bias,
        scale=options.get("scaling"),
        softcap=options.get("softcap"),
        sink=options.get("s_aux"),
    )
    dropout = float(options.get("dropout", 0.0))
    outputs = matrix @ value if dropout == 0 else matrix.dropped(value, dropout_p=dropout)
    weights = matrix.dense(limit=None) if _wants_weights(options) else None
    return call_hook(matrix, value, outputs).transpose(1, 2).contiguous(), weights


class _Scores(NamedTuple):
    mask: Mask
    score_bias: ScoreBias


def _scores(
    module: nn.Module, query: Tensor, key: Tensor, given: object, options: dict[str, Any]
) -> _Scores:
    """Who may attend, and what is added to the scores."""
    mask, score_bias = Mask(), ScoreBias()
    if isinstance(given, LazyMask) and given.written is not None:
        given = given.written  # someone has read it, and may have changed it
    if given is None:
        mask = _without_mask(module, query, options)
    elif isinstance(given, LazyMask):
        mask = given.mask
    elif not isinstance(given, Tensor):
        _refuse("attention_mask", f"a {type(given).__name__} in the place of a tensor", module)
    elif given.dtype == torch.bool:
        meaning = getattr(given, MEANING, None)
        mask = Mask.may_attend(_four_axes(given), axes=AXES) if meaning is None else meaning
    else:
        mask, score_bias = taken_apart(_four_axes(_narrowed(given, query)), axes=AXES)
    if options.get("cu_seq_lens_q") is not None and not mask.of_kind(Segments):
        mask &= _packed(module, query, key, options)
    if (added := options.get("position_bias")) is not None:
        score_bias += ScoreBias.dense(_four_axes(_narrowed(added, query)), axes=AXES)
    return _Scores(mask, score_bias)


def _narrowed(added: Tensor, query: Tensor) -> Tensor:
    """Return a float64 mask in the dtype of the scores; no other dtype is wider than that."""
    if added.dtype != torch.float64:
        return added
    return cast_bias(added, torch.promote_types(query.dtype, torch.float32))


def _without_mask(module: nn.Module, query: Tensor, options: dict[str, Any]) -> Mask:
    """What a layer without a mask means: transformers' rule for ``is_causal``, and its window."""
    causal = options.get("is_causal")
    if causal is None:
        # To a model that adds its masks, and so has none for sdpa, none means that all is seen.
        causal = getattr(module, "is_causal", True) and not is_made_for_eager(type(module))
    window = options.get("sliding_window")
    reach = None if window is None else window - 1
    if causal and query.shape[2] > 1:
        return Mask.window(reach, 0, align="top-left")
    return Mask() if reach is None else Mask.window(reach, reach, align="bottom-right")


def _packed(module: nn.Module, query: Tensor, key: Tensor, options: dict[str, Any]) -> Mask:
    """Sequences packed into one row, each from one entry of ``cu_seq_lens`` to the next."""
    length = query.shape[2]
    if query.shape[0] != 1 or key.shape[2] != length:
        _refuse("cu_seq_lens_q", "packed sequences in a batch, or with earlier keys", module)
    return Mask.packed(options["cu_seq_lens_q"], options.get("cu_seq_lens_k"))


def _four_axes(tensor: Tensor) -> Tensor:
    """As broadcasting would read it: missing axes are leading ones."""
    return tensor[(None,) * (len(AXES.split()) - tensor.dim())]


def _settled(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One dtype where autocast is on, as torch's own operator has it there; and one batch."""
    query, key, value = as_autocast_has_it(query, key, value)
    batch = max(query.shape[0], key.shape[0])
    if query.shape[0] != key.shape[0]:  # learned queries are shared by the batch
        query, key, value = (
            x.expand(batch, -1, -1, -1) if x.shape[0] == 1 else x for x in (query, key, value)
        )
    return query, key, value


def _wants_weights(options: dict[str, Any]) -> bool:
    """Whether the caller of the model asked for weights. Some models keep that to themselves."""
    if options.get("output_attentions"):
        return True
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if torch.compiler.is_compiling() or not hasattr(capturing, "_active_collector"):
        return False
    collected = capturing._active_collector.get()  # type: ignore[union-attr]
    return any("attentions" in name for name in collected or ())


def _refuse(name: str, what: str, module: nn.Module) -> NoReturn:
    raise OptionError(
        saw=f"{name} from {type(module).__name__}: {what}",
        needed="scores of q.k, a softcap, a score bias, a mask, and one sink for each head",
        do='attn_implementation="eager" or "sdpa" for this model',
    )
