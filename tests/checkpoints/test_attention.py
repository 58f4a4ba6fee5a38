"""A layer of a stored model gives what the model's own module gives, to within rounding."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from headwise import Attention, Mask, Rotary
from headwise.checkpoints import load_attention
from headwise.checkpoints.config import layout_name
from headwise.checkpoints.conversion import convert_checkpoint
from headwise.checkpoints.source import open_source
from headwise.errors import CheckpointError, DTypeError, OptionError
from headwise.function.spec import FROM_CONFIG, AttentionSpec
from headwise.layouts.registry import layout
from tests.layouts.real import Real, assert_gives, inputs, sharpen

SINGLE = torch.finfo(torch.float32).eps  # transformers takes angles and the softmax in float32
LLAMA = {
    "vocab_size": 31,
    "hidden_size": 48,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "rms_norm_eps": 1e-3,
    "eos_token_id": 1,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 700.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
Made = tuple[nn.Module, Callable[[int], nn.Module], bool]


def llama(**changes: Any) -> Made:
    rope = {"rope_type": "default", "rope_theta": 700.0}
    config = transformers.LlamaConfig(**{**LLAMA, "rope_parameters": rope, **changes})
    model = transformers.LlamaForCausalLM(config)
    return model, lambda layer: model.model.layers[layer].self_attn, True


def mistral() -> Made:
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**LLAMA, sliding_window=5))
    return model, lambda layer: model.model.layers[layer].self_attn, True


def qwen3() -> Made:
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**LLAMA))
    return model, lambda layer: model.model.layers[layer].self_attn, True


def gpt2() -> Made:
    config = transformers.GPT2Config(vocab_size=31, n_embd=48, n_layer=2, n_head=6, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    return model, lambda layer: model.transformer.h[layer].attn, True


def bert() -> Made:
    config = transformers.BertConfig(
        vocab_size=31,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        intermediate_size=20,
    )
    model = transformers.BertModel(config)
    return model, lambda layer: model.encoder.layer[layer].attention, False


MODELS: dict[str, tuple[Callable[[], Made], str]] = {
    "llama": (llama, "llama-meta"),
    "llama-scaled": (lambda: llama(rope_parameters=SCALED), "vllm"),
    "mistral": (mistral, "llama-meta"),
    "qwen3": (qwen3, "megatron"),
    "gpt2": (gpt2, "nanogpt"),
    "bert": (bert, "transformer-lens-encoder"),
}


@torch.no_grad()
def seen_in(model: nn.Module, module: nn.Module) -> tuple[Tensor, Tensor]:
    """What a module is given, and what it gives, when its model reads random hidden states."""
    calls: list[tuple[Tensor, Tensor]] = []

    def note(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        calls.append(((*args, *kwargs.values())[0], out[0]))

    handle = module.register_forward_hook(note, with_kwargs=True)
    model(inputs_embeds=inputs(48))
    handle.remove()
    ((x, outputs),) = calls
    return x, outputs


@pytest.fixture(params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Made, Path, str]:
    make, other = MODELS[request.param]
    model, module, causal = make()
    model.config._attn_implementation = "eager"
    model.double().eval()
    sharpen(model)
    model.save_pretrained(tmp_path / "model")
    return (model, module, causal), tmp_path / "model", other


def assert_same(made: Made, load: Callable[[int], Attention]) -> None:
    model, module, causal = made
    for number in range(2):
        own = module(number)
        x, outputs = seen_in(model, own.self if hasattr(own, "self") else own)
        if hasattr(own, "self"):  # BERT's module ends before the output projection
            outputs = own.output.dense(outputs)
        mask = Mask.causal() if causal else None
        with torch.no_grad():
            assert_gives(load(number).double(), Real({}, x, outputs, {}, mask=mask, unit=SINGLE))


def test_the_layer_of_a_stored_model(made: tuple[Made, Path, str]) -> None:
    model, folder, _ = made
    assert_same(model, lambda layer: load_attention(folder, layer=layer))


def test_the_layer_of_a_converted_file_without_a_config(
    made: tuple[Made, Path, str], tmp_path: Path
) -> None:
    model, folder, other = made
    source = open_source(folder)
    config = json.loads((folder / "config.json").read_text())
    heads = config.get("num_attention_heads", config.get("n_head"))
    counts = {"heads": heads, "kv_heads": config.get("num_key_value_heads", heads)}
    name = layout_name(config)
    assert name is not None
    convert_checkpoint(source, tmp_path / "b", name, other, **counts)
    assert not (tmp_path / "b" / "config.json").exists()
    assert_same(model, lambda layer: load_attention(tmp_path / "b", layer=layer))


@pytest.mark.parametrize("multi_query", [True, False])
def test_falcon_has_its_bias_and_no_rotation_where_its_config_says_so(
    multi_query: bool, tmp_path: Path
) -> None:
    sizes = {name: LLAMA[name] for name in ("vocab_size", "hidden_size", "num_attention_heads")}
    options: Any = sizes | {"num_hidden_layers": 2, "alibi": True, "multi_query": multi_query}
    # Not "eager": there transformers 5.23 adds the bias twice, in the mask and to the scores.
    options |= {"attn_implementation": "sdpa"}
    model = transformers.FalconModel(transformers.FalconConfig(**options)).double().eval()
    sharpen(model)
    model.save_pretrained(tmp_path)
    falcon: Made = model, lambda layer: model.h[layer].self_attention, True
    with pytest.warns(UserWarning, match="rounds its distance bias to bfloat16"):
        assert_same(falcon, lambda layer: load_attention(tmp_path, layer=layer))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama's weights without config and metadata."""
    path = tmp_path_factory.mktemp("bare") / "a.safetensors"
    model, _, _ = llama(tie_word_embeddings=False)
    save_file(model.state_dict(), path)
    return path


