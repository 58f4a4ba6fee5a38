"""Projections whose weight is computed from others: torch's parametrisations, and pruning."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from headwise import Attention, Mask, Rotary
from tests.layers import reference
from tests.layers.ecosystem import BATCH, LENGTH, PROJECTIONS, budget_of, layer_of, tokens

KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}
MASK = Mask.causal()


def plain_with(weights: dict[str, Tensor]) -> Attention:
    """The same layer, with these weights and nothing that computes them."""
    plain = layer_of(rotary=Rotary())
    plain.load_state_dict(weights, strict=False)
    return plain


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_parametrised_weight_is_the_one_used(kind: str, name: str) -> None:
    layer = layer_of(rotary=Rotary()).eval()
    projection = layer.get_submodule(name)
    before = projection.weight.detach().clone()
    KINDS[kind](projection)
    with torch.no_grad():
        for parameter in projection.parametrizations.weight.parameters():
            parameter.mul_(1.25)  # weight_norm of a weight is the weight itself at first
    weight = projection.weight.detach()
    assert (weight - before).abs().max() > 1e-3
    plain = plain_with({f"{name}.weight": weight})
    x = tokens().requires_grad_()
    outputs = [own(x, mask=MASK) for own in (layer, plain)]
    assert torch.equal(*outputs)
    budget_of(plain, partial(reference.output, mask=MASK), tokens()).assert_holds(outputs[0])
    direction = torch.randn_like(outputs[0])
    originals = list(projection.parametrizations.weight.parameters())
    found = torch.autograd.grad(outputs[0], [x, *originals], direction)
    own, of_weight = torch.autograd.grad(
        outputs[1], [x, plain.get_submodule(name).weight], direction
    )
    assert torch.equal(found[0], own)
    # The rest of the chain is torch's.
    expected = torch.autograd.grad(projection.weight, originals, of_weight)
    assert all(map(torch.equal, found[1:], expected))
    assert all(gradient.abs().max() > 0 for gradient in expected)


class Counted(nn.Module):
    """A parametrisation that counts how often it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.times += 1
        return -weight


@pytest.mark.parametrize("name", PROJECTIONS)
def test_a_weight_is_computed_once_in_a_forward_pass(name: str) -> None:
    """orthogonal takes a matrix exponential for it, and spectral_norm a step of its iteration."""
    layer, counted = layer_of(rotary=Rotary()), Counted()
    parametrize.register_parametrization(layer.get_submodule(name), "weight", counted)
    counted.times = 0
    cache = layer.cache(batch=BATCH, length=LENGTH)
    assert counted.times == 0
    layer(tokens())
    assert counted.times == 1
    with torch.no_grad():
        layer(tokens(), cache=cache)
    assert counted.times == 2


def test_spectral_norm_takes_one_step_for_each_forward_pass() -> None:
    """In training, as it does for a linear layer alone."""
    layer, alone = layer_of(), layer_of().q_proj
    for projection in (layer.q_proj, alone):
        torch.manual_seed(5)
        parametrizations.spectral_norm(projection)
    for _ in range(3):
        layer(tokens())
        alone(tokens())
    ours, theirs = (own.parametrizations.weight[0] for own in (layer.q_proj, alone))
    assert torch.equal(ours._u, theirs._u)
    assert torch.equal(ours._v, theirs._v)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_what_is_pruned_stays_zero(name: str) -> None:
    layer = layer_of(rotary=Rotary())
    projection = layer.get_submodule(name)
    prune.random_unstructured(projection, "weight", amount=0.5)
    kept = projection.weight_mask.bool()
    plain = plain_with({f"{name}.weight": (projection.weight_orig * projection.weight_mask)})
    x, optimiser = tokens(), torch.optim.SGD(layer.parameters(), lr=0.1)
    output = layer(x, mask=MASK)
    assert torch.equal(output, plain(x, mask=MASK))
    assert not torch.equal(output, layer_of(rotary=Rotary())(x, mask=MASK))
    output.square().sum().backward()
    gradient = projection.weight_orig.grad
    assert gradient[kept].abs().max() > 0
    assert torch.all(gradient[~kept] == 0)
    optimiser.step()
    layer(x, mask=MASK)
    assert torch.all(projection.weight[~kept] == 0)
    prune.remove(projection, "weight")
    assert torch.equal(layer(x, mask=MASK), plain_with(layer.state_dict())(x, mask=MASK))
    parts = layer.contributions(x, mask=MASK)
    budget_of(layer, partial(reference.output, mask=MASK), x).assert_holds(
        parts.sum(1) + layer.out_proj.bias
    )
