"""The layers of headwise, whose own layouts all others are read into."""

from dataclasses import replace
from typing import Any

import pytest

from headwise import Attention, Mask, Rotary
from headwise.function import Latent
from headwise.layers.norm import QKNorm
from headwise.layouts.registry import layout
from tests.layouts.real import Real, assert_same_function, inputs, sharpen


def of_layer(**options: Any) -> Real:
    """A layer with every size of its own, and with whatever has weights."""
    layer = Attention(
        40, 12, num_kv_heads=3, head_dim=10, value_dim=7, out_dim=44, sink=True, **options
    )
    layer = layer.double().eval()
    sharpen(layer)
    x, mask = inputs(40), Mask.causal()
    outputs = layer(x, mask=mask).detach()
    return Real(layer.state_dict(), x, outputs, {"num_heads": 12, **options}, mask=mask)


def headwise() -> Real:
    return of_layer(scale=0.2, rotary=Rotary(width=6), qk_norm=QKNorm(kind="layer"))


def headwise_width_norm() -> Real:
    return of_layer(scale=None, rotary=Rotary(), qk_norm=QKNorm(over="width"))


def headwise_latent() -> Real:
    latent = Latent(rank=11, shared_width=6, query_rank=13)
    layer = Attention(40, 12, head_dim=10, value_dim=7, out_dim=44, sink=True, latent=latent)
    layer = layer.double().eval()
    sharpen(layer)
    x, mask = inputs(40), Mask.causal()
    arguments: dict[str, Any] = {"num_heads": 12, "scale": None}
    return Real(layer.state_dict(), x, layer(x, mask=mask).detach(), arguments, mask=mask)


def canonical() -> Real:
    """The weights of the layer with a matrix for each head."""
    real = headwise()
    state = layout("headwise").unpack(real.state, heads=12, kv_heads=3)
    return replace(real, state=state)


CASES = {
    "headwise": headwise,
    "headwise-width-norm": headwise_width_norm,
    "headwise-latent": headwise_latent,
    "canonical": canonical,
}


@pytest.mark.parametrize("name", CASES)
def test_same_function(name: str) -> None:
    assert_same_function(name, CASES[name]())