def test_what_a_bare_file_does_not_say_is_asked_for(bare: Path) -> None:
    with pytest.raises(OptionError, match="layer=0, layout="):
        load_attention(bare)
    with pytest.raises(OptionError, match="heads"):
        load_attention(bare, layout="llama")
    given = {"layout": "llama", "heads": 6, "kv_heads": 2}
    with pytest.raises(OptionError, match="theta of the rotation, which no tensor holds"):
        load_attention(bare, **given)
    layer = load_attention(bare, **given, rotary=Rotary(theta=700.0))
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (6, 2, 10)
    assert layer.rotary == Rotary(theta=700.0)


def test_a_layer_that_is_not_there(bare: Path) -> None:
    given = {"layout": "llama", "heads": 6, "kv_heads": 2, "config": {"rope_theta": 700.0}}
    with pytest.raises(OptionError, match=r"layer 2 of .*, .*the layers 0 to 1") as error:
        load_attention(bare, layer=2, **given)
    assert "'model.layers.0.self_attn.', 'model.layers.1.self_attn.'" in error.value.needed
    by_name = load_attention(bare, prefix="model.layers.1.self_attn.", **given)
    by_number = load_attention(bare, layer=1, **given)
    assert torch.equal(by_name.q_proj.weight, by_number.q_proj.weight)


def test_a_layer_with_several_modules_is_named_by_its_prefix(tmp_path: Path) -> None:
    config = transformers.T5Config(
        vocab_size=31,
        d_model=48,
        d_kv=10,
        d_ff=20,
        num_layers=2,
        num_heads=6,
        decoder_start_token_id=0,
    )
    transformers.T5Model(config).save_pretrained(tmp_path / "t5")
    with pytest.raises(OptionError, match="prefix=") as error:
        load_attention(tmp_path / "t5", layer=1)
    assert "'decoder.block.1.layer.1.EncDecAttention.'" in error.value.needed
    layer = load_attention(tmp_path / "t5", prefix="encoder.block.1.layer.0.SelfAttention.")
    assert layer.scale == 1.0
    assert layer.score_bias is not None  # whose table is in layer 0


def test_a_config_that_says_another_function(bare: Path) -> None:
    given = {"layout": "llama", "heads": 6, "kv_heads": 2}
    with pytest.raises(OptionError, match="query_pre_attn_scalar"):
        load_attention(bare, **given, config={"query_pre_attn_scalar": 7, "rope_theta": 5.0})
    windowed = {"sliding_window": 4, "rope_theta": 5.0}
    with pytest.raises(OptionError, match=r"a window of 4 keys, .*layer 0 has it"):
        load_attention(bare, **given, config=windowed)
    assert load_attention(bare, **given, config=windowed, window=(3, None)).window == (3, None)
    kinds = {"layer_types": ["full_attention", "sliding_attention"], **windowed}
    assert load_attention(bare, **given, config=kinds).window is None
    assert load_attention(bare, layer=1, **given, config=kinds).window == (3, None)


