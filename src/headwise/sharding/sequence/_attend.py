"""Attention of a sequence whose tokens are divided over ranks: three ways, and their costs.

For L tokens of queries and keys over n ranks, H heads, H_kv kv_heads, of width d, a rank sends in
one call, in elements (keys and values of different widths count with their mean):

| way | forward | backward | held beside the operands |
| --- | --- | --- | --- |
| heads | (2 H + 2 max(H_kv, n)) L d (n - 1) / n^2 | the same | this rank's heads of all tokens |
| gather | 2 L H_kv d (n - 1) / n | the same | all keys and values |
| ring | 2 L H_kv d (n - 1) / n | twice that | two parts of keys and values |

The ring passes keys and values around once more in the backward pass, and sends each part of their
gradient home directly.

Memory of one forward and backward pass, beside q, k, v and the scratch of three tiles: for Q, K, V
and O, the sizes of this rank's queries, keys, values and outputs, and A that of all keys and values
in float32 or float64,

    heads     2 (Q + K + V) + 4 O      exchanged operands, their outputs and all gradients
    gather    Q + 2 O + 4 A            3 A where this rank's queries are one run
    ring      2 Q + 2 O + 8 (K + V)    6 (K + V) with two ranks
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.errors import OptionError
from headwise.masks.clause import WHOLE, Span
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.matrix.operator import AttentionMatrix
from headwise.sharding.agreement import CHECKS, Check
from headwise.sharding.sequence import ring
from headwise.sharding.sequence.layout import SequenceLayout
from headwise.sharding.sequence.scores import SequenceOptions, SequenceScores, agree_on_scores
from headwise.support.arguments import is_number
from headwise.support.text import describe_value, human_bytes
from headwise.support.tracing import cast_like_autocast

Way = Literal["heads", "gather", "ring"]
WAYS: tuple[str, ...] = get_args(Way)
LIMIT = 2**31  # bytes of gathered keys and values


@dataclass(frozen=True)
class SequencePlan:
    """The way of one call of `headwise.sharding.attend`, and its cost on this rank.

    Attributes:
        by: "heads", "gather" or "ring".
        why: the reason.
        sent_forward: bytes that this rank sends in the forward pass.
        sent_backward: bytes that it sends in the backward pass.
        held: bytes of what arrives, and is kept for the backward pass: heads of all tokens,
            gathered keys and values, or nothing.
        peak: most bytes of a forward and a backward pass beside q, k and v: outputs, gradients and
            transfers, without the kernel's scratch.
        work: for each rank the number of (query, key) pairs inside the mask's bands.
    """

    by: Way
    why: str
    sent_forward: int
    sent_backward: int
    held: int
    peak: int
    work: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Largest work of a rank over the mean, less 1; 0 for equal work."""
        mean = sum(self.work) / len(self.work)
        return max(self.work) / mean - 1 if mean else 0.0

    def __str__(self) -> str:
        return (
            f"by {self.by}: {self.why}\n"
            f"  sent    {human_bytes(self.sent_forward)} forward, "
            f"{human_bytes(self.sent_backward)} backward\n"
            f"  memory  {human_bytes(self.held)} held for the backward pass, "
            f"{human_bytes(self.peak)} at its peak\n"
            f"  work    the busiest rank has {100 * self.imbalance:.1f} % more than the mean"
        )


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
        scores.queries.exchange_for_heads(q),
        scores.keys.exchange_for_heads(k),
        mask=options.mask.of_heads(index),
        score_bias=options.score_bias.of_heads(index),
        scale=options.scale,
        softcap=options.softcap,
        sink=None if options.sink is None else options.sink.index_select(0, index),
    )
    return scores.queries.exchange_for_tokens(matrix @ scores.keys.exchange_for_heads(v))


