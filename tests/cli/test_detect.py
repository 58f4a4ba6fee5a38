"""``headwise detect``: one layout, several, or none, and what decides."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headwise.cli.detect import detect
from headwise.cli.output import UNDECIDED
from headwise.layouts.plan import convert
from tests.cli.alone import Alone

COMMAND = Alone(detect)
run = COMMAND.invoke


@pytest.fixture(scope="module")
def cohere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose names are Llama's, and whose rotation is not."""
    folder = tmp_path_factory.mktemp("cohere")
    torch.manual_seed(0)
    config = transformers.CohereConfig(
        vocab_size=99,
        hidden_size=48,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_hidden_layers=2,
        intermediate_size=64,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = transformers.CohereForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def bare(cohere: Path, tmp_path: Path) -> Path:
    """Its weights without its config."""
    path = tmp_path / "model.safetensors"
    path.write_bytes((cohere / "model.safetensors").read_bytes())
    return path


def test_the_config_decides(cohere: Path) -> None:
    done = run(cohere)
    assert done.exit_code == 0
    first, *lines = done.stdout.splitlines()
    assert first.startswith(f"{cohere} is in the layout cohere")
    assert lines[-1].startswith("Only names, shapes and config were compared, values were not ")
    assert "  shapes: they fit with heads 6, kv_heads 2, head_dim 8, embed_dim 48" in lines
    assert "  not llama: the config says cohere" in lines


def test_a_config_of_another_model_is_said_and_decides_nothing(
    cohere: Path, tmp_path: Path
) -> None:
    config = json.loads((cohere / "config.json").read_text()) | {"model_type": "gptj"}
    shutil.copy(cohere / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run(tmp_path)
    assert done.exit_code == UNDECIDED
    said = "the config says model_type gptj, whose layout is gptj, but the names or shapes are "
    assert done.stdout.startswith(f"{tmp_path} contradicts its config: {said}")
    found = json.loads(run(tmp_path, "--json").stdout)
    assert found["layout"] is None
    assert found["contradiction"].startswith(said)


def test_names_and_shapes_alone_leave_several(bare: Path) -> None:
    done = run(bare, "--heads", 6)
    assert done.exit_code == UNDECIDED
    assert "which names and shapes cannot tell apart" in done.stdout
    assert "undecidable without a reference" in done.stdout
    named = {line.strip() for line in done.stdout.splitlines() if line.startswith("  ")}
    assert any("cohere" in line for line in named)
    assert any("llama" in line for line in named)


def test_a_model_that_runs_decides(bare: Path, cohere: Path) -> None:
    done = run(bare, "--against", cohere, "--json")
    assert done.exit_code == 0, done.exception
    found = json.loads(done.stdout)
    assert "cohere" in {one["layout"] for one in found["candidates"][0]}
    assert (
        f"differs from {cohere} in queries of all 6 heads; keys of all"
        in (found["refuted"]["llama"])
    )
    assert (
        "behaviour: proved against CohereAttention, 5 probes, up to 64 tokens"
        in (found["candidates"][0][0]["reasons"])
    )


def test_the_same_weights_elsewhere_decide(bare: Path, tmp_path: Path) -> None:
    known = {"heads": 6, "kv_heads": 2}
    state = load_file(bare)
    # As LLaMA's own code stores them, rows of pairs side by side: known by its names alone.
    meta = convert(state, "cohere", "llama-meta", **known)
    save_file(meta, tmp_path / "meta.safetensors")
    done = run(bare, "--heads", 6, "--reference", tmp_path / "meta.safetensors", "--json")
    found = json.loads(done.stdout)
    left = {one["layout"] for group in found["candidates"] for one in group}
    assert "cohere" in left
    assert "llama" not in left
    assert (
        "differs from the reference in queries of all 6 heads; keys of all 2 kv heads"
        in (found["refuted"]["llama"])
    )
    assert found["compared"] == ["names", "shapes", "values"]


def test_a_reference_with_a_config_tells_the_counts(bare: Path, cohere: Path) -> None:
    done = run(bare, "--reference", cohere, "--json")
    assert {"cohere"} <= {one["layout"] for one in json.loads(done.stdout)["candidates"][0]}


def test_other_weights_leave_no_layout(bare: Path, tmp_path: Path) -> None:
    other = {name: x + 1 for name, x in load_file(bare).items()}
    save_file(other, tmp_path / "other.safetensors")
    done = run(bare, "--heads", 6, "--reference", tmp_path / "other.safetensors")
    assert done.exit_code == 1
    assert done.stdout.startswith(f"{bare} is in none of the ")
    assert "`model.layers.0.self_attn.` differs from the reference in " in done.stdout


def test_no_attention_at_all(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3, 4)}, tmp_path / "a.safetensors")
    done = run(tmp_path / "a.safetensors")
    assert done.exit_code == 1
    assert "contains no attention layer of a known layout" in done.stdout


