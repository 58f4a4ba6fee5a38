"""Code beside weights: it runs where the caller allows it, and nothing is downloaded."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

import headwise
from headwise.checkpoints import load_attention
from headwise.checkpoints.transformers import load, read_model
from headwise.cli import app
from headwise.cli.output import option_text
from headwise.errors import HeadwiseError, OptionError
from headwise.surgery import Cut, ModelHeads, check_folder, cut_model, write
from headwise.surgery import load as load_cut
from tests.huggingface.own_code import AUTO_MAP, change_json, own_folder
from tests.huggingface.stored import WORDS
from tests.quick import others_extra, others_slow

KINDS = ("own", "llama")  # a model_type that transformers lacks, and one that it has
FOREIGN = "names code outside of this folder in auto_map: owner/name--own.OwnConfig"


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Copies of code go to a folder of the test, and no name of a host is looked up."""
    modules = str(tmp_path / "modules")
    monkeypatch.setenv("HF_MODULES_CACHE", modules)  # for processes that a test starts
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
    monkeypatch.setattr(sys, "path", [*sys.path, modules])
    monkeypatch.chdir(tmp_path)
    asked: list[Any] = []

    def refuse(*given: Any, **_: Any) -> None:
        asked.append(given)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield
    assert asked == []


def ran(tmp_path: Path) -> bool:
    return (tmp_path / "ran").exists()


# ---- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("open_folder", [load, read_model])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_code_loads_only_where_it_is_trusted(
    kind: str, open_folder: Any, tmp_path: Path
) -> None:
    folder = own_folder(tmp_path / "m", kind)
    with pytest.raises(OptionError, match="which runs only with trust_remote_code") as caught:
        open_folder(folder)
    assert f"{folder} holds code" in caught.value.saw
    assert "own.OwnConfig" in caught.value.needed
    assert not ran(tmp_path)
    found = open_folder(folder, trust_remote_code=True)
    model = found.model if open_folder is load else found[0]
    assert type(model).__name__ == "OwnForCausalLM"
    assert type(model.config).__name__ == "OwnConfig"
    assert ran(tmp_path)


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_code_of_another_repository_is_refused(kind: str, tmp_path: Path, *, trusted: bool) -> None:
    folder = own_folder(tmp_path / "m", kind, prefix="owner/name--")
    with pytest.raises(OptionError, match=FOREIGN) as caught:
        load(folder, trust_remote_code=trusted)
    assert "nothing is downloaded" in caught.value.needed
    assert "remove auto_map where transformers has the class" in caught.value.do
    assert "copy the .py files into the folder" in caught.value.do
    with pytest.raises(OptionError, match=FOREIGN):
        load_attention(folder, trust_remote_code=trusted)
    assert not ran(tmp_path)


def test_code_at_another_place_of_this_machine_is_refused(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "m")
    (folder / "own.py").rename(tmp_path / "own.py")
    names = {name: f"{tmp_path}/{code}" for name, code in AUTO_MAP.items()}
    change_json(folder / "config.json", auto_map=names)
    with pytest.raises(OptionError, match="names code outside of this folder"):
        load(folder, trust_remote_code=True)
    assert not ran(tmp_path)


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation"])
def test_a_kernel_of_another_repository_is_refused(field: str, tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "m")
    usual: dict[str, Any] = {"auto_map": None, "architectures": ["LlamaForCausalLM"]}
    change_json(folder / "config.json", **usual, **{field: "eager"})
    assert load_attention(folder).proof.startswith("proved")
    change_json(folder / "config.json", **{field: {"": "owner/kernel"}})
    for open_folder in (load, load_attention):
        with pytest.raises(OptionError, match=f"this folder in {field}: owner/kernel"):
            open_folder(folder, trust_remote_code=True)


def test_code_of_a_part_of_a_model_counts(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "m")
    change_json(folder / "config.json", auto_map=None, text_config={"auto_map": AUTO_MAP})
    with pytest.raises(OptionError, match="holds code"):
        load(folder)


def test_code_of_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "m")
    change_json(folder / "config.json", auto_map=None, architectures=["LlamaForCausalLM"])
    assert load(folder).tokenizer is not None
    auto_map: dict[str, Any] = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    change_json(folder / "tokenizer_config.json", auto_map=auto_map)
    with pytest.raises(OptionError, match="holds code") as caught:
        load(folder)
    assert "own.OwnTokenizer" in caught.value.needed
    auto_map["AutoTokenizer"] = [None, "owner/name--own.OwnTokenizer"]
    change_json(folder / "tokenizer_config.json", auto_map=auto_map)
    with pytest.raises(OptionError, match="outside of this folder"):
        load(folder, trust_remote_code=True)


