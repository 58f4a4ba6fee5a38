"""An attention call of a model, as the observation that statistics are made of."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from headwise import reference
from headwise.masks.bound_mask import BoundMask
from headwise.matrix import AttentionMatrix
from headwise.scanning.calls import LayerCall
from headwise.scanning.modules import version_of
from headwise.scanning.statistics.observation import Observation, Sequences
from headwise.scanning.weights import as_floats


class Surroundings:
    """What is known beyond single calls of one model.

    Args:
        separators, specials: token ids.
        unembedding: (vocabulary, embed_dim), where there is one.
    """

    def __init__(
        self,
        separators: Collection[int] = (),
        specials: Collection[int] = (),
        *,
        unembedding: Tensor | None = None,
    ) -> None:
        self._separators, self._specials = tuple(separators), tuple(specials)
        self._unembedding = unembedding
        self._last: tuple[str, Tensor | None] = (
            "",
            None,
        )  # block, and real queries, of self-attention

    def observe(
        self, call: LayerCall, sequences: Sequences, *, heads: Tensor | None = None
    ) -> Observation:
        """The call as an observation, of some heads or all."""
        matrix, values = call.matrix, call.values
        # A model may have changed its head outputs since they were shown.
        outputs = call.outputs if version_of(call.outputs) == call.version >= 0 else None
        out_proj, unembedding = call.out_proj, self._unembedding
        if heads is not None:
            matrix, values = _of_heads(matrix, values, heads)
            outputs = None if outputs is None else outputs.index_select(1, heads)
            out_proj = None if out_proj is None else out_proj.index_select(0, heads)
        width = None if out_proj is None else out_proj.shape[-1]
        residual = call.residual
        return Observation(
            matrix=matrix,
            sequences=sequences,
            values=values,
            outputs=outputs,
            out_proj=out_proj,
            residual=residual if residual is not None and residual.shape[-1] == width else None,
            unembedding=unembedding
            if unembedding is not None and unembedding.shape[-1] == width
            else None,
        )

    def sequences_of(self, call: LayerCall) -> Sequences:
        """What is known of the tokens of a call; to be asked of every call, in order."""
        batch, _, queries, keys = call.matrix.shape
        real = _real_keys(call.matrix, _bound(call.matrix), call.own_key)
        own_key = call.own_key
        if own_key is not None and own_key + queries <= keys:
            real_queries = real[:, own_key : own_key + queries]
            self._last = call.block, real_queries
        else:
            own_key, real_queries = None, self._of_the_block(call, (batch, queries), real)
        tokens = call.tokens
        return Sequences(
            real_queries=real_queries,
            real_keys=real,
            own_key=own_key,
            tokens=tokens,
            separators=_among(tokens, self._separators),
            specials=_among(tokens, self._specials),
            dropped=call.dropped,
        )

    def _of_the_block(self, call: LayerCall, shape: tuple[int, int], real: Tensor) -> Tensor:
        """Queries of cross attention: those of the self-attention before it in its block."""
        block, known = self._last
        if call.block and block == call.block and known is not None and known.shape == shape:
            return known
        return real.new_ones(shape)


def unembedding_of(model: Any) -> Tensor | None:
    """(vocabulary, embed_dim): what a language model of transformers, or of headwise, ends with."""
    named = getattr(model, "get_output_embeddings", None)
    module = named() if named is not None else getattr(model, "unembedding", None)
    weight = module if isinstance(module, Tensor) else getattr(module, "weight", None)
    weight = as_floats(weight.detach()) if isinstance(weight, Tensor) else None
    return weight if weight is not None and weight.dim() == 2 else None


def _bound(matrix: AttentionMatrix) -> BoundMask:
    batch, heads, queries, keys = matrix.shape
    return matrix.mask.bind(
        batch=batch, heads=heads, queries=queries, keys=keys, device=matrix.q.device
    )


def _real_keys(matrix: AttentionMatrix, bound: BoundMask, own_key: int | None) -> Tensor:
    """(batch, keys): False where a key is hidden from every query, other than by a band.

    Behind the last query's own key a band hides what a cache has room for.
    """
    batch, device = len(matrix.q), matrix.q.device
    real = torch.ones(batch, bound.keys, dtype=torch.bool, device=device)
    if bound.key_lengths is not None:
        real &= torch.arange(bound.keys, device=device) < bound.key_lengths[:, None]
    for _, key_ids in bound.segment_ids:
        real &= key_ids >= 0
    hides = [bias > -torch.inf for bias in matrix.score_bias.tensors if bias.shape[2] == 1]
    for allowed in (*bound.dense, *hides):
        real &= allowed.amax((1, 2)).expand(batch, bound.keys)
    if own_key is not None and bound.upper is not None:
        real[:, own_key + bound.queries :] = False
    return real


def _among(tokens: Tensor | None, chosen: tuple[int, ...]) -> Tensor | None:
    if tokens is None or not chosen:
        return None
    return torch.isin(tokens, torch.tensor(chosen, device=tokens.device, dtype=tokens.dtype))


def _of_heads(
    matrix: AttentionMatrix, values: Tensor, heads: Tensor
) -> tuple[AttentionMatrix, Tensor]:
    """The matrix of some query heads, each with the keys and the values that it reads."""
    count = matrix.shape[1]
    k = reference.share_heads(matrix.k, heads=count).index_select(1, heads)
    v = reference.share_heads(values, heads=count).index_select(1, heads)
    chosen = AttentionMatrix(
        matrix.q.index_select(1, heads),
        k,
        mask=matrix.mask.of_heads(heads),
        score_bias=matrix.score_bias.of_heads(heads),
        scale=matrix.scale,
        softcap=matrix.softcap,
        sink=None if matrix.sink is None else matrix.sink.index_select(0, heads),
    )
    return chosen, v
