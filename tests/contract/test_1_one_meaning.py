"""Clause 1: the output does not depend on the path."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from headwise import Attention, Rotary
from headwise.function import Latent
from headwise.function.budget import Budget
from headwise.layers.distance import DebertaBias
from headwise.layers.norm import QKNorm
from headwise.masks.mask import Mask
from headwise.matrix.kernels import varlen
from headwise.matrix.kernels.dispatch import KERNELS
from headwise.matrix.kernels.kernel import Task
from headwise.matrix.operator import AttentionMatrix
from tests.contract.layers import (
    BATCH,
    EMBED,
    HEAD_DIM,
    HEADS,
    LENGTH,
    identity_attention,
    identity_layer,
    inputs,
    merge,
    split,
)
from tests.honest import hides_a_whole_sequence
from tests.strategies import DTYPES, Problem, problems

PADDING = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
PADDING[0, 17:], PADDING[1] = True, True  # the second sample may attend to nothing


@hides_a_whole_sequence
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padded", [False, True])
def test_every_way_to_call_the_layer_gives_the_same_output(
    dtype: torch.dtype, padded: bool
) -> None:
    layer, x = identity_layer(dtype), inputs(dtype)
    padding = PADDING if padded else None
    mask = Mask.from_torch_padding(PADDING) if padded else None
    budget = Budget.for_head_outputs(split(x), split(x), split(x), mask=mask)
    ways = itertools.product((False, True), repeat=5)
    for need_weights, average, grad, training, same in ways:
        layer.train(training)
        query = x if same else x.clone()
        with torch.set_grad_enabled(grad):
            out, weights = layer(
                query,
                x,
                x if same else x.clone(),
                key_padding_mask=padding,
                need_weights=need_weights,
                average_attn_weights=average,
            )
        budget.assert_holds(split(out))
        assert (weights is None) == (not need_weights)
    assert torch.equal(merge(split(x)), x)


@given(problems(dtypes=DTYPES, softcap=None, sink=None))
def test_every_kernel_gives_the_same_head_outputs(p: Problem) -> None:
    task = Task(*AttentionMatrix(p.q, p.k, **p.kwargs)._kernel_input_and_values(p.v))
    budget = Budget.for_head_outputs(p.q, p.k, p.v, **p.kwargs)
    taking = [kernel for kernel in KERNELS if kernel.refusal_reason(task) is None]
    assert {"tiled", "dense"} <= {kernel.name for kernel in taking}
    for kernel in taking:
        budget.assert_holds(kernel.run(task).out)
        with sdpa_kernel(SDPBackend.MATH):
            budget.assert_holds(kernel.run(task).out)


@given(problems(dtypes=(torch.float64, torch.float32)))
def test_a_sample_alone_is_what_it_is_in_a_batch(p: Problem) -> None:
    batch, heads, queries, keys = p.shape
    allowed = (p.mask or Mask()).bind(
        batch=batch, heads=heads, queries=queries, keys=keys, device=p.q.device
    )
    dense = allowed.evaluate_rows(torch.arange(queries)).expand(p.shape)
    together = AttentionMatrix(p.q, p.k, mask=p.mask, softcap=p.softcap, sink=p.sink) @ p.v
    for b in range(batch):
        options = {
            "mask": Mask.may_attend(dense[b : b + 1], axes="batch heads queries keys"),
            "softcap": p.softcap,
            "sink": p.sink,
        }
        q, k, v = (x[b : b + 1] for x in (p.q, p.k, p.v))
        budget = Budget.for_head_outputs(q, k, v, **options)
        budget.assert_holds(AttentionMatrix(q, k, **options) @ v)
        budget.assert_holds(together[b : b + 1])


@hides_a_whole_sequence
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("need_weights", [False, True])
def test_what_stands_in_padding_does_not_matter(need_weights: bool, kind: torch.dtype) -> None:
    layer, x = identity_layer(torch.float32, add_zero_attn=True), inputs(torch.float32)
    hidden = torch.zeros(PADDING.shape).masked_fill(PADDING, -torch.inf)
    padding = PADDING if kind == torch.bool else hidden

    def outputs(filling: float) -> tuple[Tensor, Tensor]:
        filled, query = x.masked_fill(PADDING[..., None], filling), x.clone().requires_grad_()
        call = {"key_padding_mask": padding, "need_weights": need_weights}
        out: Tensor = layer(query, filled, filled, **call)[0]
        return out, *torch.autograd.grad(out.square().sum(), query)

    for filling in (1e6, torch.nan):
        assert all(map(torch.equal, outputs(0.0), outputs(filling)))


LENGTHS, IDS = torch.tensor([LENGTH, 0, 11]), torch.arange(LENGTH) // 8
STATED = {
    "lengths": Mask.lengths(queries=LENGTHS, keys=LENGTHS) & Mask.causal(),
    "left": Mask.lengths(queries=LENGTHS, keys=LENGTHS, side="left"),
    "starts": Mask.starts(queries=LENGTHS, keys=LENGTHS),
    "segments": Mask.segments(IDS.where(torch.arange(LENGTH) < LENGTHS[:, None], -1)),
    "packed": Mask.packed(torch.tensor([2, 9, 9, 17])),
}


def real_tokens(mask: Mask, batch: int) -> Tensor:
    """(batch, length): by the definition of the mask, a token that sees itself."""
    options = {"batch": batch, "heads": 1, "queries": LENGTH, "keys": LENGTH}
    bound = mask.bind(**options, device=torch.device("cpu"))
    return bound.evaluate_rows(torch.arange(LENGTH))[:, 0].diagonal(0, 1, 2).expand(batch, -1)


READINGS: dict[str, Callable[[AttentionMatrix, Tensor], Tensor]] = {
    "A @ v": lambda matrix, x: matrix @ x,
    "A.mT @ y": lambda matrix, x: matrix.mT @ x,
    "dropped": lambda matrix, x: matrix.dropped(x, dropout_p=0.0),
    "average": lambda matrix, x: matrix.outputs_and_average(x)[0],
    "rows": lambda matrix, _: matrix.rows(torch.arange(0, LENGTH, 2)),
    "diagonal": lambda matrix, _: matrix.diagonal(-1),
    "topk": lambda matrix, _: matrix.topk(3)[0],
    "pool": lambda matrix, _: matrix.pool(5, 4),
    "entropy": lambda matrix, _: matrix.entropy(),
    "received": lambda matrix, _: matrix.received(),
}


@pytest.mark.parametrize("name", STATED)
def test_nan_in_padding_reaches_nothing_of_a_matrix(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients are those of zeros in the padding, in every kernel and reading."""
    batch, mask = 1 if name == "packed" else BATCH, STATED[name]
    hidden = ~real_tokens(mask, batch)[:, None, :, None]
    clean = [torch.randn(batch, HEADS, LENGTH, HEAD_DIM).masked_fill(hidden, 0) for _ in range(3)]

    def loss(reading: str, softcap: float | None, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        return (
            READINGS[reading](AttentionMatrix(q, k, mask=mask, softcap=softcap), x).square().sum()
        )

    def filled(filling: float) -> list[Tensor]:
        return [x.masked_fill(hidden, filling).requires_grad_() for x in clean]

    for call, softcap, reading in itertools.product((1, 2**60), (None, 3.0), READINGS):
        monkeypatch.setattr(varlen, "CALL", call)
        sums = []
        for filling in (0.0, torch.nan):
            operands = filled(filling)
            with torch.no_grad():
                alone = loss(reading, softcap, *operands)
            total = loss(reading, softcap, *operands)
            sums.append((alone, total, *torch.autograd.grad(total, operands, allow_unused=True)))
        for expected, found in zip(*sums, strict=True):
            assert expected is None or torch.equal(expected, found), (call, softcap, reading)
    slope = torch.func.grad(partial(loss, "A @ v", 3.0), argnums=(0, 1, 2))  # the dense kernel
    assert all(map(torch.equal, slope(*filled(0.0)), slope(*filled(torch.nan))))


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("name", STATED)
def test_nan_in_padding_reaches_nothing_of_the_native_layer(
    name: str, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, gradients of real tokens, and those of all parameters."""
    monkeypatch.setattr(varlen, "CALL", 1 if packs else 2**60)
    batch, mask = 1 if name == "packed" else BATCH, STATED[name]
    hidden = ~real_tokens(mask, batch)[..., None]
    x = torch.randn(batch, LENGTH, EMBED)
    options: dict[str, Any] = {"output_gate": "head", "sink": True}
    latent = {"latent": Latent(rank=5, shared_width=4, query_rank=6), "rotary": Rotary()}
    kinds = [{"qk_norm": QKNorm(), "rotary": Rotary()}, {"qk_norm": QKNorm()}, latent]
    kinds.append({"score_bias": DebertaBias(4, 9, eps=1e-7)})
    for crosses, more in zip((False, True, False, False), kinds, strict=True):
        layer = Attention(EMBED, HEADS, **options | more)
        found = []
        for filling in (0.0, torch.nan):
            given = x.masked_fill(hidden, filling).requires_grad_()
            inputs = (given, given.flip(2)) if crosses else (given,)
            out = layer(*inputs, mask=mask)
            stages = [layer.head_outputs(*inputs, mask=mask), layer.stages(*inputs, mask=mask)["v"]]
            total = sum(each.square().sum() for each in (out, *stages))
            gradients = torch.autograd.grad(total, (given, *layer.parameters()), allow_unused=True)
            found.append((out, *stages, *gradients))
        for index, (expected, actual) in enumerate(zip(*found, strict=True)):
            assert expected is None or torch.equal(expected, actual), (crosses, index)


@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
def test_a_longer_batch_changes_no_real_position(kind: torch.dtype) -> None:
    layer, x = identity_layer(), inputs()
    longer = torch.cat([x, torch.randn(BATCH, 9, x.shape[2], dtype=x.dtype)], dim=1)
    hidden = torch.arange(LENGTH + 9).expand(BATCH, -1) >= LENGTH
    padding = hidden
    if kind != torch.bool:
        padding = torch.zeros(hidden.shape, dtype=kind).masked_fill(hidden, -torch.inf)
    budget = Budget.for_head_outputs(split(x), split(x), split(x))
    budget.assert_holds(split(layer(x, x, x)[0]))
    budget.assert_holds(
        split(layer(longer, longer, longer, key_padding_mask=padding)[0])[:, :, :LENGTH]
    )


@pytest.mark.parametrize("need_weights", [False, True])
def test_causal_by_bool_by_float_and_by_hint_are_one(need_weights: bool) -> None:
    length = 300  # long enough for the causal kernel
    layer, x = identity_layer(torch.float32), inputs(torch.float32, length)
    heads = split(x)
    budget = Budget.for_head_outputs(heads, heads, heads, mask=Mask.causal())
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    floats = torch.zeros(length, length).masked_fill(later, -torch.inf)
    for mask, hint in itertools.product((later, floats), (False, True)):
        out, _ = layer(x, x, x, attn_mask=mask, is_causal=hint, need_weights=need_weights)
        budget.assert_holds(split(out))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packs", [False, True])
def test_the_native_layer_is_one_function_of_its_real_tokens(
    dtype: torch.dtype, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "CALL", 1 if packs else 2**60)
    layer, x = identity_attention(dtype), inputs(dtype)
    lengths = torch.tensor([LENGTH, 0, 11])
    mask = Mask.lengths(queries=lengths, keys=lengths) & Mask.causal()
    budget = Budget.for_head_outputs(split(x), split(x), split(x), mask=mask)
    for grad, training, same in itertools.product((False, True), repeat=3):
        layer.train(training)
        with torch.set_grad_enabled(grad):
            out = layer(x, None if same or packs else x.clone(), mask=mask)
        budget.assert_holds(split(out))
        assert torch.equal(out[1], torch.zeros_like(out[1]))
    alone = layer(x[2:, :11], mask=Mask.causal())
    own = Budget.for_head_outputs(*[split(x[2:, :11])] * 3, mask=Mask.causal())
    own.assert_holds(split(alone))
    own.assert_holds(split(out[2:, :11]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps", [(LENGTH,), (1,) * LENGTH, (9, 1, 1, 12)], ids=str)
def test_steps_with_a_cache_are_the_whole(dtype: torch.dtype, steps: tuple[int, ...]) -> None:
    layer, x = identity_attention(dtype), inputs(dtype)
    cache = layer.cache(batch=BATCH, length=LENGTH)
    with torch.no_grad():
        parts = [layer(part, mask=Mask.causal(), cache=cache) for part in x.split(steps, dim=1)]
    budget = Budget.for_head_outputs(split(x), split(x), split(x), mask=Mask.causal())
    budget.assert_holds(split(torch.cat(parts, dim=1)))
