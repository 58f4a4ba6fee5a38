"""Attention of a sequence over ranks by exchanged heads, and by gathered keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attention_matrix import AttentionMatrix
from headwise.masks.clause import Span
from headwise.sharding.collectives import (
    TokenGroup,
    exchange_heads_for_tokens,
    exchange_tokens_for_heads,
    gather_tokens,
)
from headwise.sharding.sequence.sequence_layout import SequenceLayout
from headwise.sharding.sequence.sequence_score_settings import SequenceScores


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
