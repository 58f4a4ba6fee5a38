"""Attention of a sequence whose tokens are divided over ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.masks.clause import Span
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.matrix.operator import AttentionMatrix
from headwise.sharding.checks import Check
from headwise.sharding.collectives import (
    TokenGroup,
    exchange_heads_for_tokens,
    exchange_tokens_for_heads,
    gather_tokens,
)
from headwise.sharding.sequence.layout import SequenceLayout
from headwise.sharding.sequence.plan import (
    LIMIT,
    OperandSizes,
    SequencePlan,
    Way,
    choose_way,
    plan_sequence,
    require_options,
)
from headwise.sharding.sequence.ring import attend_by_ring
from headwise.sharding.sequence.scores import (
    SequenceArguments,
    SequenceScores,
    agree_on_score_settings,
)
from headwise.support.tracing import cast_like_autocast


def attend_by_heads(q: Tensor, k: Tensor, v: Tensor, scores: SequenceScores) -> Tensor:
    """Exchange tokens for heads, attend as without ranks, and exchange back (arXiv:2309.14509).

    Where ranks are a multiple of the kv_heads, each kv head goes to several ranks.
    """
    ranks, rank, options = scores.queries.size, scores.queries.rank, scores.options
    heads, kv_heads = q.shape[1], k.shape[1]
    if copies := ranks // kv_heads if kv_heads < ranks else 0:
        k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    each = heads // ranks
    index = torch.arange(rank * each, (rank + 1) * each, device=q.device)
    matrix = AttentionMatrix(
        _exchange_tokens_in_layout(q, scores.queries, scores.query_layout),
        _exchange_tokens_in_layout(k, scores.keys, scores.key_layout),
        mask=options.mask.of_heads(index),
        score_bias=options.score_bias.of_heads(index),
        scale=options.scale,
        softcap=options.softcap,
        sink=None if options.sink is None else options.sink.index_select(0, index),
    )
    out = matrix @ _exchange_tokens_in_layout(v, scores.keys, scores.key_layout)
    tokens_first = scores.query_layout.to_rank_order(out.permute(2, 0, 1, 3), dim=0)
    return exchange_heads_for_tokens(tokens_first, scores.queries).permute(1, 2, 0, 3)


def _exchange_tokens_in_layout(x: Tensor, group: TokenGroup, layout: SequenceLayout) -> Tensor:
    """Return some heads of all tokens, (batch, heads/n, tokens, width)."""
    return layout.to_sequence_order(
        exchange_tokens_for_heads(x.permute(2, 0, 1, 3), group), dim=0
    ).permute(1, 2, 0, 3)


def gather_keys_or_values(x: Tensor, scores: SequenceScores) -> Tensor:
    """Return the keys or values of all ranks, (batch, kv_heads, keys, width)."""
    gathered = gather_tokens(x.permute(2, 0, 1, 3), scores.keys)
    return scores.key_layout.to_sequence_order(gathered, dim=0).permute(1, 2, 0, 3)


def attend_by_gather(q: Tensor, k: Tensor, v: Tensor, scores: SequenceScores) -> Tensor:
    """Gather all keys and values; each run of this rank's queries is a matrix of its own."""
    k, v = (gather_keys_or_values(x, scores) for x in (k, v))
    # A rank without queries attends with none: its keys and the sink are then in its graph too.
    runs, outputs = scores.query_runs or (Span(0, 0),), []
    for run, part in zip(runs, q.split([run.size for run in runs], 2), strict=True):
        first, stop = seen = scores.visible_key_span(run)
        keys, values = (x[:, :, first:stop] for x in (k, v))
        outputs.append(
            scores.matrix_of_query_and_key_run(part, keys, queries=run, keys=seen) @ values
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


_WAYS = {"heads": attend_by_heads, "gather": attend_by_gather, "ring": attend_by_ring}


def attend(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    mesh: DeviceMesh,
    *,
    by: Way | None = None,
    layout: SequenceLayout | None = None,
    key_layout: SequenceLayout | None = None,
    limit: int | None = LIMIT,
    check: Check = "first",
    mask: Mask | None = None,
    score_bias: ScoreBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "batch heads queries value_dim"]:
    """Compute the head outputs of this rank's queries: a collective, also in the backward pass.

    The result and all gradients are those of ``AttentionMatrix(q, k, ...) @ v`` on the whole
    sequence; under autocast operands are cast to its dtype. All ranks of the mesh make the call,
    and all run the backward pass. The gradients of ``sink`` and of tensors in ``score_bias`` are
    this rank's share, to be summed over ranks like those of every parameter that all ranks hold.

    Args:
        q: the queries of this rank.
        k: the keys of this rank.
        v: the values of these keys.
        mesh: a mesh of one dimension, such as ``mesh["sequence"]`` of a larger one.
        by: "heads" exchanges tokens for heads, "gather" gathers keys and values, "ring" passes them
            from rank to rank. None takes the first that fits; `explain_attend` says which, and why.
        layout: the positions that each rank holds; None for one run on each, in their order.
        key_layout: the same for keys; None for ``layout`` where ranks hold as many keys as
            queries, else one run on each.
        limit: bytes that gathered keys and values may take on a rank; None for no limit.
        check: the calls in which ranks compare contents: the "first" of some shapes (the others
            compare shapes), "always", or "never", as in a compiled graph. Then nothing is sent,
            and without a layout all ranks hold as many tokens.
        mask: as in `headwise.AttentionMatrix`, for the whole sequence.
        score_bias: the same.
        scale: the same.
        softcap: the same.
        sink: the logits of all heads.

    Raises:
        OptionError: a mesh, layout or ``by`` that does not fit, or ranks that differ.
        ShapeError, DTypeError, DeviceError, MaskError: operands that do not fit together.
    """
    arguments = SequenceArguments(layout, key_layout, mask, score_bias, scale, softcap, sink)
    return _attend_with((q, k, v), mesh, arguments, by, limit, check)


def _attend_with(
    operands: tuple[Tensor, Tensor, Tensor],
    mesh: DeviceMesh,
    arguments: SequenceArguments,
    by: Way | None,
    limit: int | None,
    check: Check,
) -> Tensor:
    call, further = "attend(q, k, v, mesh)", partial(require_options, by, limit, check)
    scores = agree_on_score_settings(call, operands, mesh, arguments, further, check)
    q, k, v = cast_like_autocast(*operands)
    way, _ = choose_way(scores, OperandSizes.of(q, k, v), by=by, limit=limit)
    return _WAYS[way](q, k, v, scores)


def explain_attend(
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch kv_heads keys head_dim"],
    v: Float[Tensor, "batch kv_heads keys value_dim"],
    mesh: DeviceMesh,
    *,
    by: Way | None = None,
    limit: int | None = LIMIT,
    check: Check = "first",
    **options: Any,
) -> SequencePlan:
    """Return the way of `attend` for the same arguments, with the reason and the cost.

    All ranks make the call.

    Args:
        q: the queries of this rank.
        k: the keys of this rank.
        v: the values of the same keys.
        mesh: a mesh of one dimension.
        by: as in `attend`.
        limit: as in `attend`.
        check: as in `attend`; this call compares everything.
        **options: all others of `attend`.

    Raises:
        OptionError, ShapeError, DTypeError, DeviceError, MaskError: as `attend`.
    """
    call, arguments = "explain_attend(q, k, v, mesh)", SequenceArguments(**options)
    further = partial(require_options, by, limit, check)
    scores = agree_on_score_settings(call, (q, k, v), mesh, arguments, further)
    sizes = OperandSizes.of(*cast_like_autocast(q, k, v))
    return plan_sequence(scores, sizes, by=by, limit=limit)
