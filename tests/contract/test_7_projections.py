"""Clause 7: the drop-in is torch's, nothing more; every projection that is a module is called."""

import inspect

import pytest
import torch
from torch import nn

from headwise import MultiheadAttention
from tests.contract.layers import identity_attention, identity_layer, inputs


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_the_signature_is_torchs(method: str) -> None:
    ours, theirs = (
        [
            (p.name, p.kind, p.default)
            for p in inspect.signature(getattr(cls, method)).parameters.values()
        ]
        for cls in (MultiheadAttention, nn.MultiheadAttention)
    )
    assert ours == theirs


@pytest.mark.parametrize("options", [{}, {"kdim": 7}, {"bias": False}, {"add_bias_kv": True}])
def test_the_parameters_are_torchs(options: dict[str, object]) -> None:
    ours, theirs = (
        cls(24, 4, **options)  # type: ignore[arg-type]
        for cls in (MultiheadAttention, nn.MultiheadAttention)
    )
    assert isinstance(ours, nn.MultiheadAttention)
    assert [(n, p.shape) for n, p in ours.named_parameters()] == [
        (n, p.shape) for n, p in theirs.named_parameters()
    ]
    assert vars(ours).keys() == vars(theirs).keys()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_out_proj_is_called(grad: bool, need_weights: bool) -> None:
    layer, x = identity_layer().eval(), inputs()
    calls: list[torch.Size] = []

    class Counting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(x.shape)
            return super().forward(x) * 2

    before = layer(x, x, x, need_weights=need_weights)[0]
    layer.out_proj.__class__ = Counting
    with torch.set_grad_enabled(grad):
        after = layer(x, x, x, need_weights=need_weights)[0]
    assert calls == [x.shape]
    torch.testing.assert_close(after, before * 2)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "out_proj"])
def test_the_native_layer_calls_each_projection_once(name: str, grad: bool) -> None:
    layer, x = identity_attention().eval(), inputs()
    projection, calls = getattr(layer, name), []

    class Counting(type(projection)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(x.shape)
            return super().forward(x) * 2

    projection.__class__ = Counting
    with torch.set_grad_enabled(grad):
        after = layer(x)
    assert calls == [x.shape]
    other = identity_attention()
    getattr(other, name).weight.data.mul_(2)
    assert torch.equal(after, other(x))
