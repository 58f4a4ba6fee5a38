"""The projections are plain `torch.nn.Linear`, which libraries look for by its exact type."""

import warnings

import torch
from torch import nn

from headwise import Attention, Mask, Rotary

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


def test_every_projection_is_linear_and_no_subclass() -> None:
    layer = Attention(40, 6, head_dim=10, num_kv_heads=2)
    assert {type(layer.get_submodule(name)) for name in PROJECTIONS} == {nn.Linear}


def test_dynamic_quantisation_replaces_every_projection() -> None:
    torch.manual_seed(2)
    layer = Attention(40, 6, head_dim=10, num_kv_heads=2, rotary=Rotary()).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its own function deprecated
        quantised = torch.ao.quantization.quantize_dynamic(
            nn.Sequential(layer), {nn.Linear}, dtype=torch.qint8
        )[0]
    x, mask = torch.randn(3, 24, 40), Mask.causal()
    with torch.no_grad():
        for name in PROJECTIONS:
            projection = quantised.get_submodule(name)
            assert "quantized" in type(projection).__module__
            # The layer with the weights that int8 holds differs by rounded activations alone.
            layer.get_submodule(name).weight.copy_(projection.weight().dequantize())
        cache = quantised.cache(batch=3, length=24)
        steps = [quantised(part, mask=mask, cache=cache) for part in x.split((9, 1, 14), dim=1)]
        found, expected = quantised(x, mask=mask), layer(x, mask=mask)
    step = x.abs().max() / 127  # of int8 activations, for each of four products in turn
    for output in (found, torch.cat(steps, dim=1)):
        error = (output - expected).abs().max()
        assert 0 < error <= 4 * step * expected.abs().max()
