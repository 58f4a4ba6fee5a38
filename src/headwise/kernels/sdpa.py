"""The fused kernel: torch's scaled_dot_product_attention, kept on its fused path.

It serves head outputs only. What it cannot take without writing queries x keys is refused in
`choose`: softcap, sinks, the gradient of a score bias, and masks that would have to be written
down and are larger than a tile. Torch leaves the fused path where the widths of queries and values
differ, and where the last stride of an operand is not 1. Narrow operands are therefore padded with
zeros, and strided ones are copied (docs/log.md has the figures).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from headwise.kernels.problem import Problem
from headwise.masks.casting import cast_bias, cast_biases
from headwise.masks.clause import WHOLE
from headwise.support.eager import is_recorded
from headwise.support.own_calls import call_as_own

SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def head_outputs(problem: Problem, v: Tensor, *, dropout_p: float = 0.0) -> Tensor:
    """(batch, heads, queries, value_dim) for values (batch, kv_heads, keys, value_dim).

    With dropout torch leaves its fused path, and writes queries x keys.
    """
    q, k, value_dim, group = problem.q, problem.k, v.shape[-1], problem.group
    width = max(q.shape[-1], value_dim)
    if q.shape[-1] != value_dim:
        q, k, v = (pad(t, (0, width - t.shape[-1])) for t in (q, k, v))
    q, k, v = (with_unit_stride(t) for t in (q, k, v))
    # Literals: compiled, a comparison of sizes is a symbolic bool, which the kernel refuses.
    causal = {"is_causal": True} if is_causal_alone(problem) else {}
    attn_mask = combined_mask(problem)
    if attn_mask is not None and attn_mask.device.type != "cpu":
        attn_mask = with_unit_stride(attn_mask)  # the CPU's fused kernel takes masks of any stride
    in_groups = group > 1 and q.shape[2] == 1 and not causal
    if in_groups:
        # One query a head: the heads of a group are rows of one problem, and read its keys once.
        q = q.unflatten(1, (-1, group)).squeeze(3)
        if attn_mask is not None and attn_mask.shape[1] != 1:
            attn_mask = attn_mask.unflatten(1, (-1, group)).squeeze(3)
    grouped = {"enable_gqa": True} if group > 1 and not in_groups else {}
    options: dict[str, object] = {**causal, **grouped}
    options |= {"attn_mask": attn_mask, "dropout_p": dropout_p, "scale": problem.scale}
    out = call_as_own(scaled_dot_product_attention, q, k, v, **options)
    out = out.flatten(1, 2).unsqueeze(2) if in_groups else out
    return out[..., :value_dim] if width != value_dim else out


def plain_outputs(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor | None:
    """Head outputs where only the scale shapes the scores; None where `choose` must be asked.

    For one token the questions of `choose` cost more than the kernel. This asks, in eager mode,
    whether all of them have the usual answer: equal heads and widths, no copies, nothing empty.
    """
    if is_recorded() or not isinstance(v, Tensor):
        return None
    if v.shape != k.shape or k.shape[1] != q.shape[1] or v.dtype != q.dtype:
        return None
    if not (q.stride(3) == k.stride(3) == v.stride(3) == 1 and q.numel() and v.numel()):
        return None
    if q.dtype == torch.float64 or scale < SMALLEST_SCALE or v.device != q.device:
        return None
    return call_as_own(scaled_dot_product_attention, q, k, v, scale=scale)


def is_strided(tensor: Tensor) -> bool:
    """Whether the last stride of an operand makes torch leave its fused path."""
    return tensor.shape[-1] > 1 and tensor.stride(-1) != 1


def with_unit_stride(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy where its last stride is not 1."""
    return tensor.contiguous() if is_strided(tensor) else tensor


def operands(problem: Problem, v: Tensor) -> dict[str, Tensor]:
    """Queries, keys and values by their names."""
    return {"q": problem.q, "k": problem.k, "v": v}


def copied_bytes(problem: Problem, v: Tensor) -> int:
    """Memory of the operands that `head_outputs` copies, and of the outputs' padding."""
    width, itemsize = max(problem.q.shape[-1], v.shape[-1]), v.element_size()
    entries = problem.q.shape[:-1].numel() * (width - v.shape[-1])
    for tensor in operands(problem, v).values():
        if tensor.shape[-1] != width or is_strided(tensor):
            entries += tensor.shape[:-1].numel() * width
    return entries * itemsize


def combined_mask(problem: Problem) -> Tensor | None:
    """Mask and bias as the one ``attn_mask`` that torch takes; None for a causal mask alone."""
    mask = problem.mask
    rows = torch.arange(mask.sizes.queries, device=problem.q.device)
    written = () if is_causal_alone(problem) else mask.hiding
    allowed = mask.block(WHOLE, WHOLE, WHOLE, WHOLE, written)
    parts = problem.bias.at(rows)
    if not parts:
        return allowed
    if len(parts) > 1:  # rounded once, after the sum
        parts = list(cast_biases(parts, problem.accumulate))
    bias = cast_bias(sum(parts[1:], parts[0]), problem.q.dtype)
    return bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)


def is_causal_alone(problem: Problem) -> bool:
    """Whether the causal flag says all there is to say."""
    return problem.mask.is_causal and problem.bias.is_zero
