"""Decoders whose keys and values come from a latent: the real classes of transformers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import headwise
from headwise import Attention, Mask, Rotary, convert
from headwise.checkpoints import load_attention
from headwise.cli.convert import convert as convert_command
from headwise.errors import OptionError, ShapeError
from headwise.function import YarnScaling
from headwise.identify.results import Verdict
from headwise.layers import latent as forms
from headwise.layouts.equality import same_bytes
from headwise.layouts.registry import layout
from tests.cli.alone import Alone
from tests.layouts.captured import SINGLE, THETA, angles, captured, model_of
from tests.layouts.real import Real, assert_gives, assert_same_function
from tests.quick import others_slow

HEADS, PLAIN, SHARED, VALUE, RANK, QUERY_RANK, EMBED = 4, 10, 6, 7, 14, 13, 40
SIZES: dict[str, Any] = {
    "hidden_size": EMBED,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": RANK,
    "q_lora_rank": QUERY_RANK,
    "qk_nope_head_dim": PLAIN,
    "qk_rope_head_dim": SHARED,
    "v_head_dim": VALUE,
    "intermediate_size": 56,
    "max_position_embeddings": 128,
}
EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_group": 1,
    "topk_group": 1,
}
LONGCAT: dict[str, Any] = {
    "num_layers": 1,
    "num_hidden_layers": 2,
    "head_dim": SHARED,
    "ffn_hidden_size": 56,
    "expert_ffn_hidden_size": 8,
    "moe_topk": 2,
    "n_routed_experts": 4,
    "zero_expert_num": 1,
}
ATTENDS = {"layer_types": ["full_attention"], **EXPERTS}
YARN = {"rope_type": "yarn", "rope_theta": THETA, "factor": 40.0, "mscale": 1.0}
SCALED = YARN | {"mscale_all_dim": 0.5, "original_max_position_embeddings": 32}
INTERLEAVED = Rotary(theta=THETA, pairing="interleaved")


def real(
    config: str, rotary: Rotary | None, *, inside: str = "layers.0.self_attn", **sizes: Any
) -> Real:
    usual = {} if rotary is None else angles()
    model = model_of(config, **{**SIZES, **usual, **sizes})
    options = {"num_heads": HEADS, "rotary": rotary, "scale": None}
    return captured(model, inside, options=options)


def deepseek(**sizes: Any) -> Real:
    return real("DeepseekV3Config", INTERLEAVED, attention_bias=True, **EXPERTS | sizes)


def bailing_hybrid() -> Real:
    """Files name the output projection dense."""
    taken = real("BailingHybridConfig", INTERLEAVED, **ATTENDS)
    return replace(taken, state={n.replace("o_proj", "dense"): x for n, x in taken.state.items()})


CASES = {
    "deepseek": deepseek,
    "deepseek-lite": lambda: deepseek(q_lora_rank=None),
    "minicpm3": lambda: real("MiniCPM3Config", replace(INTERLEAVED, pairing="half-split")),
    "longcat-flash": lambda: real(
        "LongcatFlashConfig", INTERLEAVED, inside="layers.0.self_attn.1", **LONGCAT
    ),
    "bailing-hybrid": bailing_hybrid,
    "kimi-linear": lambda: real("KimiLinearConfig", None, **ATTENDS | {"q_lora_rank": None}),
}


@pytest.mark.parametrize("name", CASES)
def test_same_function(name: str) -> None:
    assert_same_function(name, CASES[name]())


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_the_absorbed_form_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = CASES[name]()
    layer = Attention.from_layout(one.state, layout=name, **one.options).double()
    expanded = layer(one.x, mask=one.mask)
    monkeypatch.setattr(forms, "_is_absorbed", lambda *_, **__: (True, "a test"))
    assert layer.matrix(one.x, mask=one.mask).k.shape[1] == 1
    torch.testing.assert_close(layer(one.x, mask=one.mask), expanded, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ("DeepseekV2Config", {**EXPERTS}),
        ("DeepseekV3Config", {**EXPERTS, "rope_parameters": SCALED}),
        ("Glm4MoeLiteConfig", {**EXPERTS, "first_k_dense_replace": 1}),
        ("YoutuConfig", {}),
        ("AXK1Config", {**EXPERTS}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_those_that_share_deepseeks_names(config: str, sizes: dict[str, Any]) -> None:
    one = real(config, INTERLEAVED, **sizes)
    if "rope_parameters" in sizes:
        scaling = YarnScaling(40.0, 32, mscale=1.0, mscale_all_dim=0.5)
        scale = (PLAIN + SHARED) ** -0.5 * (0.1 * 0.5 * torch.tensor(40.0).log().item() + 1) ** 2
        options = {"rotary": replace(INTERLEAVED, scaling=scaling), "scale": scale}
        one = replace(one, options=one.options | options)
    assert_same_function("deepseek", one)


def test_rows_of_a_head_in_another_order_are_another_function() -> None:
    one = deepseek()
    for changes in ({"rotated_last": False}, {"rows": "half-split"}):
        wrong = replace(layout("deepseek"), name="wrong", **changes)
        layer = Attention.from_layout(one.state, layout=wrong, **one.options)
        with pytest.raises(AssertionError):
            assert_gives(layer.double(), one)


# ---- conversion ---------------------------------------------------------------------------------

WAYS = [
    *(("deepseek", to) for to in ("deepseek-demo", "minicpm3", "headwise-latent", "canonical")),
    *(("deepseek", to) for to in ("deepseek-vllm", "deepseek-sglang")),
    ("deepseek-lite", "deepseek-demo-lite"),
    ("kimi-linear", "headwise-latent"),
    ("bailing-hybrid", "headwise-latent"),
]


@pytest.mark.parametrize(("name", "other"), WAYS)
def test_every_bit_comes_back(name: str, other: str) -> None:
    state = CASES[name]().state
    if other.partition("-")[2] in ("demo", "demo-lite", "vllm", "sglang"):  # without biases
        state = {n: x for n, x in state.items() if "bias" not in n}
    state["kv_b_proj.weight"][3, 2] = -0.0
    there = convert(state, name, other, heads=HEADS)
    back = convert(there, other, name, heads=HEADS)
    assert back.keys() == state.keys()
    assert all(same_bytes(back[n], x) for n, x in state.items())


def test_absorbed_matrices_are_slices_of_one() -> None:
    """As vLLM and SGLang make them when they have loaded a model."""
    state = {n: x for n, x in deepseek().state.items() if "bias" not in n}
    up = state["kv_b_proj.weight"].unflatten(0, (HEADS, PLAIN + VALUE))
    made = convert(state, "deepseek", "deepseek-vllm", heads=HEADS)
    assert torch.equal(made["W_UK_T"], up[:, :PLAIN])
    assert torch.equal(made["W_UV"], up[:, PLAIN:].transpose(1, 2))
    again = convert(made, "deepseek-vllm", "deepseek-sglang", heads=HEADS)
    assert torch.equal(again["w_kc"], made["W_UK_T"])


def test_canonical_queries_begin_with_the_channels_that_turn() -> None:
    state = deepseek().state
    stored = state["q_b_proj.weight"].unflatten(0, (HEADS, PLAIN + SHARED))
    canonical = layout("deepseek").unpack(state, heads=HEADS)
    first, second = stored[:, PLAIN::2], stored[:, PLAIN + 1 :: 2]
    expected = torch.cat((first, second, stored[:, :PLAIN]), 1)
    assert torch.equal(canonical["wq"], expected)
    down = state["kv_a_proj_with_mqa.weight"]
    assert torch.equal(canonical["wc"], down[:RANK])
    assert torch.equal(canonical["wr"], torch.cat((down[RANK::2], down[RANK + 1 :: 2])))


def test_a_layout_without_latents_is_refused() -> None:
    with pytest.raises(OptionError, match="latent: normed against none"):
        convert(deepseek().state, "deepseek", "llama", heads=HEADS)
    with pytest.raises(OptionError, match="latent: normed against normed, scaled"):
        convert(deepseek().state, "deepseek", "longcat-flash", heads=HEADS)


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match="whole number"):
        convert(deepseek().state, "deepseek", "canonical", heads=5)
    with pytest.raises(ShapeError, match="queries of 32"):
        Attention.from_layout(deepseek().state, layout="deepseek", num_heads=2, scale=None)


# ---- loading ------------------------------------------------------------------------------------


def stored(folder: Path, config: str, **sizes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    model = model_of(config, **{**SIZES, **angles(), **sizes}).float()
    language = transformers.AutoModelForCausalLM.from_config(model.config)
    language.model.load_state_dict(model.state_dict())
    language.save_pretrained(folder)
    return model


TYPES = {
    "deepseek_v3": ("DeepseekV3Config", {**EXPERTS, "rope_parameters": SCALED}),
    "half-split": ("DeepseekV3Config", {**EXPERTS, "rope_interleave": False}),
    "lite": ("DeepseekV2Config", {**EXPERTS, "q_lora_rank": None}),
    "kimi_linear": ("KimiLinearConfig", {**ATTENDS, "q_lora_rank": None, "rope_parameters": None}),
    "bailing_hybrid": ("BailingHybridConfig", {**ATTENDS, "q_lora_rank": None}),
    "minicpm3": ("MiniCPM3Config", {}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**EXPERTS, "first_k_dense_replace": 1}),
    "youtu": ("YoutuConfig", {}),
    "axk1": ("AXK1Config", {**EXPERTS}),
}


@pytest.mark.parametrize("kind", others_slow([*TYPES], "deepseek_v3", "lite"))
def test_a_load_is_proved(kind: str, tmp_path: Path) -> None:
    config, sizes = TYPES[kind]
    stored(tmp_path, config, **sizes)
    layer = load_attention(tmp_path)
    assert "proved against" in layer.proof, layer.proof
    assert "not proved" not in layer.proof


def test_longcat_has_two_attentions_in_a_layer(tmp_path: Path) -> None:
    stored(tmp_path, "LongcatFlashConfig", **LONGCAT)
    with pytest.raises(OptionError, match="2 modules"):
        load_attention(tmp_path)
    layer = load_attention(tmp_path, prefix="model.layers.0.self_attn.1.")
    assert layer.proof.startswith("proved against LongcatFlashMLA")
    assert layer.latent is not None
    assert layer.latent.scaled


def test_a_temperature_by_position_is_loaded_beside_a_latent(tmp_path: Path) -> None:
    model = model_of("Mistral4Config", **SIZES, **EXPERTS).float()
    model.save_pretrained(tmp_path)
    layer = load_attention(tmp_path)
    assert layer.proof.startswith("proved against Mistral4Attention")
    assert layer.temperature is not None


@torch.no_grad()
def test_a_config_that_contradicts_its_tensors(tmp_path: Path) -> None:
    stored(tmp_path, "YoutuConfig")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for name, value, words in [
        ("num_attention_heads", 5, "heads 4 or 7 fit"),
        ("qk_nope_head_dim", 8, "head_dim 14"),
        ("qk_rope_head_dim", 4, "head_dim 14"),
        ("kv_lora_rank", 12, "kv_lora_rank 12, where the tensors have 14"),
        ("q_lora_rank", 5, "q_lora_rank 5, where the tensors have 13"),
        ("v_head_dim", 8, "v_head_dim 8, where the tensors have 7"),
    ]:
        path.write_text(json.dumps(config | {name: value}))
        with pytest.raises((OptionError, ShapeError), match=words):
            load_attention(tmp_path, proof=False)


# ---- other rooms --------------------------------------------------------------------------------


@torch.no_grad()
def test_steps_with_a_cache_equal_the_class(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = stored(tmp_path, "DeepseekV3Config", **EXPERTS).double()
    layer = load_attention(tmp_path, dtype=torch.float64)
    module, x = model.get_submodule("layers.0.self_attn"), torch.randn(1, 24, EMBED).double()
    places = torch.arange(24)[None]
    table = model.rotary_emb(x, places)
    past = transformers.DynamicCache()
    cache = layer.cache(batch=1, length=24)
    steps, expected = [], []
    for start, end in ((0, 9), (9, 10), (10, 24)):
        part = x[:, start:end]
        hidden = torch.ones(end - start, end, dtype=torch.bool).triu(start + 1)
        mask = torch.zeros(hidden.shape, dtype=x.dtype).masked_fill(hidden, -torch.inf)
        given = tuple(each[:, start:end] for each in table)
        expected.append(module(part, given, mask[None, None], past_key_values=past)[0])
        steps.append(layer(part, mask=Mask.causal(), cache=cache))
    real = Real({}, x, torch.cat(expected, 1), {}, mask=Mask.causal(), unit=SINGLE)
    assert_gives(layer, real, torch.cat(steps, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("deepseek")
    stored(path, "DeepseekV3Config", **EXPERTS)
    return path


@pytest.mark.slow
def test_compare_with_the_real_module(folder: Path) -> None:
    """Also in calls with a cache, in which transformers keeps the latent as keys."""
    transformers = pytest.importorskip("transformers")
    module = transformers.AutoModel.from_pretrained(folder).layers[0].self_attn
    layer, x = load_attention(folder), torch.randn(2, 12, EMBED)
    diagnosis = headwise.compare(module, layer, x)
    assert diagnosis.verdict is Verdict.UNDER_MASK, str(diagnosis)
    assert "in calls of" in str(diagnosis)
    layer.rotary = replace(INTERLEAVED, pairing="half-split", width=SHARED)
    diagnosis = headwise.compare(layer, module, x)
    assert diagnosis.function is not None
    assert [each.name for each in diagnosis.function.causes] == ["rotary pairing"]


def test_scan_sees_all_heads(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(folder)
    scan = headwise.scan(model, {"input_ids": torch.arange(1, 25)[None]})
    assert "1 layer of 4 heads" in str(scan)


def test_detect_convert_and_verify_a_folder(folder: Path, tmp_path: Path) -> None:
    assert headwise.detect(folder).require_only_layout().name == "deepseek"
    demo = tmp_path / "demo"
    Alone(convert_command).run(folder, demo, "--to", "deepseek-demo")
    report = headwise.verify(folder, demo, outputs=True)
    assert report
    assert "output" in str(report)
    layer = load_attention(demo)
    assert layer.spec == load_attention(folder).spec
    state = load_file(demo / "model.safetensors")
    [name] = [name for name in state if name.endswith("attn.wkv_b.weight")]
    state[name][:PLAIN] = state[name][:PLAIN].flip(0)
    save_file(state, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    assert not headwise.verify(folder, tmp_path, second_layout="deepseek-demo")
