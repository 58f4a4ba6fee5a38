"""A model beside a layer, wrappers of peft, and quantised weights."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import Attention, compare, convert, verify
from headwise.errors import DTypeError, OptionError
from tests.diagnosis.test_stopped import interrupt_at

peft = pytest.importorskip("peft")
torchao = pytest.importorskip("torchao.quantization")


def adapted(module: nn.Module, *names: str) -> Any:
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules=list(names), init_lora_weights=False)
    return peft.get_peft_model(module, config).eval()


class OneAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(24, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x)[0]


@pytest.mark.slow
def test_a_whole_model_beside_a_layer_names_its_layer() -> None:
    block = nn.TransformerEncoderLayer(24, 4, 12, batch_first=True)
    model, layer = nn.TransformerEncoder(block, 2).eval(), Attention(24, 4)
    with pytest.raises(OptionError, match=r"b=b\.layers\[0\]\.self_attn"):
        compare(layer, model)
    with pytest.raises(OptionError, match=r"a is a whole model, TransformerEncoder"):
        compare(model, layer)
    found = compare(model.layers[0].self_attn, layer, progress=interrupt_at("trying"))
    assert found.function is not None  # what the message says is compared


@pytest.mark.slow
def test_a_layer_in_a_wrapper_of_peft_is_read_with_its_adapters() -> None:
    base = Attention(24, 4).eval()
    wrapped = adapted(copy.deepcopy(base), "q_proj", "v_proj")
    found = compare(wrapped, base)
    assert found.function.causes[0].name == "adapters merged or not"
    assert "q and v, rank 2" in str(found)
    assert compare(base, wrapped).function.causes[0].name == "adapters merged or not"
    assert compare(wrapped, copy.deepcopy(wrapped)).verdict.is_same
    with wrapped.disable_adapter():
        assert compare(wrapped, base).verdict.is_same
    merged = wrapped.base_model.merge_and_unload()
    assert compare(merged, base).verdict is not compare(base, base).verdict
    again = adapted(copy.deepcopy(base), "q_proj", "v_proj")
    assert compare(again, merged).verdict.is_same


@pytest.mark.slow
def test_torchs_layer_in_a_wrapper_of_peft() -> None:
    model = OneAttention().eval()
    wrapped = adapted(copy.deepcopy(model), "attn")
    layer = wrapped.base_model.model.attn
    assert compare(layer, model.attn).function.causes[0].name == "adapters merged or not"
    x = torch.randn(3, 7, 24)
    before = wrapped(x)
    merged = copy.deepcopy(layer).unload_and_optionally_merge_module(True, False, None)
    torch.testing.assert_close(merged(x, x, x)[0], before)
    assert compare(layer, merged).verdict.is_same
    assert torch.equal(wrapped(x), before)  # the caller's layer is as it was


@pytest.mark.filterwarnings("ignore")
def test_quantised_weights_are_named() -> None:
    base = Attention(24, 4).eval()
    layer = copy.deepcopy(base)
    torchao.quantize_(
        layer, torchao.Int8WeightOnlyConfig(), filter_fn=lambda m, _: isinstance(m, nn.Linear)
    )
    state = layer.state_dict()
    calls = [
        lambda: compare(layer, base),
        lambda: verify(state, base.state_dict(), heads=4),
        lambda: convert(state, "headwise", "torch-packed", heads=4),
    ]
    for call in calls:
        with pytest.raises(DTypeError, match=r"quantised: its type is \w+ of torchao") as error:
            call()
        assert str(error.value).endswith("replace each weight by weight.dequantize()")
    mended = {name: getattr(x, "dequantize", x.clone)() for name, x in state.items()}
    assert len(convert(mended, "headwise", "torch-packed", heads=4)) == 4


def test_a_layer_whose_projections_are_quantised_by_torch_has_no_parameters() -> None:
    base = Attention(24, 4).eval()
    layer = copy.deepcopy(base)
    for name, _ in base.named_children():  # as quantize_dynamic does, without its slow imports
        setattr(layer, name, nn.Identity())
    with pytest.raises(DTypeError, match=r"compare\(lambda x: layer\(x\), original\)"):
        compare(layer, base)