def attend_by_gather(q: Tensor, k: Tensor, v: Tensor, scores: SequenceScores) -> Tensor:
    """Gather all keys and values; each run of this rank's queries is a matrix of its own."""
    k, v = (scores.keys.gather(x) for x in (k, v))
    # A rank without queries attends with none: its keys and the sink are then in its graph too.
    runs, outputs = scores.queries.runs or (Span(0, 0),), []
    for run, part in zip(runs, q.split([run.size for run in runs], 2), strict=True):
        first, stop = seen = scores.visible_key_span(run)
        keys, values = (x[:, :, first:stop] for x in (k, v))
        outputs.append(
            scores.matrix_of_query_and_key_run(part, keys, queries=run, keys=seen) @ values
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


_WAYS = {"heads": attend_by_heads, "gather": attend_by_gather, "ring": ring.attend_by_ring}


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
    options = SequenceOptions.given(layout, key_layout, mask, score_bias, scale, softcap, sink)
    return _attend_with((q, k, v), mesh, options, by, limit, check)


def _attend_with(
    operands: tuple[Tensor, Tensor, Tensor],
    mesh: DeviceMesh,
    options: SequenceOptions,
    by: Way | None,
    limit: int | None,
    check: Check,
) -> Tensor:
    call, further = "attend(q, k, v, mesh)", partial(require_options, by, limit, check)
    scores = agree_on_scores(call, operands, mesh, options, further, check)
    q, k, v = cast_like_autocast(*operands)
    way, _ = choose_way(scores, q, k, v, by=by, limit=limit)
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
    call, given = "explain_attend(q, k, v, mesh)", SequenceOptions.given(**options)
    further = partial(require_options, by, limit, check)
    scores = agree_on_scores(call, (q, k, v), mesh, given, further)
    q, k, v = cast_like_autocast(q, k, v)
    way, why = choose_way(scores, q, k, v, by=by, limit=limit)
    counts = _count_elements(way, scores, q, k, v)
    forward, backward, held, peak = (count * q.element_size() for count in counts)
    work = [count_pairs_in_bands(scores, rank) for rank in range(mesh.size())]
    if way == "heads":
        work = [sum(work) // mesh.size()] * mesh.size()  # the same queries for as many heads
    return SequencePlan(way, why, forward, backward, held, peak, tuple(work))


# ---- the choice --------------------------------------------------------------------------------


def require_options(
    by: str | None, limit: int | None, check: str
) -> tuple[str | None, int | None, str]:
    """Return them; raise OptionError unless ``by`` is a way and ``limit`` bytes, or None."""
    if check not in CHECKS:
        raise OptionError(
            saw=f"attend(check={describe_value(check)})",
            needed=" or ".join(f'"{choice}"' for choice in CHECKS),
            do=f'check="{CHECKS[0]}" is the default',
        )
    if by is not None and by not in WAYS:
        raise OptionError(
            saw=f"attend(by={describe_value(by)})",
            needed='"heads", "gather", "ring", or None for the one that fits',
            do="leave it out; explain_attend(...) names the way and the reason",
        )
    if limit is not None and not (is_number(limit) and limit >= 0):
        raise OptionError(
            saw=f"attend(limit={describe_value(limit)})",
            needed="bytes that gathered keys and values may take, or None for no limit",
            do=f"e.g. limit={LIMIT}",
        )
    return by, limit, check


def choose_way(
    scores: SequenceScores, q: Tensor, k: Tensor, v: Tensor, *, by: Way | None, limit: int | None
) -> tuple[Way, str]:
    """Return the way of a call, and the reason.

    Raises:
        OptionError: ``by="heads"`` where the heads do not divide.
    """
    heads, kv_heads, ranks = q.shape[1], k.shape[1], scores.queries.size
    refusal = find_heads_refusal(heads, kv_heads, ranks)
    if by == "heads" and refusal:
        raise OptionError(
            saw=f'by="heads" with {heads} heads and {kv_heads} kv_heads over {ranks} ranks',
            needed="ranks that divide the heads, and that divide the kv_heads or are a multiple "
            "of them",
            do='by="gather", by="ring", or another number of ranks',
        )
    if by:
        return by, "as asked"
    if refusal is None:
        return "heads", "each rank gets whole heads: the kernel and its result are the unsharded"
    _, _, held, _ = _count_elements("gather", scores, q, k, v)
    gathered = held * q.element_size()
    if limit is None or gathered <= limit:
        return "gather", f"{refusal}; all keys and values take {human_bytes(gathered)}"
    return "ring", (
        f"{refusal}; all keys and values would take {human_bytes(gathered)}, the limit is "
        f"{human_bytes(limit)}"
    )


def find_heads_refusal(heads: int, kv_heads: int, ranks: int) -> str | None:
    if heads % ranks:
        return f"{ranks} ranks do not divide {heads} heads"
    if kv_heads % ranks and ranks % kv_heads:
        return f"{kv_heads} kv_heads and {ranks} ranks do not divide each other"
    return None


def _count_elements(
    way: Way, scores: SequenceScores, q: Tensor, k: Tensor, v: Tensor
) -> tuple[int, int, int, int]:
    """Return what a rank sends forward and backward, what it holds, and its peak, in elements."""
    (batch, heads, _, head_dim), kv_heads, value_dim = q.shape, k.shape[1], v.shape[3]
    queries, keys = scores.queries, scores.keys
    ranks, width = queries.size, head_dim + value_dim
    local_q, local_out = (batch * queries.local_tokens * heads * n for n in (head_dim, value_dim))
    each = batch * kv_heads * width  # of one key
    local, others = each * keys.local_tokens, keys.total_tokens - keys.local_tokens
    if way == "heads":
        shared = max(kv_heads, ranks)
        away = queries.total_tokens - queries.local_tokens
        to_heads = (ranks - 1) * (
            queries.local_tokens * heads * head_dim + keys.local_tokens * shared * width
        )
        # In the backward pass outputs go there, and gradients of queries, keys and values back.
        there = (ranks - 1) * queries.local_tokens * heads * value_dim
        home = away * heads * head_dim + others * shared * width
        held = (queries.total_tokens * heads + keys.total_tokens * shared) * width
        sent = to_heads + away * heads * value_dim
        peak = 2 * (local_q + local * shared // kv_heads) + 4 * local_out
        forward, backward, held = (batch * n // ranks for n in (sent, there + home, held))
        return forward, backward, held, peak
    if way == "gather":
        sent = each * max(keys.lengths) * (ranks - 1)  # parts are padded to the longest
        held = each * keys.total_tokens
        times = 3 if len(queries.runs) <= 1 else 4
        return sent, each * others, held, local_q + 2 * local_out + times * held
    passed = each * (keys.total_tokens - keys.lengths[(keys.rank + 1) % ranks])
    peak = 2 * (local_q + local_out) + (6 if ranks <= 2 else 8) * local
    return passed, passed + each * others, 0, peak


def count_pairs_in_bands(scores: SequenceScores, rank: int) -> int:
    band, sizes = scores.mask.band, scores.sizes
    if band is None:
        return scores.queries.lengths[rank] * sizes.keys
    positions = scores.queries.layout.positions(rank)
    first, stop = band.key_interval_per_query(positions, WHOLE, sizes)
    seen = stop.clamp(max=sizes.keys) - first.clamp(min=0)
    return int(torch.clamp(seen, min=0).sum())
