"""LoRA by the peft library: the projections are replaced, and the layer stays what it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from headwise import Attention, Mask, Rotary
from headwise.layers.norm import QKNorm
from headwise.testing import Budget
from tests.layers import reference
from tests.layers.ecosystem import (
    BATCH,
    LENGTH,
    PROJECTIONS,
    contributions,
    layer_of,
    read_with,
    tokens,
)

if TYPE_CHECKING:
    from peft import PeftModel

RANK, ALPHA = 3, 5
MASK = Mask.causal()
TARGETS = [("q_proj", "v_proj"), ("out_proj",), PROJECTIONS]


def base() -> Attention:
    return layer_of(rotary=Rotary(), qk_norm=QKNorm())


def adapted(targets: tuple[str, ...], *, trained: bool) -> tuple[PeftModel, Attention]:
    """peft's model, and the layer within. Not trained, the second factor is 0."""
    from peft import LoraConfig, get_peft_model  # seconds, which other tests need not wait for

    layer = base()
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=list(targets), init_lora_weights=not trained
    )
    return get_peft_model(layer, config), layer


def factors(layer: Attention, name: str) -> tuple[Tensor, Tensor]:
    """The two factors of one projection's adapter, (r, in) and (out, r)."""
    projection = layer.get_submodule(name)
    return projection.lora_A["default"].weight, projection.lora_B["default"].weight


def budget_of_adapted(
    layer: Attention, targets: tuple[str, ...], read: Callable[..., Tensor], x: Tensor
) -> Budget:
    """What ``read`` should give of the base layer with W + alpha / r * B A as its weights."""
    plain = base()
    names = [name for name, _ in plain.named_parameters()]
    values = [p.detach() for p in plain.parameters()]
    own = [factor.detach() for name in targets for factor in factors(layer, name)]

    def function(x: Tensor, *given: Tensor) -> Tensor:
        parameters = dict(zip(names, given, strict=False))
        adapters = given[len(names) :]
        for index, name in enumerate(targets):
            a, b = adapters[2 * index : 2 * index + 2]
            weight = parameters[f"{name}.weight"]
            parameters[f"{name}.weight"] = weight + ALPHA / RANK * (b @ a)
        return read_with(plain, parameters, read, x)

    return Budget.for_function(function, x, *values, *own)


@pytest.mark.parametrize("targets", TARGETS, ids=", ".join)
def test_an_adapter_trains_and_the_base_is_frozen(targets: tuple[str, ...]) -> None:
    model, layer = adapted(targets, trained=False)
    x = tokens()
    first = model(x, mask=MASK)
    assert torch.equal(first, base()(x, mask=MASK))  # its second factor is 0
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(2):
        optimiser.zero_grad()
        model(x, mask=MASK).square().mean().backward()
        for name in targets:
            a, b = (factor.grad for factor in factors(layer, name))
            assert b.abs().max() > 0
            assert bool(a.abs().max() > 0) is (step > 0)
        optimiser.step()
    moved = {name for name, p in layer.named_parameters() if p.grad is not None}
    assert moved == {f"{name}.lora_{f}.default.weight" for name in targets for f in "AB"}
    assert not torch.equal(model(x, mask=MASK), first)
    frozen = {
        name.replace(".base_layer", ""): p
        for name, p in layer.named_parameters()
        if "lora" not in name
    }
    assert all(torch.equal(p, frozen[name]) for name, p in base().named_parameters())


@pytest.mark.parametrize("targets", TARGETS, ids=", ".join)
def test_adapted_and_merged_are_the_same_function(targets: tuple[str, ...]) -> None:
    model, layer = adapted(targets, trained=True)
    x = tokens()
    output = partial(reference.output, mask=MASK)
    parts = partial(contributions, mask=MASK)
    allowed = [budget_of_adapted(layer, targets, read, x) for read in (output, parts)]
    assert not allowed[0].check(base()(x, mask=MASK))

    def check(own: Attention) -> None:
        with torch.no_grad():
            allowed[0].assert_holds(own(x, mask=MASK))
            found = own.contributions(x, mask=MASK)
            allowed[1].assert_holds(found)
            allowed[0].assert_holds(found.sum(1) + own.out_proj.bias)
            cache = own.cache(batch=BATCH, length=LENGTH)
            steps = [own(part, mask=MASK, cache=cache) for part in x.split(1, dim=1)]
            allowed[0].assert_holds(torch.cat(steps, dim=1))

    check(layer)
    merged = model.merge_and_unload()
    assert merged is layer
    assert "lora" not in str(merged)
    check(merged)
