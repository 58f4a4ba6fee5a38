"""The fused kernel: torch's scaled_dot_product_attention, kept on its fused path.

It serves head outputs only. What it cannot take without writing queries x keys is refused in
`choose`: softcap, sinks, the gradient of a score bias, and masks that would have to be written
down and are larger than a tile. Values narrower or wider than the queries are padded with zeros,
since torch leaves the fused path where the widths differ (docs/log.md has the figures).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from headwise.kernels.problem import Problem


def head_outputs(problem: Problem, v: Tensor, *, dropout_p: float = 0.0) -> Tensor:
    """(batch, heads, queries, value_dim) for values (batch, kv_heads, keys, value_dim).

    With dropout torch leaves its fused path, and writes queries x keys.
    """
    q, k, value_dim, group = problem.q, problem.k, v.shape[-1], problem.group
    width = max(q.shape[-1], value_dim)
    if q.shape[-1] != value_dim:
        q, k, v = (pad(t, (0, width - t.shape[-1])) for t in (q, k, v))
    # Literals: compiled, a comparison of sizes is a symbolic bool, which the kernel refuses.
    causal = {"is_causal": True} if is_causal_alone(problem) else {}
    attn_mask = combined_mask(problem)
    in_groups = group > 1 and q.shape[2] == 1 and not causal
    if in_groups:
        # One query a head: the heads of a group are rows of one problem, and read its keys once.
        q = q.unflatten(1, (-1, group)).squeeze(3)
        if attn_mask is not None and attn_mask.shape[1] != 1:
            attn_mask = attn_mask.unflatten(1, (-1, group)).squeeze(3)
    grouped = {"enable_gqa": True} if group > 1 and not in_groups else {}
    options = {**causal, **grouped}
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, scale=problem.scale, **options
    )
    out = out.flatten(1, 2).unsqueeze(2) if in_groups else out
    return out[..., :value_dim] if width != value_dim else out


def combined_mask(problem: Problem) -> Tensor | None:
    """Mask and bias as the one ``attn_mask`` that torch takes; None for a causal mask alone."""
    mask, whole = problem.mask, slice(None)
    rows = torch.arange(mask.queries, device=problem.q.device)
    if mask.is_banded and not is_causal_alone(problem):
        allowed: Tensor | None = mask.at(rows)
    else:
        allowed = mask.block(whole, whole, whole, whole)
    bias: Tensor | None = None
    for part in problem.bias.at(rows):
        part = part.to(problem.q.dtype)
        bias = part if bias is None else bias + part
    if bias is None:
        return allowed
    return bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)


def is_causal_alone(problem: Problem) -> bool:
    """Whether the causal flag says all there is to say."""
    return problem.mask.is_causal and problem.mask.is_plain and problem.bias.is_zero
