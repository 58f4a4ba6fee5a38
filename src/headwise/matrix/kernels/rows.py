"""Dense parts of the attention matrix: rows, a diagonal, the largest weights of each row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headwise.function import stages
from headwise.masks.score_bias import cast_biases_for_sum
from headwise.matrix.kernels import tiles
from headwise.matrix.kernels.dispatch import run_kernel
from headwise.matrix.kernels.input import KernelInput
from headwise.matrix.kernels.kernel import Task
from headwise.matrix.kernels.tiled import softmax_shift
from headwise.matrix.kernels.tiled_op import (
    pack_arguments,
    restore_tensors,
    separate_tensors,
    unpack_arguments,
)
from headwise.support.tracing import needs_plain_torch, without_autocast


def weights_of_queries(problem: KernelInput, index: Tensor) -> Tensor:
    """Return the weights of the queries in ``index``, (batch, heads, rows, keys)."""
    exact = problem.accumulation_dtype
    with without_autocast(problem.q):
        s = stages.scores_at_rows(
            problem.q.index_select(2, index).to(exact),
            problem.k.to(exact),
            index,
            mask=problem.mask,
            score_bias=problem.bias,
            scale=problem.scale,
            softcap=problem.softcap,
        )
        return stages.weights_from_scores(s, problem.sink).to(problem.q.dtype)


def diagonal_weights(problem: KernelInput, offset: int) -> Tensor:
    """Return the weights of the pairs (query i, key i + offset), (batch, heads, pairs)."""
    (_, heads, queries, _), keys = problem.q.shape, problem.k.shape[2]
    first, stop = max(0, -offset), max(max(0, -offset), min(queries, keys - offset))
    rows = torch.arange(first, stop, device=problem.q.device)
    exact = problem.accumulation_dtype
    q = problem.q[:, :, first:stop].to(exact)
    k = problem.k[:, :, first + offset : stop + offset].to(exact)
    s = problem.scale * (q * stages.repeat_kv_heads(k, heads=heads)).sum(-1)
    if problem.softcap is not None:
        s = problem.softcap * torch.tanh(s / problem.softcap)
    for part in cast_biases_for_sum(problem.bias.parts_at_pairs(rows, rows + offset), exact):
        s = s + part
    s = s.masked_fill(~problem.mask.evaluate_pairs(rows, rows + offset), -torch.inf)
    result = run_kernel(Task(problem))
    sink = None if problem.sink is None else problem.sink.detach()
    shift = softmax_shift(result.peak.detach(), sink)[..., first:stop]
    return torch.exp(s - shift - result.log_sum[..., first:stop]).to(problem.q.dtype)


def largest_weights(problem: KernelInput, count: int, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest weights of the queries in ``index``, and their keys.

    Rows are computed in blocks of about one tile, so memory does not grow with queries x keys.
    """
    batch, heads, _, _ = problem.q.shape
    step = max(1, tiles.TILE_ELEMENTS // max(1, batch * heads * problem.k.shape[2]))
    # ONNX cannot split at a length that varies, and its graph is dense in any case.
    blocks = (index,) if torch.onnx.is_in_onnx_export() else torch.split(index, step)
    pairs = [_largest_weights_of_query_block(problem, count, block) for block in blocks]
    values, indices = zip(*pairs, strict=True)
    return torch.cat(values, 2), torch.cat(indices, 2)


def _largest_weights_of_query_block(
    problem: KernelInput, count: int, index: Tensor
) -> tuple[Tensor, Tensor]:
    tensors, form = separate_tensors((pack_arguments(problem), index))
    has_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    # torch.func does not support checkpoint.
    if not has_gradient or needs_plain_torch():
        values, indices = weights_of_queries(problem, index).topk(count, dim=-1)
        return values, indices

    # Recompute rows in the backward pass: saved rows would add up to queries x keys. Every tensor
    # is an argument, so that torch saves it and detects in-place changes.
    def recomputed(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        packed, rows = restore_tensors(tensors, form)
        values, indices = weights_of_queries(unpack_arguments(packed), rows).topk(count, dim=-1)
        return values, indices

    largest: tuple[Tensor, Tensor] = checkpoint(
        recomputed, *tensors, use_reentrant=False, preserve_rng_state=False
    )
    return largest
