"""The proof of a load: what is left out or wrong is refused, and what is right says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

import headwise
from headwise.checkpoints import config as configs
from headwise.checkpoints import load_attention, readings, skeleton
from headwise.checkpoints import loading as loads
from headwise.checkpoints.conversion import convert_checkpoint
from headwise.checkpoints.description import open_checkpoint
from headwise.checkpoints.proof import StirredTensors, shrink_far_settings
from headwise.checkpoints.source import open_source
from headwise.errors import MissingExtraError, OptionError
from headwise.function.rotary import Rotary
from headwise.function.scaling import YarnScaling
from headwise.function.spec import ABSENT
from headwise.layers.norm import QKNorm
from headwise.masks.mask import Mask
from headwise.support.wide import in_float64
from tests.quick import others_slow

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 36,
    "intermediate_size": 26,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=4096),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **SIZES, num_local_experts=5, num_experts_per_tok=2
    ),
    "solar": lambda: transformers.SolarOpenConfig(
        **SIZES, n_routed_experts=5, num_experts_per_tok=2
    ),
    "ministral": lambda: transformers.MinistralConfig(**SIZES, sliding_window=4096),
    "temperature": lambda: transformers.Ministral3Config(**SIZES),
}


def spread(model: nn.Module) -> nn.Module:
    """Weights so large that each setting moves the outputs, and norms that are not 1."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise / 5 if parameter.dim() > 1 else parameter + noise / 9)
    return model.eval()


@pytest.fixture(scope="module", params=CONFIGS)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return request.param, _store(request.param, tmp_path_factory.mktemp(request.param))


def _store(kind: str, path: Path) -> Path:
    model = transformers.AutoModel.from_config(CONFIGS[kind]())
    spread(model).save_pretrained(path)
    return path


def test_a_layer_says_against_what_it_is_proved(tmp_path: Path) -> None:
    layer = load_attention(_store("llama", tmp_path), layer=1)
    assert layer.proof == "proved against LlamaAttention, 5 probes, up to 64 tokens"
    assert f"10, {layer.num_kv_heads} kv_heads" in repr(layer)
    assert layer.proof in repr(layer)


# What a layer without one setting, or with another number, has in its place.
LEFT_OUT: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rotary": Rotary(theta=10_010.0)}),
    ("llama", {"rotary": None}),
    ("llama", {"scale": 0.3161}),
    ("mistral", {"window": (5, None)}),
    ("qwen3", {"qk_norm": QKNorm(eps=1e-5)}),
    ("qwen3", {"qk_norm": QKNorm(eps=1.001e-6)}),
    ("gpt-oss", {"window": (5, None)}),
    ("gpt-oss", {"rotary": Rotary(theta=150_000.0, scaling=YarnScaling(32.0, 4096))}),
]