def test_a_layout_other_than_the_metadata_says(bare: Path, tmp_path: Path) -> None:
    counts = {"heads": 6, "kv_heads": 2}
    target = tmp_path / "b.safetensors"
    convert_checkpoint(open_source(bare), target, "llama", "llama-meta", **counts)
    with pytest.raises(OptionError, match=r"layout llama, but the metadata of .* says llama-meta"):
        load_attention(target, layout="llama")
    with pytest.raises(CheckpointError, match="does not exist"):
        load_attention(tmp_path / "c.safetensors")


def stored_llama(tmp_path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    model, _, _ = llama(num_hidden_layers=3)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    model.config.save_pretrained(tmp_path)
    save_file(change(state), tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_weights_in_eight_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = stored_llama(
        tmp_path, lambda state: {n: x.mul(50).to(dtype) for n, x in state.items()}
    )
    with pytest.raises(DTypeError, match=rf"_proj.weight in {dtype}"):
        load_attention(folder)
    layer = load_attention(folder, dtype=torch.float32)
    stored = open_source(folder)["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(layer.q_proj.weight, stored.float())


def test_layers_that_are_not_there(tmp_path: Path) -> None:
    folder = stored_llama(
        tmp_path / "a", lambda state: {n: x for n, x in state.items() if ".1." not in n}
    )
    with pytest.raises(OptionError, match=r"layer 1 of .* has the layers 0, 2"):
        load_attention(folder, layer=1)
    with pytest.raises(OptionError, match="holds no attention in the layout gpt2") as error:
        load_attention(folder, layout="gpt2")
    assert "headwise detect" in error.value.do
    quantised = stored_llama(
        tmp_path / "b",
        lambda state: {n.replace("proj.weight", "proj.qzeros"): x for n, x in state.items()},
    )
    with pytest.raises(OptionError, match="quantised by AWQ or GPTQ"):
        load_attention(quantised)


def test_a_tensor_of_the_module_that_nothing_reads_is_refused_by_name(tmp_path: Path) -> None:
    model, _, _ = bert()
    prefix = "encoder.layer.0.attention.self."
    table = {f"{prefix}relative_position_bias_table": torch.zeros(25, 6)}  # as in Swin
    save_file(model.state_dict() | table, tmp_path / "a.safetensors")
    (tmp_path / "config.json").write_text(model.config.to_json_string())
    with pytest.raises(
        OptionError, match=r"layer\.0\.attention\.self\.relative_position_bias_table"
    ):
        load_attention(tmp_path)
    assert load_attention(tmp_path, layer=1).num_heads == 6


def test_a_part_of_the_function_that_nothing_states_is_refused_by_name(tmp_path: Path) -> None:
    model, _, _ = llama(tie_word_embeddings=False)
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    given = {"layout": replace(layout("llama"), function=AttentionSpec(score_bias=FROM_CONFIG))}
    given |= {"heads": 6, "kv_heads": 2, "config": {"model_type": "mine"}}
    with pytest.raises(OptionError, match=r"score_bias of .*, which has no field that headwise"):
        load_attention(tmp_path, **given)
    assert load_attention(tmp_path, **given, score_bias=None).score_bias is None


def test_a_rotation_in_sections_is_read(tmp_path: Path) -> None:
    model, _, _ = llama(rope_parameters={"rope_type": "default", "rope_theta": 700.0})
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "qwen3_vl_text"}
    config["rope_parameters"] |= {"mrope_section": [2, 2, 1]}
    layer = load_attention(tmp_path, layout="llama", config=config, proof=False)
    assert layer.rotary == Rotary(theta=700.0, width=10, axes=(0, 1, 2, 0, 1))
    config["rope_parameters"]["mrope_section"] = [2, 2, 2]
    config["model_type"] = "qwen2_vl_text"
    with pytest.raises(OptionError, match="numbers whose sum is 5, half of the 10 channels"):
        load_attention(tmp_path, layout="llama", config=config, proof=False)


def test_a_module_of_another_part_than_the_text_model_is_refused(tmp_path: Path) -> None:
    model, _, _ = llama()
    tensors = {f"vision_tower.{name}": x.clone() for name, x in model.state_dict().items()}
    save_file(tensors, tmp_path / "a.safetensors")
    config = {"text_config": model.config.to_dict(), "vision_config": {}}
    with pytest.raises(OptionError, match="the config has vision_config beside text_config"):
        load_attention(tmp_path, config=config)
