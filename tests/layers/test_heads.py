"""What the layer tells of its heads, and the gate that stands on each."""

import pytest
import torch

from headwise import Attention, Mask
from tests.layers import reference
from tests.layers.cases import Case, inputs_of, layer_of
from tests.layers.test_options import bound

CASE: Case = {
    "kv_heads": "2",
    "widths": "10, 7, 17",
    "rotary": "partial",
    "qk_norm": "width",
    "softcap": "3",
    "sink": "yes",
    "mask": "both lengths",
}
ACROSS: Case = {"kv_heads": "2", "widths": "10, 7, 17", "source": "another", "mask": "dense"}


@pytest.mark.parametrize("case", [CASE, ACROSS])
def test_contributions_sum_to_the_output_less_its_bias(case: Case) -> None:
    layer, (tensors, options) = layer_of(case), inputs_of(case)
    del options["gate"]
    found = layer.contributions(*tensors, **options)
    assert found.shape == (3, 6, 24, 17)
    expected = layer(*tensors, **options) - layer.out_proj.bias
    assert (found.sum(1) - expected).abs().max() <= bound(layer, expected, torch.float64)
    outputs = layer.head_outputs(*tensors, **options)
    head = outputs[:, 4] @ layer.out_proj.weight[:, 4 * 7 : 5 * 7].mT
    assert (found[:, 4] - head).abs().max() <= bound(layer, head, torch.float64)


@pytest.mark.parametrize("case", [CASE, ACROSS])
def test_head_outputs_and_matrix_are_the_reference(case: Case) -> None:
    layer, (tensors, options) = layer_of(case), inputs_of(case)
    del options["gate"]
    expected = reference.head_outputs(layer, *tensors, **options)
    tolerance = bound(layer, expected, torch.float64)
    assert (layer.head_outputs(*tensors, **options) - expected).abs().max() <= tolerance
    matrix = layer.matrix(*tensors, **options)
    assert matrix.shape == (3, 6, 24, tensors[-1].shape[1])
    v = reference.applied(layer.v_proj, tensors[-1]).unflatten(-1, (2, 7)).transpose(1, 2)
    assert (matrix @ v - expected).abs().max() <= tolerance


def test_a_gate_of_one_changes_nothing_and_its_gradient_is_the_importance() -> None:
    layer, (tensors, _) = layer_of(CASE), inputs_of(CASE)
    gate = torch.ones(6, dtype=torch.float64, requires_grad=True)
    output = layer(*tensors, gate=gate)
    assert torch.equal(output, layer(*tensors))
    upstream = torch.randn_like(output)
    (importance,) = torch.autograd.grad(output, gate, upstream)
    # d output / d gate of a head is that head's contribution.
    expected = torch.einsum("bhqo,bqo->h", layer.contributions(*tensors), upstream)
    tolerance = upstream.numel() * bound(layer, expected, torch.float64)
    assert (importance - expected).abs().max() <= tolerance


def test_a_gate_of_zero_takes_its_head_away() -> None:
    layer, (tensors, _) = layer_of(CASE), inputs_of(CASE)
    gate = torch.ones(3, 6, dtype=torch.float64)
    gate[1, 4] = 0
    gone = layer(*tensors) - layer(*tensors, gate=gate)
    expected = torch.zeros_like(gone)
    expected[1] = layer.contributions(*tensors)[1, 4]
    assert (gone - expected).abs().max() <= bound(layer, expected, torch.float64)


def test_the_source_may_be_x_itself() -> None:
    layer, (tensors, _) = layer_of({"kv_heads": "2"}), inputs_of({})
    (x,) = tensors
    assert torch.equal(layer(x, x), layer(x))
    copied = layer(x, x.clone())
    assert (copied - layer(x)).abs().max() <= bound(layer, copied, torch.float64)


def test_explain_names_the_kernel_and_what_is_packed() -> None:
    layer = Attention(256, 4)
    x = torch.randn(8, 512, 256)
    assert "sdpa" in str(layer.explain(x))
    assert "4,096, all of the input" in str(layer.explain(x))
    lengths = torch.tensor([512, *[30] * 7])
    told = str(layer.explain(x, mask=Mask.lengths(queries=lengths, keys=lengths)))
    assert "722 of 4,096 are real" in told
    assert "8 sequences, each a separate matrix" in told
    assert "q_proj" in told
    assert "0.095 GFLOP" in told  # 2 * 722 * 256 * 256


def test_dropout_only_in_training() -> None:
    layer = Attention(64, 4, dropout=0.5)
    x = torch.randn(2, 16, 64)
    torch.manual_seed(0)
    dropped = layer(x)
    assert not torch.equal(dropped, layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    mean = torch.stack([layer.train()(x) for _ in range(400)]).mean(0)
    spread = torch.stack([layer(x) for _ in range(50)]).std(0).max()
    assert (mean - layer.eval()(x)).abs().max() < 6 * spread / 400**0.5