def test_code_that_changes_no_class_of_the_model(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "m")
    names = {"AutoConfig": "own.OwnConfig"}
    change_json(folder / "config.json", auto_map=names, architectures=["LlamaForCausalLM"])
    model = load(folder, trust_remote_code=True).model
    assert type(model).__name__ == "LlamaForCausalLM"
    assert type(model.config).__name__ == "OwnConfig"


def test_the_class_of_code_is_that_of_the_stored_weights(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "m")
    change_json(folder / "config.json", architectures=["OwnModel"])
    assert type(load(folder, trust_remote_code=True).model).__name__ == "OwnModel"


def test_another_folder_of_the_same_type_keeps_its_own_class(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "m")
    code = (folder / "own.py").read_text("utf-8").replace("config_class = OwnConfig", "")
    (folder / "own.py").write_text(code, "utf-8")
    change_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "own.OwnForCausalLM"})
    model = load(folder, trust_remote_code=True).model
    assert type(model).__name__ == "OwnForCausalLM"
    assert type(model.config) is transformers.LlamaConfig
    plain = own_folder(tmp_path / "plain")
    change_json(plain / "config.json", auto_map=None, architectures=None)
    assert type(load(plain).model).__name__ == "LlamaForCausalLM"


# ---- layers --------------------------------------------------------------------------------------


def test_a_layer_of_code_is_proved_where_it_is_trusted(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "m")
    reason = f"not proved: {folder} holds code, which runs only with trust_remote_code=True"
    assert load_attention(folder).proof == reason
    assert not ran(tmp_path)
    layer = load_attention(folder, layer=1, trust_remote_code=True)
    assert layer.proof == "proved against OwnAttention, 5 probes, up to 64 tokens"
    assert ran(tmp_path)


def test_code_that_computes_something_else_is_seen(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "m", sharpness=1.25)
    with pytest.raises(OptionError, match="give the numbers of OwnAttention"):
        load_attention(folder, trust_remote_code=True)
    layer = load_attention(folder, trust_remote_code=True, scale=1.25 / 10**0.5, accept=["scale"])
    assert layer.proof.startswith("proved against OwnAttention")
    assert load_attention(folder).proof.startswith("not proved")


def test_a_type_that_is_not_listed_loads_only_with_its_code(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "m", "own")
    with pytest.raises(OptionError, match="which runs only with trust_remote_code"):
        load_attention(folder)
    assert not ran(tmp_path)
    layer = load_attention(folder, trust_remote_code=True)
    assert layer.proof == "proved against OwnAttention, 5 probes, up to 64 tokens"
    other = load_attention(own_folder(tmp_path / "n"), proof=False)
    assert layer.spec == other.spec


def test_a_file_of_weights_has_the_code_beside_it(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "m")
    assert f"{folder} holds code" in load_attention(folder / "model.safetensors").proof
    layer = load_attention(folder / "model.safetensors", trust_remote_code=True)
    assert layer.proof.startswith("proved against OwnAttention")


@pytest.mark.slow
def test_compare_proves_stored_layers_against_their_code(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "m", sharpness=1.25)
    model = load(folder, trust_remote_code=True).model
    with pytest.raises(OptionError, match="give the numbers of OwnAttention"):
        headwise.compare(folder, model, trust_remote_code=True)
    assert not headwise.compare(folder, model)


# ---- cuts ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("form", others_extra(["plain", "full", "headwise"]))
def test_a_cut_of_code_is_written_and_checked(form: Any, tmp_path: Path) -> None:
    folder, trusted = own_folder(tmp_path / "m"), {"trust_remote_code": True}
    model, _ = read_model(folder, trust_remote_code=True)
    cut = Cut({name: layer.drop([2, 3]) for name, layer in ModelHeads(model).whole()})
    with pytest.raises(OptionError, match="holds code"):
        write(cut, folder, tmp_path / "new", form=form)
    assert not (tmp_path / "new").exists()
    write(cut, folder, tmp_path / "new", form=form, **trusted)
    inputs = {"input_ids": torch.arange(3, 40)[None]}
    made = cut_model(cut, model)
    (tmp_path / "ran").unlink()
    for open_folder in (check_folder, lambda path, *_: load_cut(path)):
        with pytest.raises(OptionError, match="holds code"):
            open_folder(tmp_path / "new", made, inputs)
    assert not ran(tmp_path)
    assert check_folder(tmp_path / "new", made, inputs, **trusted) < 1e-4
    assert type(load_cut(tmp_path / "new", **trusted)).__name__ == "OwnForCausalLM"


