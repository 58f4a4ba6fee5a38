"""Gradients of the tiled kernel in batches, under saved-tensor hooks, and with inference mode."""

import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor
from torch.autograd import graph

from headwise import AttentionMatrix, Mask, MultiheadAttention, ScoreBias

READINGS: dict[str, Callable[[AttentionMatrix, Tensor], Tensor]] = {
    "product": lambda matrix, v: matrix @ v,
    "transposed": lambda matrix, v: matrix.mT @ torch.ones(2, 6, 5, 3).to(v),
    "entropy": lambda matrix, v: matrix.entropy(),
    "received": lambda matrix, v: matrix.received(),
    "topk": lambda matrix, v: matrix.topk(2)[0],
    "pool": lambda matrix, v: matrix.pool(2, 3),
}
HOOKS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "clone": lambda: graph.saved_tensors_hooks(torch.clone, lambda x: x),
    "pickle": lambda: graph.saved_tensors_hooks(pickle.dumps, pickle.loads),
    "offload": graph.save_on_cpu,
}


@pytest.fixture
def leaves() -> dict[str, Tensor]:
    shapes = {"q": (2, 6, 5, 4), "k": (2, 2, 7, 4), "v": (2, 2, 7, 3), "sink": (6,)}
    shapes |= {"bias": (6, 5, 7), "table": (6, 3)}
    return {
        name: torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for name, shape in shapes.items()
    }


def matrix_of(leaves: dict[str, Tensor]) -> AttentionMatrix:
    bias = ScoreBias.dense(leaves["bias"], axes="heads queries keys")
    return AttentionMatrix(
        leaves["q"],
        leaves["k"],
        mask=Mask.where(lambda batch, head, query, key: key <= query + 2 + batch),
        score_bias=bias + ScoreBias.relative(leaves["table"], align="top-left"),
        softcap=3.0,
        sink=leaves["sink"],
    )


@pytest.mark.parametrize("batched", ["autograd", "vmap"])
@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
def test_a_batch_of_gradients_is_each_of_them(
    leaves: dict[str, Tensor],
    reading: Callable[[AttentionMatrix, Tensor], Tensor],
    batched: str,
) -> None:
    output, of = reading(matrix_of(leaves), leaves["v"]), list(leaves.values())
    upstream = torch.randn(8, *output.shape, dtype=torch.float64)

    def slopes(upstream: Tensor, **options: bool) -> tuple[Tensor, ...]:
        found = torch.autograd.grad(
            output, of, upstream, retain_graph=True, allow_unused=True, **options
        )
        return tuple(x for x in found if x is not None)

    if batched == "autograd":
        found = slopes(upstream, is_grads_batched=True)
    else:
        found = torch.func.vmap(slopes, in_dims=1)(upstream.movedim(0, 1))
    for index, own in enumerate(upstream):
        for one, many in zip(slopes(own), found, strict=True):
            torch.testing.assert_close(many[index], one, rtol=1e-12, atol=1e-13)


def test_a_jacobian_in_one_backward_pass_is_that_row_by_row() -> None:
    layer = MultiheadAttention(8, 2, batch_first=True).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    for part in (0, 1):

        def call(x: Tensor, part: int = part) -> Tensor:
            return layer(x, x, x)[part]

        rows, whole = (
            torch.autograd.functional.jacobian(call, x, vectorize=vectorize)
            for vectorize in (False, True)
        )
        torch.testing.assert_close(whole, rows, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
def test_hooks_may_copy_what_is_saved_beside_a_masks_function(
    leaves: dict[str, Tensor],
    reading: Callable[[AttentionMatrix, Tensor], Tensor],
    hooks: Callable[[], AbstractContextManager[object]],
) -> None:
    gradients = []
    for context in (hooks(), graph.saved_tensors_hooks(lambda x: x, lambda x: x)):
        with context:
            output = reading(matrix_of(leaves), leaves["v"])
        upstream = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
        of = list(leaves.values())
        gradients.append(torch.autograd.grad(output, of, upstream, materialize_grads=True))
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
def test_tensors_of_inference_mode_are_read_like_any_others(
    reading: Callable[[AttentionMatrix, Tensor], Tensor],
) -> None:
    plain = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 7, 4), torch.randn(2, 2, 7, 3)
    lengths = torch.tensor([7, 3])
    with torch.inference_mode():
        q, k, v, n = (x.clone() for x in (*plain, lengths))
    found = reading(AttentionMatrix(q, k, mask=Mask.lengths(keys=n), softcap=3.0), v)
    expected = reading(
        AttentionMatrix(*plain[:2], mask=Mask.lengths(keys=lengths), softcap=3.0), plain[2]
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
def test_a_mask_of_inference_mode_serves_training(
    leaves: dict[str, Tensor], reading: Callable[[AttentionMatrix, Tensor], Tensor]
) -> None:
    lengths = torch.tensor([7, 3])
    with torch.inference_mode():
        made = lengths.clone()
    q, k, v = (leaves[name] for name in "qkv")
    found, expected = (
        torch.autograd.grad(
            reading(AttentionMatrix(q, k, mask=Mask.lengths(keys=n), softcap=3.0), v).sum(), (q, k)
        )
        for n in (made, lengths)
    )
    assert all(map(torch.equal, found, expected))
