"""Attention of a sequence whose tokens are divided over ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.sharding.process_group_checks import Check
from headwise.sharding.sequence.exchange_heads_or_gather_keys import (
    attend_by_gather,
    attend_by_heads,
)
from headwise.sharding.sequence.ring import attend_by_ring
from headwise.sharding.sequence.sequence_layout import SequenceLayout
from headwise.sharding.sequence.sequence_plan import (
    LIMIT,
    OperandSizes,
    SequencePlan,
    Way,
    choose_way,
    plan_sequence,
    require_options,
)
from headwise.sharding.sequence.sequence_score_settings import (
    SequenceArguments,
    agree_on_score_settings,
)
from headwise.support.tracing import cast_like_autocast

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
