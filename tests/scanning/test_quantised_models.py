"""Models whose weights are no plain tensors: quantised by torchao."""

import copy
from typing import Any

import pytest
import torch

from headwise.errors import OptionError
from headwise.scanning._scan import scan
from headwise.scanning.file import hash_nested_content
from headwise.scanning.weights import dequantize_weight, plain_tensors_of_weight
from tests.scanning.models import BATCH, CASES, LENGTH, llama, tokens
from tests.scanning.test_facts import record_call_sizes

CONFIGS = {
    "weights": ("Int8WeightOnlyConfig", {"set_inductor_config": False}),
    "activations": ("Int8DynamicActivationInt8WeightConfig", {"set_inductor_config": False}),
    "float8": ("Float8WeightOnlyConfig", {"set_inductor_config": False}),
}


def quantised(kind: str) -> Any:
    from torchao import quantization  # seconds, which other tests need not wait for

    name, options = CONFIGS[kind]
    model = llama().float()
    quantization.quantize_(model, getattr(quantization, name)(**options))
    return model


@pytest.mark.parametrize("kind", CONFIGS)
def test_they_are_scanned(kind: str) -> None:
    found = scan(quantised(kind), tokens(BATCH, LENGTH), statistics=["entropy"])
    assert found.layers == CASES["llama"][2]
    assert found.notes == ()
    assert bool(found["entropy"].isfinite().all())


@pytest.mark.parametrize("kind", CONFIGS)
def test_their_output_projection_is_the_one_of_the_dequantised_weights(kind: str) -> None:
    """Where activations are rounded too, the layer is no product of its input and a matrix."""
    model = quantised(kind)
    for layer, call in zip(
        model.layers, record_call_sizes(model, tokens(BATCH, LENGTH)).values(), strict=True
    ):
        if kind == "activations":
            assert call.out_proj is None
        else:
            assert call.out_proj is not None
            weight = layer.self_attn.o_proj.weight.dequantize()
            assert torch.equal(call.out_proj.flatten(0, 1), weight.mT)


def test_their_scales_are_finite() -> None:
    model = quantised("weights")
    model.layers[1].mlp.up_proj.weight.scale.data[3] = torch.nan
    with pytest.raises(OptionError, match=r"layers\.1\.mlp\.up_proj\.weight holds 1 of 37 numbers"):
        scan(model, tokens(BATCH, LENGTH))


def test_weights_without_a_form_as_floats() -> None:
    whole = torch.arange(6).reshape(2, 3)
    assert dequantize_weight(whole) is None
    floats = whole.float()
    assert dequantize_weight(floats) is floats
    assert [part is whole for part in plain_tensors_of_weight(whole)] == [True]


@pytest.mark.parametrize("kind", CONFIGS)
def test_their_digest_counts_their_parts(kind: str) -> None:
    """`headwise scan --out` keeps a digest of the weights beside its parts."""
    model = quantised(kind)
    digest = hash_nested_content(model.state_dict())
    assert hash_nested_content(copy.deepcopy(model).state_dict()) == digest
    model.layers[1].mlp.up_proj.weight.scale.data[3] *= 2
    assert hash_nested_content(model.state_dict()) != digest


def test_their_digest_counts_how_they_are_quantised() -> None:
    weight = quantised("weights").layers[0].mlp.up_proj.weight
    digest = hash_nested_content(weight)
    weight.reduce_range = not weight.reduce_range
    assert hash_nested_content(weight) != digest
