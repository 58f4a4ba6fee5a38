"""Fused kernel: torch's scaled_dot_product_attention, on its fused path.

`FusedKernel` computes head outputs only. It refuses tasks for which torch would allocate queries x
keys or has no option: softcap, sinks, the gradient of a score bias, and masks larger than a tile.
torch leaves the fused path where the widths of queries and values differ, and where the last stride
of an operand is not 1. Narrow operands are therefore padded with zeros, and strided ones are copied
(docs/log.md has the figures).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from headwise.masks.clause import WHOLE
from headwise.masks.score_bias import cast_bias, cast_biases_for_sum
from headwise.matrix.kernels import kernel, tiles
from headwise.matrix.kernels.kernel import KernelInput, KernelResult, Task
from headwise.support.tracing import call_for_kernel, is_recording_operators, may_check_values

SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class FusedKernel(kernel.Kernel):
    """Kernel for head outputs alone, by torch's scaled_dot_product_attention."""

    name = "sdpa"

    def refusal_reason(self, task: Task) -> str | None:
        # Evaluated lazily: a compiled graph holds only for the sizes that it compares.
        for refused, why in _yield_refusal_reasons(task):
            if refused:
                return why
        return None

    def choice_reason(self, task: Task) -> str:
        """Return the reason, with the operands that are copied."""
        assert task.v is not None
        operands = {"q": task.problem.q, "k": task.problem.k, "v": task.v}
        strided = ", ".join(name for name, t in operands.items() if has_strided_last_axis(t))
        copies = f", after a copy of {strided}: the last stride is not 1" if strided else ""
        return f"the fused kernel takes this mask{copies}"

    def run(self, task: Task) -> KernelResult:
        assert task.v is not None
        out = head_outputs(task.problem, task.v, dropout_p=task.dropout_p)
        return kernel.result_of_outputs_only(out)

    def cost(self, task: Task) -> kernel.Cost:
        """With dropout torch allocates the weights."""
        assert task.v is not None
        (q, k), memory = (task.problem.q, task.problem.k), copied_bytes(task.problem, task.v)
        if task.dropout_p:
            memory += q.shape[:3].numel() * k.shape[2] * q.element_size()
        return kernel.Cost(tiles.count_operations(task), memory)


def _yield_refusal_reasons(task: Task) -> Iterator[tuple[bool, str]]:
    yield task.y is not None, "fused kernels do not sum over queries"
    yield task.requested_statistics.average, "heads of one row share a tile"
    v = task.values_if_only_product
    yield v is None, "row sums and columns come from tiles; fused kernels return none"
    yield from _yield_unsupported_conditions(task.problem)
    if v is not None and task.dropout_p == 0:
        yield from _yield_unprofitable_conditions(task.problem, v)


def _yield_unsupported_conditions(problem: KernelInput) -> Iterator[tuple[bool, str]]:
    """Yield conditions under which the fused kernel computes another function."""
    bias, dtype = problem.bias, problem.q.dtype
    yield problem.softcap is not None, "softcap: the fused kernel has none"
    yield problem.sink is not None, "sink: the fused kernel has none"
    is_positive = problem.scale >= torch.finfo(problem.accumulation_dtype).tiny
    why = "the scale is not above 0: the fused kernel would multiply its causal -inf by it"
    yield not is_positive, why
    rounds = any(t.dtype != dtype for t in bias.all_tensors())
    yield rounds, "the fused kernel would round the score bias to the dtype of the queries"
    yield bias_sum_overflows(problem), "float16 cannot hold the sum of these score biases"


def _yield_unprofitable_conditions(problem: KernelInput, v: Tensor) -> Iterator[tuple[bool, str]]:
    # Exported, a query that may attend to nothing gets the mean of v.
    yield torch.onnx.is_in_onnx_export(), "exported, torch's operator has no rows without keys"
    yield problem.bias.requires_grad, "the gradient of a score bias leaves the fused path"
    large = _needs_large_mask(problem)
    yield large, "the fused kernel needs this mask as a dense queries x keys tensor"
    yield 0 in (problem.q.numel(), problem.k.numel(), v.numel()), "an axis is empty"
    costly = _costs_more_to_copy(problem, v)
    yield costly, "few queries: copying keys or values for the fused kernel costs more"
    double = problem.q.dtype == torch.float64 and problem.q.device.type != "cpu"
    yield double, "the fused kernel takes no float64 on this device"


def bias_sum_overflows(problem: KernelInput) -> bool:
    """True if the sum of the score biases overflows float16, as values on the CPU show."""
    parts = problem.bias.all_tensors()
    if problem.q.dtype != torch.float16 or len(parts) < 2 or not all(map(may_check_values, parts)):
        return False
    finite = [part.detach().masked_fill(part.isinf(), 0) for part in parts if part.numel()]
    return sum(float(part.abs().amax()) for part in finite) > torch.finfo(torch.float16).max


def _needs_large_mask(problem: KernelInput) -> bool:
    """True if the fused kernel needs a new dense mask that is larger than a tile."""
    if is_causal_alone(problem):
        return False
    hiding, sizes = problem.mask.hiding_clauses, problem.mask.sizes
    tensors, table = problem.bias.tensors, problem.bias.table
    shapes = [*(c.broadcast_shape(sizes) for c in hiding), *(tuple(t.shape) for t in tensors)]
    if table is not None:
        shapes.append((1, table.shape[0], sizes.queries, sizes.keys))
    is_one_tensor = len(shapes) == 1 and len(tensors) + sum(c.is_written for c in hiding) == 1
    if is_one_tensor or all(shape[2] == 1 for shape in shapes):
        return False
    if torch.compiler.is_compiling():
        return True  # a choice by size would hold for this size only
    return prod(max(shape[axis] for shape in shapes) for axis in range(4)) > tiles.TILE_ELEMENTS


