"""`compare(gradients=True)`: attentions whose outputs agree, and whose gradients may not."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from headwise import Attention, Mask, Rotary, compare
from headwise.diagnosis.subjects.layers import NativeSubject
from headwise.errors import OptionError
from headwise.identify.results import Diagnosis, Verdict
from headwise.testing import assert_same_function

WIDTH, HEADS = 40, 5


def layer(**options: object) -> Attention:
    torch.manual_seed(0)
    return Attention(WIDTH, HEADS, **options)  # type: ignore[arg-type]


def apart(diagnosis: Diagnosis) -> set[str]:
    """The names of the gradients that differ."""
    assert diagnosis.function is not None
    return {gap.name for gap in diagnosis.function.gradients if not gap.is_rounding}


def compared(diagnosis: Diagnosis) -> set[str]:
    assert diagnosis.function is not None
    return {gap.name for gap in diagnosis.function.gradients}


WEIGHTS = {"wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo"}


def test_gradients_of_a_copy_agree() -> None:
    a = layer(rotary=Rotary(), num_kv_heads=1)
    diagnosis = compare(a, copy.deepcopy(a), gradients=True)
    assert diagnosis.verdict is Verdict.SAME
    assert compared(diagnosis) == {"x", *WEIGHTS}
    assert not apart(diagnosis)


def test_gradients_are_listed_in_the_order_of_the_weights() -> None:
    """An order by the seed of hashes would differ from run to run."""
    a = layer()
    function = compare(a, copy.deepcopy(a), gradients=True).function
    assert function is not None
    names = [gap.name for gap in function.gradients]
    assert names == ["x", *NativeSubject(a).model.weights, "source"]


def test_torchs_layer_and_its_port_have_the_same_gradients() -> None:
    torch.manual_seed(0)
    original = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    ported = Attention.from_layout(original.state_dict(), layout="torch-packed", num_heads=HEADS)
    diagnosis = compare(original, ported, gradients=True)
    assert diagnosis
    assert compared(diagnosis) == {"x", "source", *WEIGHTS}


@pytest.mark.slow
def test_a_module_of_transformers_has_gradients() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=48, num_attention_heads=6, num_key_value_heads=2)
    config._attn_implementation = "sdpa"
    module = LlamaAttention(config, layer_idx=0)
    diagnosis = compare(module, copy.deepcopy(module), gradients=True)
    assert diagnosis
    assert compared(diagnosis) == {"x", "wq", "wk", "wv", "wo"}


class Detached(Attention):
    """An attention that trains its values alone: the paths of queries and keys are cut."""

    def forward(self, x: Tensor, source: Tensor | None = None, **options: object) -> Tensor:
        keys = x if source is None else source
        self.q_proj.weight.requires_grad_(False)
        self.q_proj.bias.requires_grad_(False)
        output: Tensor = super().forward(x, keys, **options)  # type: ignore[arg-type]
        return output


@pytest.mark.slow
def test_a_projection_that_is_not_trained_is_named() -> None:
    b = layer()
    a = Detached(WIDTH, HEADS)
    a.load_state_dict(b.state_dict())
    assert compare(a, b).verdict.is_same
    diagnosis = compare(a, b, gradients=True)
    assert diagnosis.verdict is Verdict.UNKNOWN
    assert apart(diagnosis) == {"wq", "bq"}
    assert "gradient of wq: apart by 1 of its size" in str(diagnosis)
    assert diagnosis.answer == ("Different in training alone: outputs agree, and gradients do not.")
    with pytest.raises(AssertionError, match="gradient of bq"):
        assert_same_function(a, b, gradients=True)


def test_a_function_has_gradients_of_its_inputs() -> None:
    b = layer()
    same = compare(lambda x, **named: b(x, **named_for(named)), b, gradients=True)
    assert same
    assert compared(same) == {"x"}
    half = compare(lambda x, **named: b(half_gradient(x), **named_for(named)), b, gradients=True)
    assert apart(half) == {"x"}
    with pytest.raises(OptionError, match="whose output records no gradient"):
        compare(lambda x, **named: b(x, **named_for(named)).detach(), b, gradients=True)


def half_gradient(x: Tensor) -> Tensor:
    return 0.5 * x + (0.5 * x).detach()


def named_for(named: dict[str, Tensor]) -> dict[str, object]:
    """The arguments of a layer for those of a function."""
    mask = named.pop("mask", None)
    axes = "batch queries keys"
    return {**named, **({} if mask is None else {"mask": Mask.may_attend(mask[0], axes=axes)})}


def test_permuted_heads_have_the_gradients_of_their_inputs() -> None:
    b = layer(num_kv_heads=HEADS)
    a = copy.deepcopy(b)
    order = torch.tensor([2, 0, 1, 4, 3])
    rows = torch.arange(WIDTH).unflatten(0, (HEADS, -1))[order].flatten()
    with torch.no_grad():
        for projection in (a.q_proj, a.k_proj, a.v_proj):
            projection.weight.copy_(projection.weight[rows])
            projection.bias.copy_(projection.bias[rows])
        a.out_proj.weight.copy_(a.out_proj.weight[:, rows])
    diagnosis = compare(a, b, gradients=True)
    assert diagnosis.verdict is Verdict.OTHER_WEIGHTS
    assert compared(diagnosis) == {"x", "source"}


def weights(a: Attention) -> object:
    return a.state_dict()


def whole(a: Attention) -> object:
    return nn.Sequential(a, copy.deepcopy(a))


@pytest.mark.parametrize("of", [weights, whole])
def test_gradients_of_other_things_are_refused(of: Callable[[Attention], object]) -> None:
    a = layer()
    inputs = torch.randn(1, 4, WIDTH) if of is whole else None
    with pytest.raises(OptionError, match="gradients=True"):
        compare(of(a), of(a), inputs, gradients=True)  # type: ignore[arg-type]
