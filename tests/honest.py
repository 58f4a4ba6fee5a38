"""Honest arithmetic, and the budgets that it must keep: what the tests of the budget share."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from headwise.function import stages
from headwise.function.budget import Budget
from headwise.masks.score_bias import ScoreBias
from tests.strategies import Problem

# The drop-in warns of it, since a mask of the reverse polarity does it by mistake.
hides_a_whole_sequence = pytest.mark.filterwarnings("ignore::headwise.errors.PolarityWarning")
HALVES = (torch.bfloat16, torch.float16)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def ordinary(dtype: torch.dtype, *, loud: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Sizes in which no two axes coincide."""
    q, k, v = normal(3, 6, 24, 10), normal(3, 2, 29, 10, seed=1), normal(3, 2, 29, 7, seed=2)
    return (q * loud).to(dtype), k.to(dtype), v.to(dtype)


def accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALVES else dtype


def honest(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Float32 inside for the half dtypes, rounded once at the end."""
    wide = accumulation(q.dtype)
    out = stages.head_outputs(q.to(wide), k.to(wide), v.to(wide), **options)
    return out.to(q.dtype)


def strictest(dtype: torch.dtype) -> float:
    """The factor that tests of float32 kernels use in this dtype."""
    return 0.0 if dtype in HALVES else 2.0


def readings(p: Problem) -> dict[str, Tensor]:
    """What a pass over the matrix tells, by torch's own functions in the accumulation dtype."""
    wide = p.to(accumulation(p.q.dtype))
    s = stages.scores(
        wide.q, wide.k, mask=p.mask, score_bias=p.score_bias, scale=p.scale, softcap=p.softcap
    )
    sink = torch.full_like(s[..., :1], -torch.inf)
    if wide.sink is not None:
        sink = wide.sink[:, None, None].expand_as(sink)
    s = torch.cat([s, sink], dim=-1)
    log_p = torch.log_softmax(s, -1)
    w = log_p.exp().nan_to_num(0.0)
    return {
        "logsumexp": torch.logsumexp(s, -1),
        "entropy": -(w * log_p).nan_to_num(0.0).sum(-1),
        "weights": w[..., :-1].to(p.q.dtype),
        "received": w[..., :-1].sum(-2),
        "maximum": w[..., :-1].amax(-1),
    }


def budgets_of_readings(p: Problem, factor: float) -> dict[str, Budget]:
    options: dict[str, Any] = {"factor": factor, **p.kwargs}
    return {
        "logsumexp": Budget.for_logsumexp(p.q, p.k, **options),
        "entropy": Budget.for_entropy(p.q, p.k, **options),
        "weights": Budget.for_weights(p.q, p.k, **options),
        "received": Budget.for_weights(p.q, p.k, read=lambda w: w.sum(-2), **options),
        "maximum": Budget.for_weights(p.q, p.k, read=lambda w: w.amax(-1), **options),
    }


def fused(p: Problem, bias: Tensor) -> Tensor:
    heads = p.q.shape[1]
    k, v = stages.repeat_kv_heads(p.k, heads=heads), stages.repeat_kv_heads(p.v, heads=heads)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(p.q, k, v, attn_mask=bias, scale=p.scale)


def for_the_fused_kernel(p: Problem) -> tuple[Problem, Tensor]:
    """The problem with its mask and biases as one tensor of its dtype, as the kernel takes them."""
    bias = p.dense_bias(p.q.dtype)
    whole = ScoreBias.dense(bias, axes="batch heads queries keys")
    return Problem(p.q, p.k, p.v, score_bias=whole, scale=p.scale), bias


def gradients(p: Problem, function: Callable[[Problem], Tensor], g: Tensor) -> dict[str, Tensor]:
    leaves = {"q": p.q, "k": p.k, "v": p.v} | ({} if p.sink is None else {"sink": p.sink})
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    moved = Problem(**{**p.__dict__, **leaves})
    return dict(
        zip(leaves, torch.autograd.grad(function(moved), [*leaves.values()], g), strict=True)
    )
