"""``headwise compare``: the page and the JSON of a comparison."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headwise import Attention
from headwise import compare as compare_attentions
from headwise.checkpoints import load_attention
from headwise.cli.compare import compare
from headwise.diagnosis import watch
from headwise.diagnosis.subjects.recording import record_activations
from headwise.errors import OptionError
from headwise.identify.results import Verdict
from tests.cli.alone import Alone

run = Alone(compare).invoke


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small Llama, and its copy whose layer 1 has the keys' sign wrong."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 40, "intermediate_size": 44, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=9, **sizes, **heads))
    model.save_pretrained(place / "original")
    model.save_pretrained(place / "ported copy")
    file = place / "ported copy" / "model.safetensors"
    state = load_file(file)
    name = next(name for name in state if name.endswith("layers.1.self_attn.k_proj.weight"))
    save_file(state | {name: -state[name]}, file, metadata={"format": "pt"})
    return place / "ported copy", place / "original"


def test_the_page_is_named_last(folders: tuple[Path, Path], tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.html"
    done = run(*folders, "--layer", 1, "--page", page)
    assert done.exit_code == 1, done.exception
    assert done.stdout.splitlines()[-1] == str(page)
    html = page.read_text("utf-8")
    assert "Is layer 1 of ported copy the same function as layer 1 of original?" in html
    call = f"headwise compare &#39;{folders[0]}&#39; {folders[1]} --layer=1"
    assert call in html


def test_weights_have_a_page_too(folders: tuple[Path, Path], tmp_path: Path) -> None:
    done = run(*folders, "--page", tmp_path / "page.html")
    assert done.exit_code == 1, done.exception
    html = tmp_path.joinpath("page.html").read_text("utf-8")
    assert "Is ported copy the same function as original?" in html
    assert 'href="#page-sign"' in html
    assert 'id="page-sign"' in html


def test_json_beside_a_page(folders: tuple[Path, Path], tmp_path: Path) -> None:
    done = run(folders[1], folders[1], "--layer", 0, "--json", "--page", tmp_path / "page.html")
    assert done.exit_code == 0, done.exception
    assert json.loads(done.stdout)["verdict"] == "same"
    assert str(tmp_path / "page.html") in done.stderr
    assert f"{folders[1]}: proved against " in done.stderr


def test_a_page_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    done = run(tmp_path / "none", tmp_path / "none", "--page", tmp_path)
    assert isinstance(done.exception, OptionError)
    assert "which is a folder" in done.exception.saw


def test_weights_are_compared_with_a_running_model(folders: tuple[Path, Path]) -> None:
    ported, original = folders
    done = run(ported, "--against-model", original)
    assert done.exit_code == 1, done.exception
    assert "`layer 1 of ported copy` parts by its own doing; its input is the same" in done.stdout
    assert "sign: projection k, factor -1 in the first" in done.stdout
    assert "`layer 0 of" not in done.stdout
    assert run(original, "--against-model", original).exit_code == 0


def test_one_reference_is_needed(folders: tuple[Path, Path]) -> None:
    assert run(folders[0]).exit_code == 2
    assert run(*folders, "--against-model", folders[1]).exit_code == 2
    assert run(folders[0], "--against-model", folders[1], "--heads", 4).exit_code == 2


def test_weights_that_differ_end_with_the_command_that_runs_both(
    folders: tuple[Path, Path],
) -> None:
    done = run(*folders)
    last = done.stdout.splitlines()[-1]
    assert last == f"To run both: headwise compare '{folders[0]}' {folders[1]} --layer 1"
    assert "To run both" not in run(folders[1], folders[1]).stdout
    assert "To run both" not in run(*folders, "--layer", 1).stdout


def record_layer(layer: Attention, path: Path) -> Path:
    x = torch.randn(2, 7, layer.embed_dim)
    parts = {"q": layer.q_proj, "k": layer.k_proj, "v": layer.v_proj}
    record_activations(path, lambda: layer(x), x, parts, num_heads=4, num_kv_heads=2)
    return path


def test_recorded_activations_are_compared_with_a_stored_layer(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    ported, original = folders
    path = record_layer(load_attention(original, layer=1), tmp_path / "activations.npz")
    assert run(path, original, "--layer", 1).exit_code == 0
    done = run(path, ported, "--layer", 1)
    assert done.exit_code == 1, done.exception
    assert "sign: projection k, factor -1 in the first" in done.stdout
    refused = run(path, original)
    assert refused.exit_code == 2
    assert "--layer N names the layer" in refused.stderr


def test_inputs_of_a_running_model_are_token_ids(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    ported, original = folders
    np.save(tmp_path / "ids.npy", np.array([[1, 5, 2, 8, 3]]))
    done = run(ported, "--against-model", original, "--inputs", tmp_path / "ids.npy")
    assert done.exit_code == 1, done.exception
    assert "sign: projection k" in done.stdout
    np.save(tmp_path / "one.npy", np.array([[1]]))
    done = run(ported, "--against-model", original, "--inputs", tmp_path / "one.npy")
    assert done.exit_code == 3, done.stdout
    assert run(*folders, "--inputs", tmp_path / "ids.npy").exit_code == 2


@pytest.mark.slow
def test_a_model_is_compared_with_a_state_dict_and_its_attention_with_a_folder(
    folders: tuple[Path, Path],
) -> None:
    ported, original = folders
    model = transformers.LlamaModel.from_pretrained(original)
    state = load_file(ported / "model.safetensors")
    assert compare_attentions(model, model.state_dict())
    [moves] = compare_attentions(state, model).moves
    assert (moves.layer, moves.causes) == (1, ("sign",))
    assert compare_attentions(model.layers[1].self_attn, original)
    diagnosis = compare_attentions(ported, model.layers[1].self_attn)
    assert diagnosis.verdict is Verdict.DIFFERENT
    assert "sign: projection k" in str(diagnosis)
    assert compare_attentions(ported, model.layers[0].self_attn)


def test_ctrl_c_prints_what_is_known(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    look = watch.look

    def interrupt(stage: str = "", done: int = 0, total: int = 0) -> None:
        look(stage, done, total)
        if stage.startswith("trying"):
            raise KeyboardInterrupt

    monkeypatch.setattr(watch, "look", interrupt)
    done = run(*folders, "--layer", 1)
    assert done.exit_code == 130
    assert "  interrupted: not tried: causes" in done.stdout.splitlines()
    assert "was stopped before everything was tried" in done.stdout
    done = run(*folders, "--layer", 1, "--json")
    assert done.exit_code == 130
    assert json.loads(done.stdout)["function"]["untried"] == ["causes"]
