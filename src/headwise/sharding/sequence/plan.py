"""Choice of the way in which ranks share the attention of a sequence, with its cost.

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
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.masks.clause import MatrixSizes
from headwise.sharding.checks import CHECKS
from headwise.sharding.sequence.layout import SequenceLayout
from headwise.sharding.sequence.scores import SequenceScores
from headwise.support.arguments import is_number
from headwise.support.text import describe_value, human_bytes

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


class OperandSizes(NamedTuple):
    """Sizes of q, k and v that decide about a way."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> OperandSizes:
        """Return the sizes of a rank's queries, keys and values."""
        return cls(q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.element_size())


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


def plan_sequence(
    scores: SequenceScores, operands: OperandSizes, *, by: Way | None, limit: int | None
) -> SequencePlan:
    """Choose the way of a call as `choose_way` does, and compute its cost."""
    way, why = choose_way(scores, operands, by=by, limit=limit)
    counts = (*_COSTS[way](scores, operands), _count_peak_elements(scores, operands, way))
    forward, backward, held, peak = (count * operands.itemsize for count in counts)
    return SequencePlan(way, why, forward, backward, held, peak, _count_pairs_by_rank(scores, way))


def choose_way(
    scores: SequenceScores, operands: OperandSizes, *, by: Way | None, limit: int | None
) -> tuple[Way, str]:
    """Return the way of a call, and the reason.

    Raises:
        OptionError: ``by="heads"`` where the heads do not divide.
    """
    refusal = find_heads_refusal(operands, scores.queries.size)
    if by == "heads" and refusal:
        raise OptionError(
            saw=f'by="heads" with {operands.heads} heads and {operands.kv_heads} kv_heads over '
            f"{scores.queries.size} ranks",
            needed="ranks that divide the heads, and that divide the kv_heads or are a multiple "
            "of them",
            do='by="gather", by="ring", or another number of ranks',
        )
    if by:
        return by, "as asked"
    if refusal is None:
        return "heads", "each rank gets whole heads: the kernel and its result are the unsharded"
    gathered = _count_cost_by_gather(scores, operands)[2] * operands.itemsize
    if limit is None or gathered <= limit:
        return "gather", f"{refusal}; all keys and values take {human_bytes(gathered)}"
    return "ring", (
        f"{refusal}; all keys and values would take {human_bytes(gathered)}, the limit is "
        f"{human_bytes(limit)}"
    )


def find_heads_refusal(operands: OperandSizes, ranks: int) -> str | None:
    """Return why heads cannot be divided over ranks, or None."""
    if operands.heads % ranks:
        return f"{ranks} ranks do not divide {operands.heads} heads"
    if operands.kv_heads % ranks and ranks % operands.kv_heads:
        return f"{operands.kv_heads} kv_heads and {ranks} ranks do not divide each other"
    return None


# ---- costs, in elements ------------------------------------------------------------------------


def _count_cost_by_heads(scores: SequenceScores, operands: OperandSizes) -> tuple[int, int, int]:
    sizes, ranks = scores.sizes, scores.queries.size
    per_query = operands.heads * (operands.head_dim + operands.value_dim)
    per_key = max(operands.kv_heads, ranks) * (operands.head_dim + operands.value_dim)
    others = ranks - 1
    to_heads = (
        scores.queries.local_tokens * operands.heads * operands.head_dim
        + scores.keys.local_tokens * per_key
    )
    back = (sizes.queries - scores.queries.local_tokens) * operands.heads * operands.value_dim
    forward = to_heads * others + back
    # In the backward pass outputs go there, and the gradients of queries, keys and values back.
    there = scores.queries.local_tokens * operands.heads * operands.value_dim * others
    home = (sizes.queries - scores.queries.local_tokens) * operands.heads * operands.head_dim
    home += (sizes.keys - scores.keys.local_tokens) * per_key
    held = sizes.queries * per_query + sizes.keys * per_key
    return tuple(  # type: ignore[return-value]
        sizes.batch * count // ranks for count in (forward, there + home, held)
    )


def _count_elements_per_key(scores: SequenceScores, operands: OperandSizes) -> int:
    return scores.sizes.batch * operands.kv_heads * (operands.head_dim + operands.value_dim)


def _count_cost_by_gather(scores: SequenceScores, operands: OperandSizes) -> tuple[int, int, int]:
    each, keys = _count_elements_per_key(scores, operands), scores.keys
    forward = max(keys.lengths) * (keys.size - 1)  # parts are padded to the longest
    return each * forward, each * (keys.total_tokens - keys.local_tokens), each * keys.total_tokens


def _count_cost_by_ring(scores: SequenceScores, operands: OperandSizes) -> tuple[int, int, int]:
    each, keys = _count_elements_per_key(scores, operands), scores.keys
    passed = keys.total_tokens - keys.lengths[(keys.rank + 1) % keys.size]
    return each * passed, each * (passed + keys.total_tokens - keys.local_tokens), 0


_COSTS = {
    "heads": _count_cost_by_heads,
    "gather": _count_cost_by_gather,
    "ring": _count_cost_by_ring,
}


def _count_peak_elements(scores: SequenceScores, operands: OperandSizes, way: Way) -> int:
    queries, keys, batch = scores.queries, scores.keys, scores.sizes.batch
    q = batch * queries.local_tokens * operands.heads * operands.head_dim
    out = batch * queries.local_tokens * operands.heads * operands.value_dim
    local = _count_elements_per_key(scores, operands) * keys.local_tokens
    if way == "heads":
        exchanged = local * max(operands.kv_heads, queries.size) // operands.kv_heads
        return 2 * (q + exchanged) + 4 * out
    if way == "gather":
        times = 3 if len(scores.query_runs) <= 1 else 4
        return q + 2 * out + times * _count_elements_per_key(scores, operands) * keys.total_tokens
    return 2 * (q + out) + (6 if keys.size <= 2 else 8) * local


# ---- work --------------------------------------------------------------------------------------


def _count_pairs_by_rank(scores: SequenceScores, way: Way) -> tuple[int, ...]:
    layout = scores.query_layout
    pairs = [count_pairs_in_bands(scores, layout, rank) for rank in range(layout.ranks)]
    if way != "heads":
        return tuple(pairs)
    return (sum(pairs) // layout.ranks,) * layout.ranks  # the same queries for as many heads


def count_pairs_in_bands(scores: SequenceScores, layout: SequenceLayout, rank: int) -> int:
    """Return the number of (query, key) pairs inside the mask's bands, for a rank's queries."""
    band, sizes = scores.mask.band, scores.sizes
    if band is None:
        return layout.lengths[rank] * sizes.keys
    positions = layout.positions(rank)
    whole = MatrixSizes(*sizes)
    first, stop = band.key_interval_per_query(positions, slice(None), whole)
    seen = stop.clamp(max=sizes.keys) - first.clamp(min=0)
    return int(torch.clamp(seen, min=0).sum())
