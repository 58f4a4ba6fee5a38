"""Cuts of models of transformers in memory: every family, and what is refused."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from headwise.errors import DeviceError, OptionError
from headwise.surgery import Cut, ModelHeads, cut_model, full_size
from tests.quick import others_slow
from tests.surgery.families import FAMILIES, GROUPED, inputs_of, output_of, whole, without

families = pytest.mark.parametrize("family", others_slow(FAMILIES, "bert", "llama", "t5"))


def wide(family: str) -> Any:
    return FAMILIES[family]().double()


def assert_same(made: Tensor, exact: Tensor) -> None:
    """Outputs are equal but for the order of sums over 2 layers, of rows of at most 128 numbers."""
    allowed = 2 * 128 * torch.finfo(torch.float64).eps * float(exact.abs().max())
    assert float((made - exact).abs().max()) <= allowed


@families
def test_heads_that_go_are_heads_of_zeros(family: str) -> None:
    model = wide(family)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    cut = without(model, [0, 1])
    small = cut_model(cut, model)
    zeroed = cut_model(Cut({name: layer.zero([0, 1]) for name, layer in whole(model)}), model)
    assert_same(output_of(small), output_of(zeroed))
    assert float((output_of(small) - output_of(model)).abs().max()) > 1e-4
    assert sum(x.numel() for x in small.parameters()) < sum(x.numel() for x in model.parameters())
    assert cut_model(full_size(cut), model).num_parameters() == model.num_parameters()
    assert torch.equal(output_of(cut_model(full_size(cut), model)), output_of(zeroed))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@families
def test_reordered_heads_give_the_same_outputs(family: str) -> None:
    model = wide(family)
    order = [4, 5, 1, 0, 2, 3]
    made = cut_model(Cut({name: layer.keep(order) for name, layer in whole(model)}), model)
    moved = [n for n, x in made.state_dict().items() if not torch.equal(x, model.state_dict()[n])]
    assert moved
    assert_same(output_of(made), output_of(model))


@pytest.mark.parametrize("family", GROUPED)
def test_expanded_kv_heads_give_the_same_outputs(family: str) -> None:
    model = wide(family)
    made = cut_model(Cut({name: layer.expand(6) for name, layer in whole(model)}), model)
    assert made.config.num_key_value_heads == 6
    assert made.num_parameters() > model.num_parameters()
    assert_same(output_of(made), output_of(model))


@pytest.mark.parametrize(
    "family", others_slow([family for family in FAMILIES if family not in GROUPED], "gpt2")
)
def test_modules_without_kv_heads_get_a_copy_for_each_head(family: str) -> None:
    model = wide(family)
    merged = Cut({name: layer.merge(3) for name, layer in whole(model)})
    made = cut_model(merged, model)
    assert made.num_parameters() == model.num_parameters()
    assert {len(layer.origins.kv) for _, layer in ModelHeads(model).fit(merged)} == {6}
    again = Cut({name: layer.collapse(3) for name, layer in whole(made)})
    assert_same(output_of(cut_model(again, made)), output_of(made))  # the copies are equal
    assert float((output_of(made) - output_of(model)).abs().max()) > 1e-4


GENERATE = [family for family in FAMILIES if family not in ("bert", "vit")]


@pytest.mark.parametrize("cache", others_slow(["dynamic", "static"]))
@pytest.mark.parametrize("family", others_slow(GENERATE, "llama", "t5"))
def test_a_cut_model_generates_with_a_cache(family: str, cache: str) -> None:
    model = wide(family)
    layers = dict(without(model, [2, 3]))
    if family != "t5":
        _ = layers.popitem()  # layers with other numbers of heads
    made = cut_model(Cut(layers), model)
    ids = inputs_of(model)["input_ids"][:, :6]
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    cached = made.generate(ids, **options, cache_implementation=cache)
    assert torch.equal(cached, made.generate(ids, **options, use_cache=False))


@pytest.mark.parametrize("family", ["llama", "vit", "t5"])
def test_save_pretrained_of_a_cut_model_is_loaded(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    made = cut_model(without(model, [2, 3]), model)
    made.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(output_of(loaded.eval()), output_of(made))
    assert type(model)(model.config).num_parameters() == model.num_parameters()  # its own config


def test_a_mean_in_the_bias_adds_the_biases_of_the_class(tmp_path: Path) -> None:
    model = FAMILIES["llama"]()
    layers = dict(whole(model))
    name = next(iter(layers))
    cut = Cut({name: layers[name].shift(torch.linspace(-1, 1, 48))})
    made = cut_model(cut, model)
    assert made.config.attention_bias
    made.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(output_of(loaded.eval()), output_of(made))
    biases = {n: x for n, x in loaded.state_dict().items() if n.endswith("proj.bias")}
    assert len(biases) == 2 * 4
    assert [n for n, x in biases.items() if x.any()] == [f"{name}o_proj.bias"]
    assert float((output_of(made) - output_of(model)).abs().max()) > 1e-3


def test_a_scale_that_no_config_states_leaves_the_config() -> None:
    model = FAMILIES["llama"]()
    cut = without(model, [2, 3])
    assert cut_model(cut, model).config.num_attention_heads == 4
    model.model.layers[1].self_attn.scaling = 0.25  # where the class makes 10**-0.5 of its config
    assert cut_model(cut, model).config.num_attention_heads == 6


def test_cross_attention_of_gpt2_stays_whole() -> None:
    torch.manual_seed(0)
    options = {"n_embd": 48, "n_layer": 2, "n_head": 6, "vocab_size": 97, "bos_token_id": 1}
    config = transformers.GPT2Config(**options, eos_token_id=2, add_cross_attention=True)
    model = transformers.GPT2LMHeadModel(config).eval().double()
    inputs = inputs_of(model) | {"encoder_hidden_states": torch.randn(3, 5, 48)}
    cut = without(model, [0, 1])
    assert list(cut.layers) == ["transformer.h.0.attn.", "transformer.h.1.attn."]
    zeroed = Cut({name: layer.zero([0, 1]) for name, layer in whole(model)})
    small, full = (output_of(cut_model(each, model), inputs) for each in (cut, zeroed))
    assert_same(small, full)


def _shared() -> nn.Module:
    model = FAMILIES["llama"]()
    model.model.layers[1].self_attn = model.model.layers[0].self_attn
    return model


def _albert() -> nn.Module:
    options = {"embedding_size": 16, "hidden_size": 48, "num_attention_heads": 6}
    return transformers.AlbertModel(
        transformers.AlbertConfig(**options, vocab_size=97, intermediate_size=64)
    )


def _adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():  # peft reads what transformers deprecates
        warnings.simplefilter("ignore")
        return peft.get_peft_model(FAMILIES["llama"](), peft.LoraConfig(target_modules=["q_proj"]))


def _quantised() -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    model = FAMILIES["llama"]()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def _apart() -> nn.Module:
    model = FAMILIES["llama"]()
    model.model.layers[1].to("meta")
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "shared": (_shared, OptionError, "is the same tensor as"),
    "no layout": (_albert, OptionError, "in no layout of the catalogue"),
    "adapted": (_adapted, OptionError, "a model with adapters"),
    "quantised": (_quantised, OptionError, "a model with quantised weights"),
    "two devices": (_apart, DeviceError, "a model on cpu, meta"),
    "no values": (lambda: FAMILIES["bert"]().to("meta"), DeviceError, "a model on meta"),
    "no config": (lambda: nn.Linear(3, 4), OptionError, "a Linear without a config"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_refused(name: str) -> None:
    make, kind, saw = REFUSED[name]
    with pytest.raises(kind, match=saw):
        ModelHeads(make())


def test_layers_that_the_model_does_not_have() -> None:
    model = FAMILIES["bert"]()
    cut = Cut({"encoder.layer.7.attention.": next(iter(whole(model)))[1]})
    with pytest.raises(OptionError, match="which the model does not have"):
        cut_model(cut, model)


def test_layers_that_share_distances_keep_the_same_heads() -> None:
    model = FAMILIES["t5"]()
    layers = dict(whole(model))
    first = next(name for name in layers if "decoder.block.0.layer.0" in name)
    with pytest.raises(OptionError, match="share one table of distances"):
        cut_model(Cut({first: layers[first].drop([1])}), model)


def test_the_copy_of_a_model_shares_nothing() -> None:
    model = FAMILIES["llama"]()
    made, config = cut_model(without(model, [0, 1]), model), copy.deepcopy(model.config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    made.config.hidden_size = 1
    assert float(output_of(model).abs().max()) > 0
    assert model.config.to_dict() == config.to_dict()


def test_a_cut_that_shares_holds_new_tensors_of_its_layers_alone() -> None:
    model = wide("bert")
    cut, state = without(model, [1]), model.state_dict()
    zeros = Cut({name: layer.zero([1]) for name, layer in whole(model)})
    made = cut_model(zeros, model, share=True)
    changed = {n for n, x in made.state_dict().items() if x.data_ptr() != state[n].data_ptr()}
    assert changed == {n for n in state if n.endswith("attention.output.dense.weight")}
    assert torch.equal(
        output_of(cut_model(cut, model, share=True)), output_of(cut_model(cut, model))
    )
    assert all(torch.equal(x, state[name]) for name, x in wide("bert").state_dict().items())
