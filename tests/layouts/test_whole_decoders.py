"""Whole models: every tensor gets the name that the other layout has for it, and comes back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from headwise.layouts.plan import convert
from headwise.layouts.registry import layout
from tests.layouts.captured import GROUPED, VOCABULARY, WHOLE, angles
from tests.layouts.real import sharpen

LAYERS = 2
Files = Callable[[str], dict[str, Tensor]]
SMALL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "tie_word_embeddings": False}
GPT2 = {"n_embd": 120, "n_head": 12, "n_layer": LAYERS, "n_positions": 64}
# layout -> the model, and what a call must know of it
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2, {"heads": 12}),
    "neox": (
        "GPTNeoXForCausalLM",
        WHOLE | angles(0.6) | {"num_hidden_layers": LAYERS},
        {"heads": 12, "rotary_width": 6},
    ),
    "llama": (
        "LlamaForCausalLM",
        GROUPED | angles() | {"num_hidden_layers": LAYERS},
        {"heads": 12, "kv_heads": 3},
    ),
    "starcoder2": (
        "Starcoder2ForCausalLM",
        WHOLE | angles() | {"num_hidden_layers": LAYERS, "num_key_value_heads": 3},
        {"heads": 12, "kv_heads": 3},
    ),
}
META = {
    "tok_embeddings.weight",
    "norm.weight",
    "output.weight",
    *(
        f"layers.{layer}.{name}.weight"
        for layer in range(LAYERS)
        for name in (
            "attention.wq",
            "attention.wk",
            "attention.wv",
            "attention.wo",
            "attention_norm",
            "ffn_norm",
            "feed_forward.w1",
            "feed_forward.w2",
            "feed_forward.w3",
        )
    ),
}


@pytest.fixture
def state_of(tmp_path: Path) -> Files:
    """The tensors of a whole model in the file that it is saved to, whose names may be others."""
    transformers = pytest.importorskip("transformers")

    def saved(name: str) -> dict[str, Tensor]:
        kind, sizes, _ = MODELS[name]
        model = getattr(transformers, kind)
        built = model(model.config_class(**SMALL | sizes))
        sharpen(built)
        built.save_pretrained(tmp_path)
        return load_file(tmp_path / "model.safetensors")

    return saved


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_known(name: str, state_of: Files) -> None:
    described, state = layout(name), state_of(name)
    templates = {
        prefix + local for prefix in described.where.values() for local in described.tensors
    }
    templates |= set(described.outside)
    names = {t.format(layer=layer) for t in templates for layer in range(LAYERS)}
    unknown = {key for key in state if key.removeprefix("transformer.") not in names}
    assert not unknown


def test_llama_has_the_names_of_metas_files(state_of: Files) -> None:
    state = state_of("llama")
    made = convert(state, "llama", "llama-meta", **MODELS["llama"][2])
    assert made.keys() == META
    for mine, theirs in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        stored = state[f"model.layers.1.mlp.{theirs}.weight"]
        assert torch.equal(made[f"layers.1.feed_forward.{mine}.weight"], stored)


@pytest.mark.parametrize(
    ("name", "other"),
    [("gpt2", "nanogpt"), ("neox", "neox-split"), ("llama", "llama-meta")],
)
def test_there_and_back(name: str, other: str, state_of: Files) -> None:
    state, known = state_of(name), MODELS[name][2]
    made = convert(state, name, other, **known)
    back = convert(made, other, name, **known)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], x) for key, x in state.items())


NO_ROOT = {  # the name of the first matrix, of files whose names have no prefix
    "gguf-fused": "blk.0.attn_qkv.weight",
    "ctranslate2": "decoder/layer_0/self_attention/linear_0/weight",
    "transformer-lens": "blocks.0.attn.W_Q",
    "litgpt": "transformer.h.0.attn.qkv.weight",
    "flash-attn": "transformer.layers.0.mixer.Wqkv.weight",
}


@pytest.mark.parametrize("target", NO_ROOT)
def test_the_root_of_gpt2_is_left_out_where_files_have_none(target: str, state_of: Files) -> None:
    options: dict[str, Any] = {"heads": 12, "accept": ["rotary"]}
    made = convert(state_of("gpt2"), "gpt2", target, **options)
    assert next(iter(made)) == NO_ROOT[target]
    if target == "gguf-fused":  # as llama.cpp names them
        block = "attn_norm attn_qkv attn_output ffn_norm ffn_up ffn_down"
        names = [f"blk.{n}.{part}" for n in range(LAYERS) for part in block.split()]
        both = {f"{name}.{leaf}" for name in (*names, "output_norm") for leaf in ("weight", "bias")}
        matrices = {"token_embd.weight", "position_embd.weight", "output.weight"}
        assert made.keys() == both | matrices


def test_every_matrix_of_gpt2_is_turned(state_of: Files) -> None:
    state = state_of("gpt2")
    made = convert(state, "gpt2", "nanogpt", heads=12)
    for local in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        key = f"transformer.h.1.{local}.weight"
        assert torch.equal(made[key], state[key].mT)
    for key in ("transformer.wte.weight", "transformer.h.0.ln_1.weight", "lm_head.weight"):
        assert torch.equal(made[key], state[key])


def test_two_rotations_that_are_no_pairings_are_a_conflict() -> None:
    said = layout("chatglm-6b").function.conflicts(layout("llama").function)
    assert "rotary" in said
    assert not layout("cohere").function.conflicts(layout("llama").function)