def _costs_more_to_copy(problem: KernelInput, v: Tensor) -> bool:
    """True if k or v must be copied for the fused kernel, and is larger than the weights."""
    is_padded = problem.k.shape[-1] != v.shape[-1]
    if not (is_padded or has_strided_last_axis(problem.k) or has_strided_last_axis(v)):
        return False
    queries = problem.q.shape[2]
    if torch.compiler.is_compiling():
        return bool(queries == 1)  # a choice by size would hold for this size only
    return queries * problem.group <= problem.q.shape[3]


# ---- the call --------------------------------------------------------------------------------


def head_outputs(problem: KernelInput, v: Tensor, *, dropout_p: float = 0.0) -> Tensor:
    """Return (batch, heads, queries, value_dim) for values (batch, kv_heads, keys, value_dim).

    With dropout torch leaves its fused path, and allocates queries x keys.
    """
    q, k, value_dim, group = problem.q, problem.k, v.shape[-1], problem.group
    width = max(q.shape[-1], value_dim)
    if q.shape[-1] != value_dim:
        q, k, v = (pad(t, (0, width - t.shape[-1])) for t in (q, k, v))
    q, k, v = (with_unit_stride(t) for t in (q, k, v))
    # Literals: compiled, a comparison of sizes is a symbolic bool, which the kernel refuses.
    causal = {"is_causal": True} if is_causal_alone(problem) else {}
    attn_mask = combine_mask_and_bias(problem)
    if attn_mask is not None and attn_mask.device.type != "cpu":
        attn_mask = with_unit_stride(attn_mask)  # the CPU's fused kernel takes masks of any stride
    in_groups = group > 1 and q.shape[2] == 1 and not causal
    if in_groups:
        # One query: make the heads of a group the rows of one problem, which loads its keys once.
        q = q.unflatten(1, (-1, group)).squeeze(3)
        if attn_mask is not None and attn_mask.shape[1] != 1:
            attn_mask = attn_mask.unflatten(1, (-1, group)).squeeze(3)
    grouped = {"enable_gqa": True} if group > 1 and not in_groups else {}
    options: dict[str, object] = {**causal, **grouped}
    options |= {"attn_mask": attn_mask, "dropout_p": dropout_p, "scale": problem.scale}
    out = call_for_kernel(scaled_dot_product_attention, q, k, v, **options)
    out = out.flatten(1, 2).unsqueeze(2) if in_groups else out
    return out[..., :value_dim] if width != value_dim else out


def head_outputs_without_options(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor | None:
    """Return head outputs for scores without mask, bias, softcap or sink; None for other operands.

    For one token `dispatch.choose_kernel` costs more than the kernel: a shortcut of eager mode.
    """
    if is_recording_operators() or type(v) is not Tensor:
        return None
    if v.shape != k.shape or k.shape[1] != q.shape[1] or v.dtype != q.dtype:
        return None
    if not (q.stride(3) == k.stride(3) == v.stride(3) == 1 and q.numel() and v.numel()):
        return None
    if q.dtype == torch.float64 or scale < SMALLEST_SCALE or v.device != q.device:
        return None
    return call_for_kernel(scaled_dot_product_attention, q, k, v, scale=scale)


def has_strided_last_axis(tensor: Tensor) -> bool:
    return tensor.shape[-1] > 1 and tensor.stride(-1) != 1


def with_unit_stride(tensor: Tensor) -> Tensor:
    return tensor.contiguous() if has_strided_last_axis(tensor) else tensor


def copied_bytes(problem: KernelInput, v: Tensor) -> int:
    """Return the bytes of the operands that `head_outputs` copies, and of the outputs' padding."""
    width, itemsize = max(problem.q.shape[-1], v.shape[-1]), v.element_size()
    entries = problem.q.shape[:-1].numel() * (width - v.shape[-1])
    for tensor in (problem.q, problem.k, v):
        if tensor.shape[-1] != width or has_strided_last_axis(tensor):
            entries += tensor.shape[:-1].numel() * width
    return entries * itemsize


def combine_mask_and_bias(problem: KernelInput) -> Tensor | None:
    """Return mask and bias as torch's single ``attn_mask``; None for a causal mask alone."""
    mask = problem.mask
    rows = torch.arange(mask.sizes.queries, device=problem.q.device)
    clauses = () if is_causal_alone(problem) else mask.hiding_clauses
    allowed = mask.evaluate_block(WHOLE, WHOLE, WHOLE, WHOLE, clauses)
    parts = problem.bias.parts_at_rows(rows)
    if not parts:
        return allowed
    if len(parts) > 1:  # rounded once, after the sum
        parts = list(cast_biases_for_sum(parts, problem.accumulation_dtype))
    bias = cast_bias(sum(parts[1:], parts[0]), problem.q.dtype)
    return bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)


def is_causal_alone(problem: KernelInput) -> bool:
    return problem.mask.is_causal and problem.bias.is_empty
