"""``headwise scan`` of folders whose tensors are not those that the model has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cli.scan_command import refused, run
from tests.huggingface.stored import stored

pytestmark = pytest.mark.usefixtures("in_a_folder_of_its_own")

SHORT = ("--random-repeats", "--length", 16, "--stats", "entropy", "--json", "--force")
UP = "model.layers.0.mlp.up_proj.weight"
SIZES = {"vocab_size": 61, "hidden_size": 42, "intermediate_size": 56, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}


def llama(folder: Path, **changes: object) -> Path:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**{**SIZES, **HEADS, "initializer_range": 0.4, **changes})
    return stored(folder, transformers.LlamaForCausalLM(config), with_tokenizer=False)


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def rename(folder: Path, prefix: str) -> None:
    change_tensors(folder, lambda state: {f"{prefix}{name}": x for name, x in state.items()})


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **changes}), "utf-8")


def entropies(folder: Path) -> list[float]:
    out, _ = run(folder, *SHORT)
    content = json.loads(out)
    assert content["notes"] == []
    return [head["entropy"] for head in content["heads"]]


def test_stored_scales_that_the_model_has_no_place_for(tmp_path: Path) -> None:
    """Without their scales, weights in float8 are other weights."""

    def quantise(state: dict[str, Tensor]) -> dict[str, Tensor]:
        scales = {f"{name}_scale": torch.tensor(0.01) for name in state if "proj" in name}
        small = {name: state[name].div(0.01).to(torch.float8_e4m3fn) for name in state}
        return {n: small[n] if f"{n}_scale" in scales else state[n] for n in state} | scales

    folder = llama(tmp_path / "m")
    change_tensors(folder, quantise)
    (note,) = json.loads(run(folder, *SHORT)[0])["notes"]
    assert note.startswith("LlamaForCausalLM has no place for model.layers.0.mlp.down_proj.weight_")
    assert "and 11 more of the file: results are those of a model without them" in note


@pytest.mark.parametrize(
    "more", ["model.layers.2.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.bias"]
)
def test_a_layer_or_a_bias_that_the_model_has_no_place_for(tmp_path: Path, more: str) -> None:
    folder = llama(tmp_path / "m")
    change_tensors(folder, lambda state: {**state, more: torch.ones(60)})
    out, _ = run(folder, *SHORT[:-2])
    assert f"Note: LlamaForCausalLM has no place for {more} of" in " ".join(out.split())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module."])
def test_the_prefix_of_a_wrapper_is_no_part_of_a_name(
    tmp_path: Path, prefix: str, *, tied: bool
) -> None:
    folder = llama(tmp_path / "m", tie_word_embeddings=tied)
    expected = entropies(folder)
    rename(folder, prefix)
    assert entropies(folder) == expected


@pytest.mark.parametrize("tied", [False, True])
def test_names_of_which_none_is_the_models(tmp_path: Path, *, tied: bool) -> None:
    folder = llama(tmp_path / "m", tie_word_embeddings=tied)
    rename(folder, "policy.net.")
    error = refused(folder, *SHORT)
    assert "no stored name fits LlamaForCausalLM: policy.net." in error.saw
    assert "where it has " in error.saw


@pytest.mark.parametrize("method", ["gptq", "bitsandbytes", "a-new-one"])
def test_quantised_weights_that_were_not_read(tmp_path: Path, method: str) -> None:
    folder = llama(tmp_path / "m")
    change_tensors(folder, lambda state: {**state, f"{UP}_scale": torch.ones(56)})
    change_config(folder, quantization_config={"quant_method": method, "bits": 4})
    error = refused(folder, *SHORT)
    assert f"holds weights quantised by {method}, which were not read: " in error.saw
    assert "before quantisation" in error.do


def test_code_that_needs_a_package_that_is_missing(tmp_path: Path) -> None:
    folder = llama(tmp_path / "m")
    (folder / "own.py").write_text("import no_such_package_anywhere\n", "utf-8")
    change_config(
        folder,
        model_type="own",
        auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    )
    error = refused(folder, *SHORT, "--trust-remote-code")
    assert "no_such_package_anywhere" in error.saw
    assert "install" in error.do


def test_a_vocabulary_of_another_size(tmp_path: Path) -> None:
    folder = llama(tmp_path / "m")
    change_config(folder, vocab_size=67)
    error = refused(folder, *SHORT)
    assert "lm_head.weight is (61, 42) in the file and (67, 42) in LlamaForCausalLM" in error.saw
    assert "report" not in str(error)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_an_adapter_beside_the_weights_is_noted(tmp_path: Path) -> None:
    folder, adapter = llama(tmp_path / "m"), tmp_path / "adapter"
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    options = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, options).save_pretrained(adapter)
    assert "merge_and_unload" in refused(adapter, *SHORT).do
    plain = entropies(folder)
    for file in adapter.iterdir():
        shutil.copy(file, folder)
    content = json.loads(run(folder, *SHORT)[0])
    assert content["notes"] == ["the adapter beside the weights (adapter_config.json) is applied"]
    assert [head["entropy"] for head in content["heads"]] != plain
