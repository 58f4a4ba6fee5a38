"""``headwise scan`` of folders whose tensors are not those that the model has."""

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

from headwise.checkpoints.source import LFS_POINTER
from headwise.cli.convert import convert
from tests.cli.alone import Alone
from tests.cli.scan_command import refused, run
from tests.huggingface.stored import stored

pytestmark = pytest.mark.usefixtures("in_a_folder_of_its_own")

CONVERT = Alone(convert)
SHORT = ("--random-repeats", "--length", 16, "--stats", "entropy", "--json", "--force")
READ = 15  # tokens of `SHORT`: one, and twice seven
UP = "model.layers.0.mlp.up_proj.weight"
SIZES = {"vocab_size": 61, "hidden_size": 42, "intermediate_size": 56, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}


def llama(folder: Path, **changes: object) -> Path:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**{**SIZES, **HEADS, "initializer_range": 0.4, **changes})
    return stored(folder, transformers.LlamaForCausalLM(config), with_tokenizer=False)


def data_in(page: str) -> str:
    return page.partition('id="headwise-meta">')[2].partition("</script>")[0]


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
    assert "8-bit or 4-bit numbers with scales beside them" in refused(folder, *SHORT).saw


@pytest.mark.parametrize(
    "more", ["model.layers.2.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.bias"]
)
def test_a_layer_or_a_bias_that_the_model_has_no_place_for(tmp_path: Path, more: str) -> None:
    folder = llama(tmp_path / "m")
    change_tensors(folder, lambda state: {**state, more: torch.ones(60)})
    out, _ = run(folder, *SHORT[:-2])
    assert f"Note: LlamaForCausalLM has no place for {more} of" in " ".join(out.split())


@pytest.mark.parametrize(
    ("prefix", "tied"),
    [
        ("module.", False),
        ("_orig_mod.module.", True),
        pytest.param("module.", True, marks=pytest.mark.slow),
        pytest.param("_orig_mod.", False, marks=pytest.mark.slow),
        pytest.param("_orig_mod.", True, marks=pytest.mark.slow),
        pytest.param("_orig_mod.module.", False, marks=pytest.mark.slow),
    ],
)
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


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"qweight": torch.zeros(5, 56), "g_idx": torch.zeros(42)}, "GPTQ"),
        ({"weight": torch.zeros(56, 5), "scales": torch.ones(56), "biases": torch.ones(56)}, "MLX"),
    ],
)
def test_quantised_weights_that_no_config_names(
    tmp_path: Path, parts: dict[str, Tensor], reason: str
) -> None:
    """Weights of other names would be random, and another config would not help."""
    folder = llama(tmp_path / "m")
    stored = {f"{UP.removesuffix('weight')}{name}": x for name, x in parts.items()}
    change_tensors(folder, lambda state: {n: state[n] for n in state if n != UP} | stored)
    error = refused(folder, *SHORT)
    assert f"its weights are quantised by {reason}" in error.saw
    assert "take the checkpoint that was quantised" in error.do


def test_a_prefix_goes_as_the_error_advises(tmp_path: Path) -> None:
    folder, target = llama(tmp_path / "m"), tmp_path / "n"
    shutil.copytree(folder, tmp_path / "plain")
    rename(folder, "policy.net.")
    assert "headwise convert DIR NEW_DIR --to LAYOUT --root ''" in refused(folder, *SHORT).do
    CONVERT.run(folder, target, "--to", "llama", "--root", "")
    assert entropies(target) == entropies(tmp_path / "plain")


def test_files_that_are_not_there(tmp_path: Path) -> None:
    folder = llama(tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.rename(folder / "weights.gguf")
    assert "gguf_file=" in refused(folder, *SHORT).do
    weights.symlink_to("nowhere")
    assert "model.safetensors cannot be read: No such file" in refused(folder, *SHORT).saw
    weights.unlink()
    weights.write_bytes(LFS_POINTER + b"v1\noid sha256:4d7a\nsize 12\n")
    assert "model.safetensors is a pointer of git-lfs" in refused(folder, *SHORT).saw
    (folder / "config.json").write_bytes(weights.read_bytes())
    save_file({"a": torch.ones(1)}, weights)
    assert "config.json is a pointer of git-lfs" in refused(folder, *SHORT).saw
    (folder / "config.json").write_text("{", "utf-8")
    assert refused(folder, *SHORT).do == "repair the file, or download it again"


def test_a_folder_of_the_hubs_cache(tmp_path: Path) -> None:
    cache = tmp_path / "models--owner--name"
    (cache / "refs").mkdir(parents=True)
    assert "without a snapshot" in refused(cache, *SHORT).saw
    snapshot = llama(cache / "snapshots" / "1a2b")
    assert refused(cache, *SHORT).do == f"name the snapshot: {snapshot}"


def test_a_model_that_computes_nan(tmp_path: Path) -> None:
    """No statistic fails at NaN, and the first layer that attends with it is named."""
    folder = llama(tmp_path / "m")
    change_config(folder, rms_norm_eps=float("nan"))
    options = ("--random-repeats", "--length", 16, "--json")
    content = json.loads(run(folder, *options)[0])
    (note,) = content["notes"]
    assert note.startswith("queries or keys of model.layers.0.self_attn and 1 more are NaN")
    assert {head["entropy"] for head in content["heads"]} == {None}
    assert {head["effective_rank"] for head in content["heads"]} == {None}


@pytest.mark.slow
def test_top_keys_of_all_heads_or_of_none(tmp_path: Path) -> None:
    folder = llama(tmp_path / "m")
    for word, count in {"all": 2, "none": 0, "1.5": 1}.items():
        run(folder, *SHORT, "--top-keys", word, "--out", word)
        stored_names = load_file(f"{word}/scan.safetensors")
        assert len([n for n in stored_names if "top_keys" in n and n.endswith("key")]) == count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "most_rows", "ranks"),
    [((), 2 * 6 * READ, 4), ((), 2 * 6 * READ - 1, 0), (("--top-keys", "all"), 0, 4)],
)
def test_top_keys_without_a_choice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    most_rows: int,
    ranks: int,
) -> None:
    """Of all heads of a text that is not too long; the page has one key of most of them."""
    monkeypatch.setattr("headwise.scanning.plan.MOST_ROWS", most_rows)
    monkeypatch.setattr("headwise.reports.blobs.MOST_ROWS", 0)
    folder = llama(tmp_path / "m")
    run(folder, *SHORT[:3], *options, "--out", "o", "--page", "p.html")
    names = [name for name in load_file("o/scan.safetensors") if name.endswith("every_query/key")]
    assert len(names) == (2 if ranks else 0)
    (scan,) = json.loads(data_in(Path("p.html").read_text("utf-8")))["scans"]
    counts = {count for layer in scan["layers"] for count in layer["top"]}
    assert counts == ({4} if options else {1, 4} if ranks else {0})
