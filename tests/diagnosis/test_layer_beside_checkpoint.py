"""One layer beside the weights of a whole model: the same layer is compared, or none."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

from headwise import Attention, Rotary, compare
from headwise.errors import OptionError
from headwise.identify.results import Verdict


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=40,
        num_hidden_layers=3,
        num_attention_heads=5,
        num_key_value_heads=1,
        intermediate_size=24,
        vocab_size=29,
    )
    return LlamaModel(config).eval()


def tensors_of_layer(model: LlamaModel, prefix: str) -> dict[str, Tensor]:
    state = model.state_dict()
    return {n.removeprefix(prefix): x for n, x in state.items() if n.startswith(prefix)}


@pytest.fixture
def layer(model: LlamaModel) -> Attention:
    state = tensors_of_layer(model, "layers.1.self_attn.")
    return Attention.from_layout(state, layout="llama", num_heads=5, rotary=Rotary())


def test_a_layer_that_states_its_number_is_compared_with_that_layer(model: LlamaModel) -> None:
    state, attention = model.state_dict(), model.layers[1].self_attn
    assert compare(attention, state).verdict is Verdict.SAME
    assert compare(state, attention).verdict is Verdict.SAME
    other = copy.deepcopy(attention)
    with torch.no_grad():
        other.q_proj.weight.neg_()
    [module] = compare(other, state).moves
    assert module.causes == ("sign",)


def test_a_layer_without_a_number_is_compared_with_none(
    layer: Attention, model: LlamaModel, tmp_path: Path
) -> None:
    state = model.state_dict()
    with pytest.raises(OptionError, match="one layer beside weights of 3 attention") as error:
        compare(layer, state)
    prefix = "layers.2.self_attn."
    assert (
        error.value.do == f"give the tensors of one layer, such as `{prefix}`, without this prefix"
    )
    assert compare(layer, tensors_of_layer(model, prefix)).verdict is Verdict.DIFFERENT
    save_file(state, tmp_path / "model.safetensors")
    for pair in ((layer, tmp_path), (tmp_path, layer)):
        with pytest.raises(OptionError, match="one layer beside weights of 3") as error:
            compare(*pair)
        assert "load_attention(path, layer=2)" in error.value.do


def test_the_only_layer_of_a_state_dict_may_have_any_prefix(
    layer: Attention, model: LlamaModel
) -> None:
    """Its names are those of Llama and of Cohere, whose rows have another order."""
    only = {n: x for n, x in model.state_dict().items() if n.startswith("layers.1.self_attn.")}
    found = compare(layer, only)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "read as headwise and llama;" in found.lines[0]
    assert found.lines[0].endswith("attention is equal")
    only["layers.1.self_attn.v_proj.weight"] = -only["layers.1.self_attn.v_proj.weight"]
    assert compare(layer, only).verdict is Verdict.DIFFERENT