@pytest.mark.parametrize(("kind", "options"), others_slow(LEFT_OUT))
def test_a_setting_that_is_left_out_is_refused(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    path = _store(kind, tmp_path)
    assert load_attention(path).proof.startswith("proved")
    with pytest.raises(OptionError, match=r"differ from \w+Attention on|differently: "):
        load_attention(path, **options)


def test_a_window_beyond_the_probes_is_proved_in_a_copy_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _store("mistral", tmp_path)
    layer = load_attention(path)
    assert layer.window == (4095, None)
    assert "10 probes" in layer.proof
    monkeypatch.setattr(configs, "window_sides", lambda *_: None)
    monkeypatch.setattr(readings, "VARIANTS", ((),))
    with pytest.raises(OptionError, match="with far settings near, after 5 of 10 probes"):
        load_attention(path)


def test_a_sink_that_is_left_out_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = _store("gpt-oss", tmp_path), readings.attention_from_state

    def without_sink(*args: Any, **options: Any) -> headwise.Attention:
        layer = read(*args, **options)
        assert layer.sink is not None
        layer.sink.data.fill_(-torch.inf)
        return layer

    assert load_attention(path).sink is not None
    monkeypatch.setattr(readings, "attention_from_state", without_sink)
    with pytest.raises(OptionError, match="head outputs differ from GptOssAttention"):
        load_attention(path)


def test_a_bias_of_zeros_is_random_in_the_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformers.Qwen2Config(**SIZES)
    model = transformers.Qwen2Model(config)
    spread(model)
    for layer in model.layers:
        nn.init.zeros_(layer.self_attn.k_proj.bias)
    model.save_pretrained(tmp_path)
    read = readings.attention_from_state

    def without_bias(*args: Any, **options: Any) -> headwise.Attention:
        layer = read(*args, **options)
        layer.k_proj.bias.data.zero_()
        return layer

    loaded = load_attention(tmp_path)
    assert loaded.proof.startswith("proved")
    assert not loaded.k_proj.bias.any()
    monkeypatch.setattr(readings, "attention_from_state", without_bias)
    with pytest.raises(OptionError, match="differ from Qwen2Attention"):
        load_attention(tmp_path)


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_outputs_that_show_nothing_prove_nothing(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = _store("llama", tmp_path), skeleton.Skeleton._read_call

    def read_call(*args: Any, **options: Any) -> skeleton.ClassCall:
        call = read(*args, **options)
        for stage in call.stages.values():
            stage.fill_(value)
        return call

    def fill(*args: Any, **options: Any) -> headwise.Attention:
        layer = make(*args, **options)
        layer.out_proj.weight.data.fill_(value)
        layer.v_proj.weight.data.fill_(value)
        return layer

    make = readings.attention_from_state
    monkeypatch.setattr(skeleton.Skeleton, "_read_call", read_call)
    monkeypatch.setattr(readings, "attention_from_state", fill)
    with pytest.raises(OptionError, match="differ from LlamaAttention"):
        load_attention(path)


def test_tensors_of_one_value_are_stirred_once() -> None:
    state = {"a": torch.zeros(3, 4), "b": torch.arange(3.0), "c": torch.ones(1)}
    stirred = StirredTensors(state)
    assert stirred["a"].dtype == torch.float64
    assert stirred["a"].unique().numel() == 12
    assert stirred["a"] is stirred["a"]
    assert torch.equal(stirred["b"], state["b"].double())
    assert torch.equal(stirred["c"], state["c"].double())
    assert not state["a"].any()


@pytest.mark.parametrize("kind", ["solar", "ministral"])
def test_a_type_that_no_list_names_loads_with_its_numbers(kind: str, tmp_path: Path) -> None:
    path = _store(kind, tmp_path)
    model = transformers.AutoModel.from_pretrained(path).eval()
    caught: list[tuple[Tensor, Tensor]] = []
    attention = model.layers[2].self_attn
    attention.register_forward_hook(
        lambda _, __, given, out: caught.append((given["hidden_states"], out[0])), with_kwargs=True
    )
    with torch.no_grad():
        model(torch.randint(61, (3, 29)))
    (x, theirs), layer = caught[0], load_attention(path, layer=2)
    assert layer.proof.startswith("proved against")
    assert layer.num_kv_heads == 2
    torch.testing.assert_close(layer(x, mask=Mask.causal()), theirs)


def test_a_form_that_is_missing_is_refused_with_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configs, "_read_temperature", lambda *_: ABSENT)
    with pytest.raises(OptionError) as error:
        load_attention(_store("temperature", tmp_path))
    assert "ministral3 model: as llama, head outputs differ from Ministral3Attention" in str(
        error.value
    )
    assert "far settings near, after 6 of 10 probes" in str(error.value)
    unread = "the layer does not read rope_parameters.llama_4_scaling_beta, which changes them"
    assert unread in str(error.value)


# ---- kinds of layers ----------------------------------------------------------------------------


def _count_trials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made, of = [], loads.LoadTrial.of

    def count(reading: loads.StoredReading, options: Any) -> loads.LoadTrial:
        made.append(reading.module.prefix)
        return of(reading, options)

    monkeypatch.setattr(loads.LoadTrial, "of", count)
    return made


def _layers(path: Path) -> loads.StoredLayers:
    return loads.StoredLayers(open_checkpoint(path, {}))


@pytest.mark.parametrize("kind", others_slow(["gpt-oss", "llama", "solar"]))
def test_each_kind_of_layer_is_proved_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, made = _store(kind, tmp_path), _count_trials(monkeypatch)
    stored = _layers(path)
    loaded = [stored.load(number) for number in (0, 1, 2)]
    prefixes = [name.removeprefix("model.") for name in made]
    assert prefixes[0] == "layers.0.self_attn."
    assert len({*prefixes}) == (2 if kind == "gpt-oss" else 1)  # with a window, and without
    for number, layer in enumerate(loaded):
        alone = load_attention(path, layer=number)
        assert layer.proof == alone.proof
        assert layer.spec == alone.spec
        assert all(torch.equal(x, alone.state_dict()[n]) for n, x in layer.state_dict().items())


def test_a_layer_that_its_class_makes_otherwise_is_of_another_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = _layers(_store("llama", tmp_path))
    make = transformers.models.llama.modeling_llama.LlamaAttention.__init__

    def make_other(module: Any, config: Any, layer_idx: int) -> None:
        make(module, config, layer_idx)
        module.scaling *= 1 + (layer_idx == 2)

    kind = transformers.models.llama.modeling_llama.LlamaAttention
    monkeypatch.setattr(kind, "__init__", make_other)
    assert stored.load(0).proof == stored.load(1).proof
    with pytest.raises(OptionError, match="head outputs differ from LlamaAttention"):
        stored.load(2)


def test_kinds_differ_in_tables_and_in_lists_of_the_config(tmp_path: Path) -> None:
    path = _store("llama", tmp_path)
    state = safetensors.torch.load_file(path / "model.safetensors")
    names = [[n for n in state if f"layers.{k}.self_attn" in n] for k in range(3)]
    roles = {r: n for r in "qkvo" for n in names[0] if f"{r}_proj" in n}
    config = configs.read_config(path)
    made = skeleton.build_skeleton(config, {n: state[n].double() for n in names[0]}, roles)
    kinds = [made.kind_of(each) for each in names]
    assert kinds[0] == kinds[1] == kinds[2] is not None
    assert made.kind_of(["model.layers.0.self_attn.norm.weight"]) is None
    made.model.layers[1].self_attn.register_buffer("slopes", torch.tensor(2.0))
    made.owners[-1].config.sparse = [0, 0, 1]
    kinds = [made.kind_of(each) for each in names]
    assert all(kinds[a] != kinds[b] for a, b in ((0, 1), (0, 2), (1, 2)))


def test_described_weights_are_proved_as_files_of_their_class(tmp_path: Path) -> None:
    path, other = _store("llama", tmp_path / "own"), tmp_path / "meta"
    counts = {"heads": 6, "kv_heads": 2}
    convert_checkpoint(open_source(path), other, "llama", "llama-meta", **counts)
    layer, same = load_attention(other, layer=1), load_attention(path, layer=1)
    assert layer.proof == same.proof == "proved against LlamaAttention, 5 probes, up to 64 tokens"
    x = torch.randn(2, 7, 36)
    torch.testing.assert_close(layer(x), same(x))
    with pytest.raises(OptionError, match="differ from LlamaAttention"):
        load_attention(other, layer=1, rotary=replace(layer.rotary, theta=10_010.0))


# ---- where no proof is --------------------------------------------------------------------------


def test_what_cannot_be_proved_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _store("llama", tmp_path)

    def missing(*_: object, **__: object) -> None:
        raise MissingExtraError(saw="transformers is not installed", needed="it", do="pip")

    with monkeypatch.context() as patch:
        patch.setattr(skeleton, "require_package", missing)
        assert load_attention(path).proof == "not proved: transformers is not installed"
    config = configs.read_config(path)
    for config["model_type"] in ("mine", None):
        layer = load_attention(path, config=config, layout="llama")
        assert layer.proof.startswith("not proved: ")
        with pytest.raises(OptionError, match=r"no model_type|the model_type mine, which the"):
            load_attention(path, config=config)


def test_a_proof_that_memory_has_no_room_for_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _store("llama", tmp_path)
    size = 4 * 8 * 10 * 36 * (6 + 2 + 2 + 6)  # four projections of heads, kv heads and outputs
    monkeypatch.setattr(loads, "available_memory", lambda: size - 1)
    layer = load_attention(path)
    assert layer.proof == "not proved: a proof takes 184 kB, and 184 kB are left"
    monkeypatch.setattr(loads, "available_memory", lambda: size)
    assert load_attention(path).proof.startswith("proved")


def test_blocks_that_would_cost_much_are_passed_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _store("llama", tmp_path)
    called: list[str] = []
    monkeypatch.setattr(skeleton, "COSTLY", 0)
    monkeypatch.setattr(skeleton, "_pass_on", lambda x, *_, **__: called.append("") or x)
    assert load_attention(path, layer=2).proof.startswith("proved")
    assert len(called) == 2 * 3  # two blocks before it, on three probes, as of a large layer


def test_nothing_is_left_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, register = _store("llama", tmp_path), nn.Module.register_parameter

    def fail(*_: object) -> None:
        raise RuntimeError("no class")

    with monkeypatch.context() as patch:
        patch.setattr(transformers.LlamaModel, "__init__", fail)
        assert load_attention(path).proof == (
            "not proved: the class of llama raises RuntimeError: no class"
        )
    assert nn.Module.register_parameter is register
    assert torch.get_default_dtype() == torch.float32


def test_a_matrix_of_any_size_needs_the_memory_of_its_sides() -> None:
    generator = torch.Generator().manual_seed(0)
    x = skeleton.make_small((3000, 2000), generator)
    assert x.untyped_storage().nbytes() == 8 * 5001
    assert x.shape == (3000, 2000)
    assert torch.equal(x[7, 3:9], x[6, 4:10])
    assert 0.9 < float(x.std() * 2000**0.5) < 1.1


def test_far_settings_are_near_in_a_copy_of_the_config() -> None:
    config = {
        "sliding_window": 4096,
        "hidden_size": 4096,
        "window_size": 7,
        "rope_parameters": {"original_max_position_embeddings": 8192, "factor": 4.0},
    }
    near = shrink_far_settings(config)
    assert near["sliding_window"] == 6
    assert near["rope_parameters"] == {"original_max_position_embeddings": 32, "factor": 4.0}
    assert near["hidden_size"] == 4096
    assert near["window_size"] == 7
    assert shrink_far_settings(config, ["window", "rotary"]) == config
    several = {"window": 800, "attention_chunk_size": 50, "local_window": 50, "window_size": 9}
    assert [*shrink_far_settings(several).values()] == [24, 6, 6, 9]
    tower = {"window_size": 112, "patch_size": 14, "spatial_merge_size": 2}
    assert shrink_far_settings(tower)["window_size"] == 56
    assert shrink_far_settings({**tower, "window_size": 40})["window_size"] == 40
    chunks = {"chunk_length": 340, "parts": {"chunk_right_context": 40, "chunk_left_context": 340}}
    near = shrink_far_settings(chunks)
    assert near == {
        "chunk_length": 24,
        "parts": {"chunk_right_context": 6, "chunk_left_context": 24},
    }


def test_casts_to_float32_stay_wide() -> None:
    x = torch.arange(3, dtype=torch.float64) + 2.0**-40
    with in_float64() as narrow:
        assert x.float().dtype == x.to(torch.float32).dtype == torch.ones(1).dtype == x.dtype
        assert torch.equal(x.to(dtype=torch.float32), x)
        assert not narrow.is_seen
        x.bfloat16()
    assert narrow.is_seen
    assert x.float().dtype == torch.float32
