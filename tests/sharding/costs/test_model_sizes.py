"""Sizes of models, read from configs; a model without plain attention is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from headwise.errors import OptionError
from headwise.sharding.costs.model_sizes import ModelSizes
from tests.refusals import refusals
from tests.root import ROOT

PUBLISHED = {"llama-3.1-8b": 8.03e9, "llama-3.1-70b": 70.55e9, "qwen2.5-32b": 32.76e9}
CONFIGS = ROOT / "examples" / "configs"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "num_hidden_layers": 3,
    "intermediate_size": 56,
    "vocab_size": 99,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_number_of_weights(name: str) -> None:
    weights = ModelSizes.of(CONFIGS / f"{name}.json").weights
    assert weights == pytest.approx(PUBLISHED[name], rel=1e-3)


SMALL = {**LLAMA, "hidden_size": 42}
MODELS = {
    "llama": (transformers.LlamaForCausalLM, SMALL),
    "tied": (transformers.LlamaForCausalLM, SMALL | {"tie_word_embeddings": True}),
    "qwen2": (transformers.Qwen2ForCausalLM, {k: v for k, v in SMALL.items() if k != "head_dim"}),
    "arcee": (transformers.ArceeForCausalLM, SMALL),
    "neox": (
        transformers.GPTNeoXForCausalLM,
        {k: v for k, v in SMALL.items() if k not in ("head_dim", "num_key_value_heads")},
    ),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        {"n_embd": 42, "n_head": 6, "n_layer": 3, "vocab_size": 99, "n_positions": 1},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_counted_weights_are_the_matrices_of_the_model(name: str) -> None:
    kind, fields = MODELS[name]
    model = kind(kind.config_class(**{k: v for k, v in fields.items() if k != "model_type"}))
    sizes = ModelSizes.of(json.loads(model.config.to_json_string(use_diff=False)))
    matrices = sum(
        p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "wpe" not in name
    )
    assert sizes.weights == matrices
    assert sizes.notes == ()


def test_a_folder_and_a_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    expected = ModelSizes(
        layers=3,
        embed_dim=40,
        heads=6,
        kv_heads=2,
        head_dim=10,
        hidden_dim=56,
        vocabulary=99,
        windows=(None,) * 3,
    )
    assert ModelSizes.of(tmp_path) == ModelSizes.of(str(path)) == ModelSizes.of(LLAMA) == expected


def test_windows_of_layers() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert ModelSizes.of(LLAMA | {"sliding_window": 7, "layer_types": kinds}).windows == (
        7,
        None,
        7,
    )
    unknown = ModelSizes.of(LLAMA | {"sliding_window": 7})
    assert unknown.windows == (None,) * 3
    assert unknown.notes[0].startswith("Every layer attends to all keys")


def test_an_mlp_that_is_not_counted_is_named() -> None:
    experts = ModelSizes.of(LLAMA | {"model_type": "mixtral", "num_local_experts": 8})
    assert (experts.mlp_weights, len(experts.notes)) == (0, 1)
    unknown = ModelSizes.of(LLAMA | {"model_type": "unheard-of"})
    assert unknown.notes == (
        "The MLP is not counted: the config states no model_type of the catalogue.",
    )


test_refusals = refusals(
    {
        "no path": (lambda: ModelSizes.of("nowhere"), ("nowhere has no config.json",)),
        "weights": (lambda: ModelSizes.of(ROOT / "README.md"), ("README.md is no config",)),
        "no attention": (lambda: ModelSizes.of({}), ("num_attention_heads", "hidden_size")),
        "no layers": (
            lambda: ModelSizes.of({**LLAMA, "num_hidden_layers": None}),
            ("without num_hidden_layers",),
        ),
        "kv heads": (
            lambda: ModelSizes.of({**LLAMA, "num_key_value_heads": 4}),
            ("6 heads and 4 kv heads",),
        ),
        "two sides": (
            lambda: ModelSizes.of({**LLAMA, "is_encoder_decoder": True}),
            ("an encoder and a decoder",),
        ),
        "latent": (lambda: ModelSizes.of({**LLAMA, "kv_lora_rank": 8}), ("kv_lora_rank",)),
        "linear": (
            lambda: ModelSizes.of({**LLAMA, "layer_types": ["linear_attention"] * 3}),
            ("layers without attention (linear_attention)",),
        ),
        "a text": (lambda: ModelSizes.of({**LLAMA, "hidden_size": "x"}), ("hidden_size",)),
    },
    kind=OptionError,
)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text("{")
    with pytest.raises(OptionError, match=r"mine\.json is no JSON"):
        ModelSizes.of(path)
