"""The layer where torch transforms it: compiled, exported, traced, mapped, cast, subclassed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.jit.frontend import NotSupportedError
from torch.utils.checkpoint import checkpoint

from headwise import MultiheadAttention
from tests.apart import assert_passed_apart
from tests.honest import hides_a_whole_sequence
from tests.layers.torch_api.cases import (
    BATCH,
    CALLS,
    EMBED,
    HEADS,
    KEYS,
    PADDING,
    QUERIES,
    causal,
    pair,
    randn,
)
from tests.quick import others_extra


@pytest.mark.parametrize(
    ("chosen", "count"),
    others_extra([("not one_graph", 3), ("one_graph and not both-True", 9)]),
)
def test_compiled(chosen: str, count: int) -> None:
    """All but the training with both masks, which tests/layers/test_traced.py compiles."""
    assert_passed_apart(Path(__file__).with_name("compiled.py"), count=count, chosen=chosen)


@hides_a_whole_sequence
@pytest.mark.parametrize("name", ["plain", "padding", "both"])
def test_exported(name: str) -> None:
    _, ours = pair(dtype=torch.float32, batch_first=True)
    inputs, options = randn(), CALLS[name]
    program = torch.export.export(ours.eval(), (inputs, inputs, inputs), options)
    torch.testing.assert_close(
        program.module()(inputs, inputs, inputs, **options), ours(inputs, inputs, inputs, **options)
    )


@pytest.mark.parametrize("need_weights", [True, False])
def test_autocast(need_weights: bool) -> None:
    theirs, ours = pair(dtype=torch.float32, batch_first=True)
    inputs = randn()
    exact = ours(inputs, inputs, inputs)[0]
    lowest = torch.zeros(QUERIES, QUERIES).masked_fill(causal(QUERIES), torch.finfo().min)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = ours(inputs, inputs, inputs, need_weights=need_weights)
        expected = theirs(inputs, inputs, inputs, need_weights=need_weights)
        assert output.dtype == expected[0].dtype == torch.bfloat16
        error = (output - exact).abs().max()
        assert error <= 2 * (expected[0] - exact).abs().max()
        hidden = ours(inputs, inputs, inputs, attn_mask=lowest, need_weights=need_weights)[0]
        assert hidden.isfinite().all()
        with pytest.raises(AssertionError):  # autocast settles dtypes, not sizes
            ours(inputs[..., 1:], inputs, inputs)


def test_autocast_casts_slots_and_static_operands() -> None:
    _, ours = pair(dtype=torch.float32, batch_first=True, add_bias_kv=True, add_zero_attn=True)
    inputs = randn()
    exact = ours(inputs, inputs, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ours(inputs, inputs, inputs)
        torch.testing.assert_close(found[0].float(), exact[0], rtol=0.05, atol=0.05)
        torch.testing.assert_close(found[1].float(), exact[1], rtol=0.05, atol=0.05)


def test_checkpointing_and_functional_call() -> None:
    _, ours = pair(batch_first=True)
    leaf = torch.randn(BATCH, QUERIES, EMBED).double().requires_grad_()
    expected = torch.autograd.grad(ours(leaf, leaf, leaf)[0].square().sum(), leaf)[0]
    output = checkpoint(ours, leaf, leaf, leaf, use_reentrant=False)[0]
    torch.testing.assert_close(torch.autograd.grad(output.square().sum(), leaf)[0], expected)
    zeros = {name: torch.zeros_like(p) for name, p in ours.named_parameters()}
    assert torch.func.functional_call(ours, zeros, (leaf, leaf, leaf))[0].eq(0).all()


@pytest.mark.slow
def test_gradcheck() -> None:
    layer = MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64, add_bias_kv=True)
    hidden = torch.rand(3, 2, 5) < 0.3
    hidden[0, 1] = True
    mask = hidden.repeat_interleave(2, dim=0)
    q = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    k = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    parameters = list(layer.parameters())

    def call(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return layer(leaves[0], leaves[1], leaves[1], attn_mask=mask)

    assert torch.autograd.gradcheck(call, (q, k, *parameters))


def test_meta_device() -> None:
    with torch.device("meta"):
        layer, inputs = MultiheadAttention(EMBED, HEADS, batch_first=True), randn()
        for options in (
            *({"need_weights": n} for n in (True, False)),
            {"average_attn_weights": False},
        ):
            output, weights = layer(inputs, inputs, inputs, **options)
            assert output.shape == (BATCH, QUERIES, EMBED)
            assert weights is None or weights.shape[-2:] == (QUERIES, QUERIES)
        with pytest.raises(RuntimeError, match="must have the same dtype"):
            layer(inputs.double(), inputs, inputs)


@hides_a_whole_sequence
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["plain", "padding"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_mapped_over_samples(name: str, need_weights: bool) -> None:
    _, ours = pair(batch_first=True)
    inputs, padding = torch.randn(BATCH, QUERIES, EMBED).double(), PADDING

    def one(x: Tensor, padding: Tensor) -> tuple[Tensor, ...]:
        options = {"key_padding_mask": padding} if name == "padding" else {}
        found = ours(x, x, x, need_weights=need_weights, **options)
        return tuple(t for t in found if t is not None)

    mapped = torch.func.vmap(one)(inputs, padding)
    for sample in range(BATCH):
        alone = one(inputs[sample], padding[sample])
        torch.testing.assert_close(tuple(t[sample] for t in mapped), alone)


def test_a_tensor_subclass_sees_the_operators_and_survives() -> None:
    class Named(Tensor):
        seen: list[str] = []  # noqa: RUF012

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            cls.seen.append(getattr(func, "__name__", str(func)))
            return super().__torch_function__(func, types, args, kwargs or {})

    _, ours = pair(dtype=torch.float32, batch_first=True)
    inputs = randn()
    with torch.no_grad():
        output = ours.eval()(*(inputs.as_subclass(Named),) * 3, need_weights=False)[0]
        expected = ours(inputs, inputs, inputs, need_weights=False)[0]
    assert type(output) is Named
    assert {"linear", "scaled_dot_product_attention"} <= set(Named.seen)
    torch.testing.assert_close(output.as_subclass(Tensor), expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_torchs() -> None:
    theirs, ours = (layer.eval() for layer in pair(dtype=torch.float32, batch_first=True))
    parts = [torch.randn(n, EMBED) for n in (24, 10, 3)]
    nested = torch.nested.nested_tensor(parts)
    with torch.no_grad():
        expected = theirs(nested, nested, nested, need_weights=False)[0]
        actual = ours(nested, nested, nested, need_weights=False)[0]
        assert actual.is_nested
        for a, b, part in zip(actual.unbind(), expected.unbind(), parts, strict=True):
            torch.testing.assert_close(a, b)
            alone = ours(part[None], part[None], part[None])[0][0]
            torch.testing.assert_close(a, alone, rtol=1e-4, atol=1e-5)
        with pytest.raises(RuntimeError, match="Need attn_mask"):
            ours(nested, nested, nested, is_causal=True)
    for layer in (theirs, ours):
        with pytest.raises(AssertionError, match="does not support NestedTensor outside"):
            layer(nested, nested, nested, need_weights=False)


def test_scripting_is_refused_by_torch() -> None:
    # Stated in the class: torch.compile and torch.export take its place.
    deprecated = (DeprecationWarning, FutureWarning)  # by torch 2.13, and by 2.14
    with pytest.warns(deprecated, match="jit.script"), pytest.raises(NotSupportedError):
        torch.jit.script(MultiheadAttention(EMBED, HEADS))


def test_identity_of_the_inputs_does_not_matter() -> None:
    _, ours = pair(dtype=torch.float32, batch_first=True)
    query, key = randn(), torch.randn(BATCH, KEYS, EMBED)
    for train in (True, False):
        ours.train(train)
        with torch.set_grad_enabled(train):
            packed = ours(query, query, query)
            torch.testing.assert_close(packed, ours(query, query.clone(), query.clone()))
            torch.testing.assert_close(packed, ours(query, query, query.clone()))
            torch.testing.assert_close(ours(query, key, key), ours(query, key, key.clone()))
