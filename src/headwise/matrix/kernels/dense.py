"""Dense kernel: the results of the tiled kernel in queries x keys memory.

ONNX export and torch.func use it, and tests compare the tiled kernel with it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import dropout

from headwise.function import stages
from headwise.matrix.kernels import kernel, tiled, tiles
from headwise.matrix.kernels.kernel import KernelInput, KernelResult, Requested, Task
from headwise.support.tracing import is_autocast_enabled, is_recording_operators


class DenseKernel(kernel.Kernel):
    """Kernel in queries x keys memory, for every task."""

    name = "dense"

    def refusal_reason(self, task: Task) -> str | None:  # noqa: ARG002
        return None

    def run(self, task: Task) -> KernelResult:
        if task.dropout_p == 0 or task.v is None:
            return dense_result(task.problem, task.v, task.y, task.requested_statistics)
        p = stages.weights_from_scores(task.problem.scores_of_queries(), task.problem.sink)
        p = dropout(p, task.dropout_p)
        values = stages.repeat_kv_heads(task.v.to(p.dtype), heads=p.shape[1])
        return kernel.result_of_outputs_only((p @ values).to(task.v.dtype))

    def cost(self, task: Task) -> kernel.Cost:
        """Return the cost with scores, exponentials and weights in memory at the same time."""
        rows, keys = task.problem.q.shape[:3].numel(), task.problem.k.shape[2]
        memory = 3 * rows * keys * task.problem.accumulation_dtype.itemsize
        return kernel.Cost(tiles.count_operations(task), memory)


def attend_one_query(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
    """Return head outputs and the mean weights over heads for one query, or None.

    A shortcut like `sdpa.head_outputs_without_options`: no mask, bias, softcap or sink.
    """
    # First, since a graph holds only for the sizes that it compares.
    if is_recording_operators() or q.dtype != torch.float32 or is_autocast_enabled(q.device.type):
        return None
    if q.shape[2] != 1 or v.shape != k.shape or k.shape[1] != q.shape[1] or not k.numel():
        return None
    if v.dtype != q.dtype or v.device != q.device:
        return None
    p = (q @ k.mT * scale).softmax(-1)
    return p @ v, p.mean(1)


def dense_result(
    problem: KernelInput, v: Tensor | None, y: Tensor | None, requested: Requested
) -> KernelResult:
    exact, queries, keys = problem.accumulation_dtype, problem.q.shape[2], problem.k.shape[2]
    result = tiled.initial_result(problem.q, problem.k, v, y, requested)
    if 0 in (queries, keys):
        return result
    s, sink = problem.scores_of_queries(), problem.sink
    p = stages.weights_from_scores(s, sink)
    peak = s.amax(-1)
    shift = tiled.softmax_shift(peak.detach(), None if sink is None else sink.detach())
    # log Z, 0 in rows without keys and sink, and the sink's term of the entropy
    total = torch.exp(s - shift[..., None]).sum(-1)
    if sink is None:
        log_sum, sink_entropy = total.masked_fill(total == 0, 1.0).log(), torch.zeros_like(total)
    else:
        gap = (sink.to(s.dtype)[:, None] - shift).clamp(min=tiled.least_shifted_score(s.dtype))
        log_sum = (total + gap.exp()).log()
        sink_entropy = torch.exp(gap - log_sum) * (log_sum - gap)
    log_p = (s - (shift + log_sum)[..., None]).clamp(min=tiled.least_shifted_score(exact))
    out = result.out if v is None else p @ stages.repeat_kv_heads(v.to(exact), heads=p.shape[1])
    transposed = result.transposed if y is None else p.transpose(-2, -1) @ y.to(exact)
    cells = result.cells
    if requested.query_blocks:
        rows = tiles.block_membership(queries, requested.query_blocks, p)
        cells = rows.mT @ p @ tiles.block_membership(keys, requested.key_blocks, p)
    return KernelResult(
        out=out.to(problem.q.dtype),
        transposed=transposed.to(problem.q.dtype),
        peak=peak,
        log_sum=log_sum,
        entropy=sink_entropy - (p * log_p).sum(-1) if requested.entropy else result.entropy,
        received=p.sum(2) if requested.received else result.received,
        average=p.mean(1).to(problem.q.dtype) if requested.average else result.average,
        cells=cells,
    )
