"""``headwise verify``: the same function or not, in words and in the exit status."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import headwise
from headwise.cli.convert import convert as convert_command
from headwise.cli.verify import verify
from headwise.errors import OptionError
from headwise.identify.results import Verdict
from headwise.layouts.plan import convert
from tests.checkpoints import llamas
from tests.cli.alone import Alone

ALONE = Alone(verify)
run = ALONE.invoke


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One file, of numbers such as weights have."""
    folder = llamas.in_files(tmp_path / "a")
    generator = torch.Generator().manual_seed(0)
    state = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, x in load_file(file).items():
            state[name] = torch.randn(x.shape, generator=generator).to(x.dtype) / 4
        file.unlink()
    (folder / llamas.INDEX).unlink(missing_ok=True)
    save_file(state, folder / "model.safetensors")
    return folder


@pytest.fixture
def meta(folder: Path, tmp_path: Path) -> Path:
    state = load_file(folder / "model.safetensors")
    path = tmp_path / "meta.safetensors"
    counts = {"heads": llamas.HEADS, "kv_heads": llamas.KV_HEADS}
    save_file(convert(state, "llama", "llama-meta", **counts), path)
    return path


def test_the_same(folder: Path, meta: Path) -> None:
    done = run(folder, meta)
    assert done.exit_code == 0, done.exception
    assert done.stdout.splitlines() == [
        "llama against llama-meta",
        "The same function, byte for byte: all 21 tensors are equal.",
    ]


def test_the_outputs_too(folder: Path, meta: Path) -> None:
    done = run(folder, meta, "--outputs")
    assert done.exit_code == 0, done.exception
    assert done.stdout.count("the same outputs") == 2


def test_another_number_is_named(folder: Path, meta: Path) -> None:
    state = load_file(meta)
    name = "layers.1.attention.wv.weight"
    state[name][3, 5] += 1
    save_file(state, meta)
    done = run(folder, meta, "--outputs")
    assert done.exit_code == 1
    where = "values of kv head 0"
    made_of = "`model.layers.1.self_attn.v_proj.weight`"
    assert f"`{name}` ({where}), made of {made_of}: 1 of" in done.stdout
    assert done.stdout.count("OTHER OUTPUTS") == 1
    assert done.stdout.splitlines()[-2] == (
        f"Not the same: 20 of 21 tensors are equal; `{name}` differs ({where})."
    )
    assert (
        done.stdout.splitlines()[-1] == f"To run both: headwise compare {folder} {meta} --layer 1"
    )


