"""The contract on a real device: products, readings and gradients against float64 on the CPU.

`benchmarks.gpu` runs this file where a card is; `test_9_devices.py` runs it on the CPU.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import AttentionMatrix, Mask, MultiheadAttention
from headwise.testing import Budget
from tests.strategies import Problem, problem

DEVICE = os.environ.get("HEADWISE_DEVICE", "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
READINGS = ("logsumexp", "entropy", "maximum", "received", "head_average", "dense")
SEEDS = range(8)


def _moved(given: Problem) -> Problem:
    bias = given.score_bias
    return replace(
        given,
        q=given.q.to(DEVICE).requires_grad_(),
        k=given.k.to(DEVICE).requires_grad_(),
        v=given.v.to(DEVICE).requires_grad_(),
        mask=None if given.mask is None else given.mask.to(DEVICE),
        score_bias=None if bias is None else bias.map_tensors(lambda x: x.to(DEVICE)),
        sink=None if given.sink is None else given.sink.to(DEVICE),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_products_and_gradients(seed: int, dtype: torch.dtype) -> None:
    given = problem(seed, dtype=dtype)
    here = _moved(given)
    out = AttentionMatrix(here.q, here.k, **here.kwargs) @ here.v
    Budget.for_head_outputs(given.q, given.k, given.v, **given.kwargs).assert_holds(out.cpu())
    out.float().sum().backward()
    for x in (here.q, here.k, here.v):
        assert x.grad is not None
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("seed", SEEDS)
def test_readings(seed: int) -> None:
    exact = problem(seed)
    reference = AttentionMatrix(exact.q, exact.k, **exact.kwargs)
    here = _moved(exact.to(torch.float32))
    matrix = AttentionMatrix(here.q, here.k, **here.kwargs)
    for name in READINGS:
        wanted, got = (getattr(each, name)() for each in (reference, matrix))
        torch.testing.assert_close(_plain(got), _plain(wanted), rtol=2e-4, atol=2e-5)


def test_layer() -> None:
    torch.manual_seed(0)
    layer, x = MultiheadAttention(40, 5, batch_first=True), torch.randn(3, 24, 40)
    padding = torch.arange(24) >= torch.tensor([24, 5, 1])[:, None]
    expected = layer.double()(x.double(), x.double(), x.double(), key_padding_mask=padding)
    layer, x = layer.float().to(DEVICE), x.to(DEVICE)
    got = layer(x, x, x, key_padding_mask=padding.to(DEVICE))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(_plain(a), _plain(b), rtol=2e-4, atol=2e-5)


def test_window_is_causal_where_it_reaches_all() -> None:
    x: Any = torch.randn(1, 2, 300, 16, device=DEVICE)
    outputs = [AttentionMatrix(x, x, mask=m) @ x for m in (Mask.causal(), Mask.window(300, 0))]
    torch.testing.assert_close(*map(_plain, outputs), rtol=2e-4, atol=2e-5)


def _plain(x: Tensor) -> Tensor:
    return x.detach().double().cpu()
