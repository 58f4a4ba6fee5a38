"""Every pair of options that can be combined, against the layer written out by hand."""

import pytest
import torch
from torch import Tensor

from headwise import Attention
from headwise.matrix.kernels import varlen
from tests.layers import reference
from tests.layers.cases import AXES, Case, inputs_of, layer_of, pairwise

CASES = pairwise()


def named(case: Case) -> str:
    return "; ".join(f"{axis} {case[axis]}" for axis in AXES)


def bound(layer: Attention, values: Tensor, dtype: torch.dtype) -> float:
    """Rounding of every sum in a row of the layer, each as long as it is, forward and backward."""
    sums = layer.embed_dim + layer.source_dim + 4 * layer.head_dim + 8 * 29 + layer.out_dim
    sums += layer.num_heads * layer.value_dim
    return sums * torch.finfo(dtype).eps * max(1.0, float(values.detach().abs().max()))


@pytest.mark.parametrize("worth", [1, varlen.CALL], ids=["pieces", "whole"])
@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_case_is_the_reference(case: Case, worth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # At these sizes packing is not worth it; it is still the same function.
    monkeypatch.setattr(varlen, "CALL", worth)
    layer, (tensors, options) = layer_of(case), inputs_of(case)
    found, expected = layer(*tensors, **options), reference.output(layer, *tensors, **options)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= bound(layer, expected, torch.float64)
    leaves = [*tensors, *layer.parameters()]
    leaves += [] if options["gate"] is None else [options["gate"]]
    direction = torch.randn_like(expected)
    ours, theirs = (
        torch.autograd.grad(out, leaves, direction, materialize_grads=True)
        for out in (found, expected)
    )
    for gradient, wanted in zip(ours, theirs, strict=True):
        tolerance = len(direction.flatten(0, 1)) * bound(layer, wanted, torch.float64)
        assert (gradient - wanted).abs().max() <= tolerance


def test_the_cases_hold_every_pair() -> None:
    seen = {(a, case[a], b, case[b]) for case in CASES for a in AXES for b in AXES}
    assert ("rotary", "half-split", "by distance", "t5") in seen
    assert ("mask", "both lengths", "gate", "batch heads") in seen
    assert ("source", "another", "rotary", "half-split") not in seen
    assert len(CASES) < 64
