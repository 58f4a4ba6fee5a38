"""``A @ v`` by the kernel that `choose` names, and the same with weights dropped at random."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import dropout

from headwise import reference
from headwise.kernels import dense, pieces, sdpa
from headwise.kernels.choose import choose, sum_overflows
from headwise.kernels.problem import Problem
from headwise.kernels.read import read


def head_outputs(problem: Problem, v: Tensor) -> Tensor:
    """(batch, heads, queries, value_dim) for values (batch, kv_heads, keys, value_dim)."""
    choice = choose(problem, v)
    if choice.division:
        return pieces.head_outputs(problem, v, choice.division, head_outputs)
    # Exported to ONNX, torch's operator gives a query that may attend to nothing the mean of v.
    if choice.kernel == "sdpa" and not torch.onnx.is_in_onnx_export():
        return sdpa.head_outputs(problem, v)
    return read(problem, v=v).out


def dropped_head_outputs(problem: Problem, v: Tensor, *, dropout_p: float) -> Tensor:
    """The same with each weight dropped with this probability: writes queries x keys.

    What torch's operator takes it computes, so that a seed means what it means in torch.
    """
    if found := pieces.find(problem):
        dropped = partial(dropped_head_outputs, dropout_p=dropout_p)
        return pieces.head_outputs(problem, v, found, dropped)
    plain = problem.softcap is None and problem.sink is None and problem.has_positive_scale
    plain = plain and not sum_overflows(problem)
    if plain and all(bias.dtype == v.dtype for bias in problem.bias.all()):
        return sdpa.head_outputs(problem, v, dropout_p=dropout_p)
    kept = dropout(dense.weights(problem), dropout_p)
    values = reference.share_heads(v.to(kept.dtype), heads=kept.shape[1])
    return (kept @ values).to(v.dtype)