def test_numbers_of_heads_that_nobody_says(bare: Path) -> None:
    done = run(bare)
    assert "shapes: they fit with embed_dim 48; heads may be " in done.stdout
    found = json.loads(run(bare, "--json").stdout)
    sizes = found["candidates"][0][0]["sizes"]
    assert sizes["embed_dim"] == 48
    assert {3, 6} <= set(sizes["heads"])
    found = json.loads(run(bare, "--heads", 6, "--json").stdout)
    assert {one["sizes"]["heads"] for group in found["candidates"] for one in group} == {6}


def test_counts_that_fit_no_layout(bare: Path) -> None:
    error = COMMAND.refused(bare, "--heads", 7)
    assert error.saw == "heads 7"
    assert "llama" in error.needed


def test_counts_that_the_model_contradicts(bare: Path, cohere: Path) -> None:
    error = COMMAND.refused(bare, "--heads", 4, "--against", cohere)
    assert error.saw == f"heads 4, where the config in {cohere} says 6"
    assert "--heads" in error.do


def test_names_of_one_map_are_said_first(tmp_path: Path) -> None:
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    state = {f"model.layers.0.self_attn.{name}.weight": torch.zeros(24, 24) for name in names}
    save_file(state, tmp_path / "a.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 4}')
    first = run(tmp_path / "a.safetensors").stdout.splitlines()[0]
    assert first.startswith(f"{tmp_path / 'a.safetensors'} is in the layout llama = ")
    assert first.endswith(" (the same map and function here)")


def test_a_model_that_needs_more_than_tokens(tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 1}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 99, "intermediate_size": 64},
        vision_config={**sizes, "intermediate_size": 64, "image_size": 8, "patch_size": 4},
    )
    transformers.CLIPModel(config).save_pretrained(tmp_path)
    done = run(tmp_path, "--against", tmp_path)
    assert done.exit_code == 0
    assert done.stdout.startswith(f"{tmp_path} is in the layout clip")


@pytest.mark.parametrize("width", [99, 3])
def test_a_rotary_width_that_no_head_can_have(bare: Path, width: int) -> None:
    error = COMMAND.refused(bare, "--heads", 6, "--rotary-width", width)
    assert error.saw == f"rotary_width {width}, in a head_dim of 8"
    assert "--rotary-width" in error.do


def test_a_model_that_runs_does_not_hide_the_reason(cohere: Path, tmp_path: Path) -> None:
    state = load_file(cohere / "model.safetensors")
    named = {name.replace("proj.weight", "proj.qzeros"): x for name, x in state.items()}
    save_file(named, tmp_path / "model.safetensors")
    done = run(tmp_path, "--against", cohere)
    assert done.exit_code == 1
    assert "its weights are quantised by AWQ or GPTQ" in done.stdout


def test_a_model_of_nan_refutes_no_layout(cohere: Path, tmp_path: Path) -> None:
    folder = tmp_path / "nan"
    shutil.copytree(cohere, folder)
    state = load_file(folder / "model.safetensors")
    state["model.layers.1.self_attn.q_proj.weight"].fill_(float("nan"))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert run(folder, "--against", folder).stdout.startswith(f"{folder} is in the layout cohere")
    state["model.layers.0.self_attn.q_proj.weight"].fill_(float("nan"))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    error = COMMAND.refused(folder, "--against", folder)
    assert "layers.0.self_attn.q_proj.weight holds NaN or infinite numbers" in error.saw
