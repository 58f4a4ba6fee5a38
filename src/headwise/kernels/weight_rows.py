"""Rows of the weights, written down, and the largest weights of each row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headwise import reference
from headwise.kernels import tiles
from headwise.kernels.bound_scores import BoundScores
from headwise.kernels.tiled_op import pack, unpack
from headwise.support.nested_tensors import leaves, mapped
from headwise.support.tracing import needs_plain_torch, without_autocast


def weights_at(problem: BoundScores, index: Tensor) -> Tensor:
    """The weights of chosen queries, (batch, heads, rows, keys)."""
    exact = problem.accumulate
    with without_autocast(problem.q):
        s = reference.scores_at(
            problem.q.index_select(2, index).to(exact),
            problem.k.to(exact),
            index,
            mask=problem.mask,
            score_bias=problem.bias,
            scale=problem.scale,
            softcap=problem.softcap,
        )
        return reference.weights_of(s, problem.sink).to(problem.q.dtype)


def largest(problem: BoundScores, count: int, index: Tensor) -> tuple[Tensor, Tensor]:
    """The largest weights of chosen queries, and their keys, some queries at a time."""
    batch, heads, _, _ = problem.q.shape
    step = max(1, tiles.TILE_ELEMENTS // max(1, batch * heads * problem.k.shape[2]))
    # ONNX cannot split at a length that varies, and its graph is dense in any case.
    blocks = (index,) if torch.onnx.is_in_onnx_export() else torch.split(index, step)
    found = [_largest_of_block(problem, count, block) for block in blocks]
    values, indices = zip(*found, strict=True)
    return torch.cat(values, 2), torch.cat(indices, 2)


def _largest_of_block(problem: BoundScores, count: int, index: Tensor) -> tuple[Tensor, Tensor]:
    # torch.func takes no checkpoint.
    if not torch.is_grad_enabled() or needs_plain_torch():
        values, indices = weights_at(problem, index).topk(count, dim=-1)
        return values, indices
    # Recomputed in the backward pass: kept rows would add up to queries x keys. Every tensor is an
    # argument, so that torch saves it and raises its error where it was changed in place since.
    whole = (pack(problem), index)
    tensors = [x for x in leaves(whole) if isinstance(x, Tensor)]
    form = mapped(lambda x: Tensor if isinstance(x, Tensor) else x, whole)

    def recomputed(*tensors: Any) -> tuple[Tensor, Tensor]:
        each = iter(tensors)
        packed, rows = mapped(lambda x: next(each) if x is Tensor else x, form)
        values, indices = weights_at(unpack(packed), rows).topk(count, dim=-1)
        return values, indices

    found: tuple[Tensor, Tensor] = checkpoint(
        recomputed, *tensors, use_reentrant=False, preserve_rng_state=False
    )
    return found