# ---- commands ------------------------------------------------------------------------------------


def commands(folder: Path, data: Path) -> dict[str, list[Any]]:
    """The arguments of each command that runs a model of a folder, or proves a layer of one."""
    cut = [folder, "--data", data, "--out", "new"]
    scanned = ["--random-repeats", "--length", 16, "--stats", "entropy", "--json"]
    return {
        "scan": [folder, *scanned],
        "detect": [folder, "--against", folder],
        "compare": [folder, "--against-model", folder],
        "prune": [*cut, "--dry-run", "--by", "gradient"],
        "regroup": [*cut, "--dry-run", "--kv-heads", 2],
    }


def run(name: str, arguments: list[Any]) -> Any:
    return CliRunner().invoke(app, [name, *map(str, arguments)])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    draws = (torch.randint(len(WORDS), (n,), generator=generator).tolist() for n in range(4, 20))
    (tmp_path / "data.txt").write_text("\n".join(" ".join(WORDS[n] for n in d) for d in draws))
    return tmp_path / "data.txt"


@pytest.mark.parametrize("name", others_slow(commands(Path(), Path())))
def test_a_command_runs_code_only_with_the_flag(name: str, data: Path, tmp_path: Path) -> None:
    arguments = commands(own_folder(tmp_path / "m"), data)[name]
    error = run(name, arguments).exception
    assert isinstance(error, HeadwiseError), error
    saw, needed, do = error.lines(option_text)
    assert saw.endswith("m holds code, which runs only with --trust-remote-code")
    assert "own.OwnConfig" in needed
    assert do == "read the code, then pass --trust-remote-code"
    assert not ran(tmp_path)
    done = run(name, [*arguments, "--trust-remote-code"])
    assert done.exit_code == 0, done.output
    assert ran(tmp_path)


@pytest.mark.parametrize("name", [*commands(Path(), Path())])
def test_no_command_reads_code_of_another_repository(name: str, data: Path, tmp_path: Path) -> None:
    arguments = commands(own_folder(tmp_path / "m", prefix="owner/name--"), data)[name]
    error = run(name, [*arguments, "--trust-remote-code"]).exception
    assert isinstance(error, HeadwiseError), error
    assert FOREIGN in error.saw


def test_a_comparison_of_one_layer_proves_it_against_the_code(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "m", sharpness=1.25)
    command = ("compare", [folder, folder, "--layer", 1])
    assert run(*command).exit_code == 0
    assert not ran(tmp_path)
    error = run(command[0], [*command[1], "--trust-remote-code"]).exception
    assert "give the numbers of OwnAttention" in str(error)


@pytest.mark.parametrize("name", ["verify", "convert"])
def test_commands_that_run_no_model_read_the_tensors_beside_code(name: str, tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "m")
    rest = [folder] if name == "verify" else [tmp_path / "new", "--to", "llama-meta"]
    done = run(name, [folder, *rest])
    assert done.exit_code == 0, done.output
    assert not ran(tmp_path)


@pytest.mark.extra
def test_a_pruned_folder_and_its_page_name_the_class_of_the_code(
    data: Path, tmp_path: Path
) -> None:
    folder = own_folder(tmp_path / "m")
    cut = [folder, "--data", data, "--out", "new", "--by", "gradient", "--trust-remote-code"]
    done = run("prune", cut)
    assert done.exit_code == 0, done.output
    page = Path("new.html").read_text("utf-8")
    assert "from transformers import AutoModelForCausalLM" in page
    assert "trust_remote_code=True" in page
    model = load(Path("new"), trust_remote_code=True).model
    assert type(model).__name__ == "OwnForCausalLM"
    assert model.config.num_attention_heads == 6


def test_the_page_of_a_comparison_repeats_the_flag(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "m")
    command = [folder, "--against-model", folder, "--trust-remote-code", "--page", "page.html"]
    assert run("compare", command).exit_code == 0
    page = Path("page.html").read_text("utf-8")
    assert "--trust-remote-code" in page
    assert "--trust-remote-code=" not in page


def test_the_page_of_a_scan_repeats_the_flag(data: Path, tmp_path: Path) -> None:
    arguments = [*commands(own_folder(tmp_path / "m"), data)["scan"], "--trust-remote-code"]
    assert run("scan", arguments).exit_code == 0
    assert "--trust-remote-code" in Path("headwise-scan/index.html").read_text("utf-8")
