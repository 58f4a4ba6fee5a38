"""Projections whose modules do more than multiply by their weights."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headwise import Attention, compare
from headwise.identify.results import Verdict
from tests.quick import others_slow


def layer() -> Attention:
    torch.manual_seed(0)
    return Attention(32, 4, num_kv_heads=2)


def with_hook(original: Attention, role: str, function: Callable[[Tensor], Tensor]) -> Attention:
    """Return a copy whose projection has a hook."""
    hooked = copy.deepcopy(original)
    module = hooked.out_proj if role == "o" else getattr(hooked, f"{role}_proj")
    assert isinstance(module, nn.Module)
    module.register_forward_hook(lambda _, inputs, output: function(output))
    return hooked


def causes(a: Attention, b: Attention) -> list[tuple[str, object]]:
    diagnosis = compare(a, b)
    assert diagnosis.function is not None
    return [(cause.name, cause.parameters) for cause in diagnosis.function.causes]


@pytest.mark.slow
@pytest.mark.parametrize("role", others_slow(["q", "k", "v", "o"]))
def test_a_hook_that_never_runs(role: str) -> None:
    original = layer()
    hooked = with_hook(original, role, lambda output: 0.6 * output)
    assert causes(original, hooked) == [("projection never called", {"roles": role})]


@pytest.mark.slow
def test_beside_a_scale() -> None:
    original = layer()
    hooked = with_hook(original, "v", lambda output: 0.6 * output)
    original.scale = 0.5
    names = {name for name, _ in causes(original, hooked)}
    assert names == {"projection never called", "scale"}


def test_a_hook_of_the_first_is_a_factor() -> None:
    original = layer()
    hooked = with_hook(original, "v", lambda output: 0.6 * output)
    assert [name for name, _ in causes(hooked, original)] == ["factor"]


@pytest.mark.slow
def test_two_layers_with_the_same_hook() -> None:
    hooked = with_hook(layer(), "v", lambda output: 0.6 * output)
    assert compare(copy.deepcopy(hooked), hooked)


@pytest.mark.slow
def test_another_factor_than_that_of_the_hook_is_no_missing_call() -> None:
    original = layer()
    mine = with_hook(original, "v", lambda output: 0.7 * output)
    theirs = with_hook(original, "v", lambda output: 0.6 * output)
    assert [name for name, _ in causes(mine, theirs)] == ["factor"]


@pytest.mark.slow
def test_a_hook_that_no_cause_explains_is_not_the_same() -> None:
    original = layer()
    hooked = with_hook(original, "v", torch.tanh)
    diagnosis = compare(original, hooked)
    assert diagnosis.verdict is Verdict.INCONCLUSIVE
    assert diagnosis.function is not None
    assert "hook" in diagnosis.function.blind
    assert compare(copy.deepcopy(hooked), hooked).verdict is Verdict.SAME