def test_a_table_that_the_first_layer_has_serves_all_of_its_side(tmp_path: Path) -> None:
    """T5's distances: those of the encoder are others here, and nothing else is."""
    torch.manual_seed(0)
    sizes = {"d_model": 48, "d_kv": 10, "d_ff": 56, "num_heads": 6, "num_layers": 2}
    model = transformers.T5Model(transformers.T5Config(vocab_size=99, **sizes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "a")
    table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
    torch.nn.init.normal_(table.weight)
    model.save_pretrained(tmp_path / "b")
    done = run(tmp_path / "a", tmp_path / "b", "--outputs")
    assert done.exit_code == 1, done.exception
    others = [line for line in done.stdout.splitlines() if "OTHER OUTPUTS" in line]
    assert len(others) == 2
    assert all("encoder.block" in line for line in others)
    assert done.stdout.count("the same outputs") == 4


def test_outputs_of_no_numbers_are_refused(tmp_path: Path) -> None:
    folder = llamas.in_files(tmp_path / "a")
    done = run(folder, folder, "--outputs")
    assert isinstance(done.exception, OptionError)
    assert "that are NaN or infinite" in done.exception.saw


def test_digests_find_one_bit(meta: Path, tmp_path: Path) -> None:
    digests = tmp_path / "digests.json"
    assert run(meta, "--write-digests", digests).exit_code == 0
    assert run(meta, digests).exit_code == 0
    content = bytearray(meta.read_bytes())
    content[-1] ^= 1
    meta.write_bytes(content)
    done = run(meta, digests)
    assert done.exit_code == 1
    assert "changed" in done.stdout
    assert done.stdout.splitlines()[-1] == ("Not the same: 20 of 21 tensors are as in the digests.")


def test_the_folder_that_is_made_for_digests_is_named(meta: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / "digests.json"
    assert f"The folder {path.parent} was not there and was made." in (
        run(meta, "--write-digests", path).stdout.splitlines()
    )


def test_nothing_to_compare_with(meta: Path) -> None:
    done = run(meta)
    assert done.exit_code == 2
    assert "Name SECOND" in done.stderr


def test_digests_replace_no_file(meta: Path, tmp_path: Path) -> None:
    before, digests = meta.read_bytes(), tmp_path / "digests.json"
    assert run(meta, "--write-digests", meta).exit_code == 2
    assert meta.read_bytes() == before
    digests.write_text("mine")
    assert "exists already" in ALONE.refused(meta, digests, "--write-digests", digests).saw
    assert digests.read_text() == "mine"


@pytest.mark.parametrize("name", ["digests.txt", "digests", "model.safetensors.index.json"])
def test_digests_have_a_name_by_which_they_are_known(meta: Path, tmp_path: Path, name: str) -> None:
    done = run(meta, "--write-digests", tmp_path / name)
    assert done.exit_code == 2
    assert "ends in .json" in " ".join(done.stderr.split())
    assert not (tmp_path / name).exists()


def test_digests_are_written_of_what_was_found_the_same(
    folder: Path, meta: Path, tmp_path: Path
) -> None:
    assert run(folder, meta, "--write-digests", tmp_path / "a.json").exit_code == 0
    assert run(folder, tmp_path / "a.json").exit_code == 0
    state = load_file(meta)
    save_file(state | {"norm.weight": state["norm.weight"] + 1}, meta)
    assert run(folder, meta, "--write-digests", tmp_path / "b.json").exit_code == 1
    assert not (tmp_path / "b.json").exists()


@pytest.mark.parametrize(
    "options", [("--outputs",), ("--second-layout", "llama"), ("--heads", 6), ("--kv-heads", 2)]
)
def test_options_that_digests_have_no_use_for(
    meta: Path, tmp_path: Path, options: tuple[object, ...]
) -> None:
    run(meta, "--write-digests", tmp_path / "a.json")
    assert run(meta, tmp_path / "a.json", *options).exit_code == 2


@pytest.mark.parametrize(
    ("name", "theirs"), [("num_attention_heads", 4), ("num_key_value_heads", 6), ("rotary_dim", 4)]
)
def test_configs_that_contradict_each_other(
    folder: Path, tmp_path: Path, name: str, theirs: int
) -> None:
    other = tmp_path / "b"
    shutil.copytree(folder, other)
    for place, count in ((folder, {"rotary_dim": 10}), (other, {name: theirs})):
        config = json.loads((place / "config.json").read_text()) | count
        (place / "config.json").write_text(json.dumps(config))
    done = run(folder, other)
    assert done.exit_code == 1, done.exception
    assert f"in the first's config, {theirs} in the second's" in done.stdout
    assert done.stdout.splitlines()[-2:] == [
        "Not the same: the configs contradict each other; no tensor was compared.",
        f"To run both: headwise compare {folder} {other} --layer 0",
    ]


@pytest.mark.parametrize("is_turned", [False, True])
def test_layouts_with_other_verdicts_are_listed(
    folder: Path, tmp_path: Path, is_turned: bool
) -> None:
    bare = tmp_path / "bare.safetensors"
    counts = {"heads": llamas.HEADS, "kv_heads": llamas.KV_HEADS}
    state = load_file(folder / "model.safetensors")
    save_file(convert(state, "llama", "cohere", **counts), bare)
    done = run(*((bare, folder) if is_turned else (folder, bare)))
    assert done.exit_code == 3, done.exception
    read = ("cohere", "llama") if is_turned else ("llama", "cohere")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("  read as ")
    assert " and ".join(read) in lines[0]
    assert lines[0].endswith(": attention is equal")
    assert any("read as llama and llama" in line for line in lines[1:-1])
    assert lines[-1].startswith("Inconclusive: ")
    option = "--first-layout" if is_turned else "--second-layout"
    assert run(*((bare, folder) if is_turned else (folder, bare)), option, "cohere").exit_code == 0


def test_files_of_the_same_bytes_need_no_number_of_heads(folder: Path, tmp_path: Path) -> None:
    state = load_file(folder / "model.safetensors")
    for name in ("a", "b"):
        save_file(state, tmp_path / f"{name}.safetensors")
    done = run(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert done.exit_code == 0, done.exception
    assert done.stdout.splitlines()[0] == "llama against llama"


def test_none_that_agrees_is_not_the_same(folder: Path, tmp_path: Path) -> None:
    state = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    bare = tmp_path / "bare.safetensors"
    save_file(state | {name: state[name] + 1}, bare)
    done = run(folder, bare)
    assert done.exit_code == 1, done.exception
    assert "read as llama and llama; no other of " in done.stdout
    assert done.stdout.splitlines()[-2] == (
        f"Not the same: 20 of 21 tensors are equal; `{name}` differs (values of all 2 kv heads)."
    )


def test_of_readings_that_do_not_agree_the_nearest_is_shown(
    folder: Path, meta: Path, tmp_path: Path
) -> None:
    """In Meta's names, the second may be Llama's, or Cohere's with other rows of q and k."""
    state, bare = load_file(folder / "model.safetensors"), tmp_path / "bare.safetensors"
    name = "model.layers.0.self_attn.o_proj.weight"
    state[name][3, 5 * llamas.HEAD_DIM] += 1
    save_file(state, bare)
    done = run(meta, bare, "--heads", llamas.HEADS, "--kv-heads", llamas.KV_HEADS)
    assert done.exit_code == 1, done.exception
    assert "read as llama-meta and llama; no other of " in done.stdout
    assert done.stdout.splitlines()[-2] == (
        f"Not the same: 20 of 21 tensors are equal; `{name}` differs (output projection of head 5)."
    )


def test_a_layout_that_is_named_decides_for_the_other(folder: Path, tmp_path: Path) -> None:
    state, bare = load_file(folder / "model.safetensors"), tmp_path / "bare.safetensors"
    save_file(state, bare)
    counts = ("--heads", llamas.HEADS, "--kv-heads", llamas.KV_HEADS)
    done = run(bare, bare, "--first-layout", "cohere", *counts)
    assert done.exit_code == 0, done.exception
    assert done.stdout.splitlines()[0] == "cohere against cohere"


def test_what_stays_open_names_its_file_and_its_option(meta: Path, tmp_path: Path) -> None:
    save_file({"x": torch.zeros(3)}, tmp_path / "x.safetensors")
    error = ALONE.refused(meta, tmp_path / "x.safetensors", "--heads", 6, "--kv-heads", 2)
    assert error.saw.startswith(f"{tmp_path / 'x.safetensors'}, which contains no attention")
    assert "--second-layout" in error.do


def test_a_layout_that_the_config_contradicts(folder: Path, meta: Path) -> None:
    error = ALONE.refused(folder, meta, "--first-layout", "cohere")
    assert error.saw == f"--first-layout cohere, where in {folder} the config says llama"


def test_outputs_need_the_number_of_heads(meta: Path) -> None:
    assert run(meta, meta).exit_code == 0
    error = ALONE.refused(meta, meta, "--outputs")
    assert error.saw.startswith("--outputs, where neither the call nor a config")
    assert error.do.startswith("give --heads, and --kv-heads ")


def test_a_tensor_that_is_missing_in_the_first_is_an_answer(folder: Path, tmp_path: Path) -> None:
    state, name = load_file(folder / "model.safetensors"), "model.layers.1.self_attn.k_proj.weight"
    del state[name]
    save_file(state, tmp_path / "less.safetensors")
    done = run(tmp_path / "less.safetensors", folder)
    assert done.exit_code == 1, done.exception
    assert f"the first is not whole: `{name}` is missing" in done.stdout
    assert f"`{name}` is in the second alone" in done.stdout.splitlines()[-1]


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, Path, torch.nn.MultiheadAttention]:
    """Weights that rotate in a file of torch's names, their source, and torch's layer with them."""
    torch.manual_seed(0)
    source, file = tmp_path / "llama", tmp_path / "packed.safetensors"
    source.mkdir()
    names = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo")
    save_file({name: torch.randn(30, 30) for name in names}, source / "model.safetensors")
    config = {"model_type": "llama", "num_attention_heads": 3, "num_key_value_heads": 3}
    (source / "config.json").write_text(json.dumps(config))
    options = ("--to", "torch-packed", "--accept", "rotary")
    assert (
        Alone(convert_command).invoke(source / "model.safetensors", file, *options).exit_code == 0
    )
    layer = torch.nn.MultiheadAttention(30, 3, bias=False)
    state = load_file(file)
    layer.load_state_dict(
        {name.removeprefix("layers.0.self_attn."): x for name, x in state.items()}
    )
    return source, file, layer


def test_what_the_code_of_a_layout_does_not_apply_is_named(
    packed: tuple[Path, Path, torch.nn.MultiheadAttention],
) -> None:
    source, file, _ = packed
    for pair, side, count in (((source, file), "second", 2), ((file, source), "first", 4)):
        done = run(*pair)
        assert done.exit_code == 0, done.exception
        assert done.stdout.splitlines()[1:] == [
            f"  rotary: half-split in the metadata of the {side}, none in the code of torch-packed",
            f"The same weights, byte for byte: all {count} tensors are equal. The code of "
            "torch-packed does not apply what the metadata record (rotary).",
        ]
    assert run(file, file).stdout.splitlines()[-1].startswith("The same function, byte for byte")


def test_torchs_layer_beside_weights_that_rotate(
    packed: tuple[Path, Path, torch.nn.MultiheadAttention],
) -> None:
    """Its weights are the same, whatever stands before their names; its function is not."""
    _, file, layer = packed
    for first in (layer, layer.state_dict()):
        found = headwise.compare(first, file)
        assert found.verdict is Verdict.DIFFERENT
        assert "none in the code of torch-packed" in str(found)
        assert found.answer == (
            "Not the same: all 2 tensors are equal; the two layouts use them differently (rotary)."
        )


def test_json_is_all_that_is_printed(folder: Path, meta: Path, tmp_path: Path) -> None:
    done = run(folder, meta, "--json")
    result = json.loads(done.stdout)
    assert (done.exit_code, result["schema"], result["verdict"], result["same"]) == (
        0,
        1,
        "same",
        True,
    )
    digests = tmp_path / "new" / "digests.json"
    done = run(folder, meta, "--write-digests", digests, "--json")
    assert json.loads(done.stdout)["lines"][-1] == f"21 digests: {digests}"
    assert json.loads(run(folder, digests, "--json").stdout)["same"] is True
    done = run(meta, digests, "--json")
    assert (done.exit_code, json.loads(done.stdout)["same"]) == (1, False)


def test_the_report_of_a_conversion_as_json(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    done = Alone(convert_command).invoke(folder, target, "--to", "llama-meta", "--json")
    result = json.loads(done.stdout)
    assert (result["schema"], result["from"], result["to"]) == (1, "llama", "llama-meta")
    assert (result["target"], result["tensors"], result["rewritten"]) == (str(target), 21, 4)
    assert "llama -> llama-meta" in done.stderr


def test_weights_in_integers(folder: Path, tmp_path: Path) -> None:
    state = load_file(folder / "model.safetensors")
    small = {name: x.mul(100).to(torch.int8) for name, x in state.items()}
    shutil.copytree(folder, tmp_path / "b")
    save_file(small, tmp_path / "b" / "model.safetensors")
    done = run(folder, tmp_path / "b")
    assert done.exit_code == 1, done.exception
    assert "against torch.int8" in done.stdout
