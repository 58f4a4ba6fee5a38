"""int8 by the torchao library: weights alone, and activations as well."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headwise import Attention, Mask, Rotary
from headwise.layers.norm import QKNorm
from headwise.testing import Budget
from tests.layers import reference
from tests.layers.ecosystem import (
    BATCH,
    HEADS,
    LENGTH,
    PROJECTIONS,
    budget_of,
    contributions,
    layer_of,
    tokens,
)

KINDS = {"weights": "Int8WeightOnlyConfig", "activations": "Int8DynamicActivationInt8WeightConfig"}
MASK = Mask.causal()
OUTPUT, PARTS = partial(reference.output, mask=MASK), partial(contributions, mask=MASK)


def base() -> Attention:
    return layer_of(rotary=Rotary(), qk_norm=QKNorm()).eval().requires_grad_(False)


def quantised(kind: str) -> Attention:
    from torchao import quantization  # seconds, which other tests need not wait for

    layer = base()
    # True would set options of the compiler and of torch's products for the whole process.
    config = getattr(quantization, KINDS[kind])(set_inductor_config=False)
    quantization.quantize_(layer, config)
    return layer


def dequantised(layer: Attention, but: str | None = None) -> Attention:
    """The layer with its int8 weights as floats; one projection may keep the weights it had."""
    plain = base()
    for name in PROJECTIONS:
        if name != but:
            weight = layer.get_submodule(name).weight.dequantize()
            plain.get_submodule(name).weight.copy_(weight)
    return plain


def step(x: Tensor) -> Tensor:
    """From one int8 to the next: 127 are as far as the largest number of a token."""
    return x.abs().amax(-1, keepdim=True) / 127


def bound(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """How far a projection may be from that with the float weights.

    The rounding of a sum, of its scales and of the bias; activations are off by half a step.
    """
    x, weight = x.double(), weight.double()
    terms = x.abs() @ weight.abs().mT + (0 if bias is None else bias.double().abs())
    rounding = (weight.shape[1] + 4) * torch.finfo(torch.float32).eps * terms
    if kind == "weights":
        return rounding
    return rounding + step(x) / 2 * weight.abs().sum(1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_projection_computes_with_int8(kind: str) -> None:
    layer, seen = quantised(kind), {}
    plain = dequantised(layer)
    for name in PROJECTIONS:
        projection = layer.get_submodule(name)
        assert projection.weight.qdata.dtype == torch.int8
        projection.register_forward_hook(
            lambda _, given, out, name=name: seen.update({name: (given[0], out)})
        )
    x = tokens()
    layer(x, mask=MASK)
    for name in PROJECTIONS:
        given, out = seen[name]
        weight, bias = (getattr(plain.get_submodule(name), own) for own in ("weight", "bias"))
        exact = given.double() @ weight.double().mT + bias.double()
        assert torch.all((out - exact).abs() <= bound(given, weight, bias, kind))
    # What is between the projections is attention.
    matrix, v = layer.matrix(x, mask=MASK), seen["v_proj"][1].unflatten(-1, (2, 7)).transpose(1, 2)
    found = seen["out_proj"][0].unflatten(-1, (HEADS, 7)).transpose(1, 2)
    Budget.for_head_outputs(matrix.q, matrix.k, v, mask=MASK).assert_holds(found)


def test_int8_weights_are_the_layer_of_those_weights() -> None:
    layer, x = quantised("weights"), tokens()
    plain = dequantised(layer)
    allowed = budget_of(plain, OUTPUT, x)
    allowed.assert_holds(layer(x, mask=MASK))
    parts = layer.contributions(x, mask=MASK)
    budget_of(plain, PARTS, x).assert_holds(parts)
    allowed.assert_holds(parts.sum(1) + layer.out_proj.bias)
    cache = layer.cache(batch=BATCH, length=LENGTH)
    steps = [layer(part, mask=MASK, cache=cache) for part in x.split(1, dim=1)]
    allowed.assert_holds(torch.cat(steps, dim=1))
    # All four: with the float weight in one of them it is another function.
    for name in PROJECTIONS:
        assert not budget_of(dequantised(layer, but=name), OUTPUT, x).check(layer(x, mask=MASK))


class Products(TorchDispatchMode):
    """Counts products of int8 with int8."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._int_mm.default
        return func(*args, **(kwargs or {}))


def test_int8_activations_are_multiplied_as_integers() -> None:
    layer = quantised("activations")
    with Products() as forward:
        layer(tokens(), mask=MASK)
    with Products() as parts:
        layer.contributions(tokens(), mask=MASK)
    assert forward.count == 4
    assert parts.count == 3 + 1 + HEADS  # the output's bias, and one for each head


def test_contributions_of_int8_activations() -> None:
    """Each head is quantised with its own step, which is no larger than that of all together."""
    layer, x = quantised("activations"), tokens()
    weight = layer.out_proj.weight.dequantize()
    outputs = layer.head_outputs(x, mask=MASK)
    merged = outputs.transpose(1, 2).flatten(2)
    found = layer.contributions(x, mask=MASK)
    for head, part in enumerate(weight.unflatten(1, (HEADS, 7)).unbind(1)):
        own = outputs[:, head]
        exact = own.double() @ part.double().mT
        # The bias is added by the projection, and taken away.
        allowed = bound(own, part, 2 * layer.out_proj.bias, "activations")
        assert torch.all((found[:, head] - exact).abs() <= allowed)
    expected = layer(x, mask=MASK) - layer.out_proj.bias
    allowed = 2 * HEADS * bound(merged, weight, layer.out_proj.bias, "weights")
    allowed += step(merged) * weight.abs().sum(1)
    assert torch.all((found.sum(1) - expected).abs() <= allowed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_layer_is_copied_and_loaded(kind: str) -> None:
    layer, x = quantised(kind), tokens()
    other, fresh = copy.deepcopy(layer), base()
    fresh.load_state_dict(layer.state_dict(), strict=True, assign=True)
    assert torch.equal(other(x, mask=MASK), layer(x, mask=MASK))
    assert torch.equal(fresh(x, mask=MASK), layer(x, mask=MASK))
    assert not torch.equal(base()(x, mask=MASK), layer(x, mask=MASK))
