"""``headwise prune``: plan, folder, page, and what is refused."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

import headwise
from headwise.cli import app, output
from headwise.errors import CheckpointError, HeadwiseError, OptionError
from headwise.surgery import Cut, choice
from headwise.surgery import stored as stored_models
from headwise.surgery.stored import read_lines
from tests.huggingface.stored import WORDS, stored
from tests.quick import others_extra
from tests.surgery.families import FAMILIES, without

runner = CliRunner()
# Groups of two heads, four in a layer, whose weights are so large that heads differ.
SHARP = {"num_attention_heads": 8, "num_key_value_heads": 4, "initializer_range": 0.3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    models = {"llama": FAMILIES["llama"](**SHARP), "bert": FAMILIES["bert"]()}
    return {name: stored(place / name, model) for name, model in models.items()}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    lines = []
    for length in range(4, 20):
        numbers = torch.randint(len(WORDS), (length,), generator=generator).tolist()
        lines.append(" ".join(WORDS[n] for n in numbers))
    path = tmp_path / "data.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def run(*arguments: object) -> str:
    result = runner.invoke(app, ["prune", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object) -> HeadwiseError:
    error = runner.invoke(app, ["prune", *map(str, arguments)]).exception
    assert isinstance(error, HeadwiseError), repr(error)
    return error


@pytest.mark.slow
def test_plain_transformers_loads_the_smaller_model(
    folders: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in folders["llama"].iterdir()}
    out = tmp_path / "smaller"
    text = run(folders["llama"], "--data", data, "--out", out, "--form", "plain")
    assert "12 of 16 heads stay, 4 go, chosen by ablation" in text
    assert "num_attention_heads 6, num_key_value_heads 3; plain transformers loads" in text
    assert text.index("predicted change") < text.index("no interval below 10 sequences")
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (6, 3)
    gone = Cut.load(out / "cut.json").gone
    assert [len(numbers) for numbers in gone.values()] == [2, 2]
    assert {path: path.read_bytes() for path in folders["llama"].iterdir()} == before
    page = (tmp_path / "smaller.html").read_text()
    assert "with 12 of 16 heads" in page
    assert page.count('class="gone"') == 4
    assert "from transformers import LlamaForCausalLM" in page
    assert "LlamaForCausalLM.from_pretrained" in page
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.usefixtures("checked_here")
def test_a_dry_run_writes_the_effects_alone(
    folders: dict[str, Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [folders["llama"], "--data", data, "--out", tmp_path / "new", "--form", "plain"]
    text = run(*command, "--dry-run")
    assert "plain transformers loads the folder" in text
    journal = tmp_path / ".new.headwise-effects.json"
    assert {*tmp_path.iterdir()} == {data, journal}
    assert f"Nothing is written but the effects of heads, in {journal}," in text
    monkeypatch.setattr(choice, "ablations", lambda *_, **__: pytest.fail("it measured again"))
    values = json.loads(run(*command, "--dry-run", "--json"))
    assert values.keys() == {"schema", "layers", "predicted", "journal"}
    assert values["journal"] == str(journal)
    run(*command)
    assert {*tmp_path.iterdir()} == {data, tmp_path / "new", tmp_path / "new.html"}


def test_kept_effects_are_of_one_config_one_mask_and_one_version(
    folders: dict[str, Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(folders["bert"], tmp_path / "bert"))
    options: Any = {"form": "auto", "length": 40, "call": ""}
    opened = stored_models.open_for_cut(folder, data, tmp_path / "new", **options)

    def keep(effect: float) -> None:
        journal = choice.Journal(opened.journal, opened._identity("ablation", "mean"))
        if journal.find("heads") is None:
            journal.add("heads", torch.tensor([effect]))

    def kept() -> float:
        identity = opened._identity("ablation", "mean")
        effects = choice.Journal(opened.journal, identity).find("heads")
        return float("nan") if effects is None else float(effects)

    keep(1.0)
    assert kept() == 1
    opened.held_out[0]["attention_mask"][-1, -1] = 0
    assert math.isnan(kept())
    keep(2.0)
    assert kept() == 2
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"gelu"', '"relu"'))
    assert math.isnan(kept())
    keep(3.0)
    monkeypatch.setattr(stored_models, "version", lambda name: f"9.{len(name)}")
    assert math.isnan(kept())


def test_a_width_that_no_config_states_is_refused_before_the_work(
    folders: dict[str, Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "ablations", lambda *_, **__: pytest.fail("it measured heads"))
    command = ["--data", data, "--out", tmp_path / "new", "--form", "plain"]
    error = refused(folders["bert"], *command)
    assert "hidden size" in error.saw
    assert '"full", the same outputs at full size, or "code"' in error.do


def test_a_mean_without_a_place_is_refused_before_the_work(data: Path, tmp_path: Path) -> None:
    folder = stored(tmp_path / "qwen", FAMILIES["qwen2"]())
    command = [folder, "--data", data, "--out", tmp_path / "new", "--keep", 0.6]
    error = refused(*command, "--form", "plain")
    assert "o_proj.bias" in error.saw
    assert error.lines(output.option_text)[2] == "--repair zero, or --form code"


@pytest.mark.usefixtures("checked_here")
def test_a_model_with_one_kv_head_loses_query_heads(data: Path, tmp_path: Path) -> None:
    sizes = SHARP | {"num_attention_heads": 4, "num_key_value_heads": 1}
    folder = stored(tmp_path / "one", FAMILIES["llama"](**sizes))
    text = run(folder, "--data", data, "--out", tmp_path / "new", "--keep", 0.5)
    assert "num_attention_heads 2; plain transformers loads" in text
    error = runner.invoke(
        app, ["regroup", str(folder), "--kv-heads", "1", "--out", str(tmp_path / "n")]
    ).exception
    assert isinstance(error, OptionError)
    assert error.needed == "layers with several kv heads"


def test_without_a_tokenizer_the_advice_writes_the_folder(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """The line is run as it is printed, with the model and the inputs that it names."""
    folder = tmp_path / "plain"
    ignored = shutil.ignore_patterns("token*", "special*")
    shutil.copytree(folders["llama"], folder, ignore=ignored)
    ids = torch.randint(5, 15, (8, 9), generator=torch.Generator().manual_seed(0))
    names = {"headwise": headwise, "inputs": ids}
    names["model"] = transformers.AutoModelForCausalLM.from_pretrained(folder)
    commands = {"prune": ["--keep", 0.5, "--form", "plain"], "regroup": ["--kv-heads", 2]}
    for number, (name, options) in enumerate(commands.items()):
        target = tmp_path / f"new{number}"
        command = [name, folder, "--out", target, *options]
        error = runner.invoke(app, [*map(str, command)]).exception
        assert isinstance(error, OptionError)
        exec(error.do.partition(": ")[2], names)
        made = transformers.AutoModelForCausalLM.from_pretrained(target)
        assert made.config.num_key_value_heads == 2


def test_a_number_of_heads_that_the_class_refuses_names_those_that_fit(
    data: Path, tmp_path: Path
) -> None:
    """Llama's config wants a width that is a multiple of its heads: 64 is none of 6."""
    folder = stored(tmp_path / "wide", FAMILIES["llama"](**SHARP, hidden_size=64))
    error = refused(folder, "--data", data, "--out", tmp_path / "new", "--form", "plain")
    assert "3 of 4 groups of heads in each layer" in error.saw
    assert "1, 2 of 4 groups" in error.needed
    assert "--keep 0.5" in error.lines(output.option_text)[2]


@pytest.mark.usefixtures("checked_here")
def test_single_heads_go_where_a_group_is_more_than_may_go(
    folders: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    sizes = SHARP | {"num_key_value_heads": 2}  # groups of 4, of 16 heads
    folder = stored(tmp_path / "two", FAMILIES["llama"](**sizes))
    command = ["--data", data, "--out", tmp_path / "new", "--keep", 0.8]
    text = run(folder, *command)
    assert "14 of 16 heads stay" in text
    assert "form code: plain transformers cannot state it" in text
    error = refused(folder, *command[:3], tmp_path / "n", *command[4:], "--take", "groups")
    assert "at most 3 heads may go" in error.saw
    assert error.needed == "at least 4: as many go at once"


@pytest.mark.parametrize("form", others_extra(["full", "headwise"]))
@pytest.mark.usefixtures("checked_here")
def test_the_two_ways_on(folders: dict[str, Path], data: Path, tmp_path: Path, form: str) -> None:
    out = tmp_path / "new"
    text = run(folders["bert"], "--data", data, "--out", out, "--form", form, "--json")
    values = json.loads(text)
    assert values["kept"] < values["heads"]
    assert (values["bytes"] < values["bytes_before"]) == (form == "headwise")
    loaded = headwise.surgery.load(out)
    assert type(loaded) is transformers.BertModel
    costs = values["costs"]
    assert costs["nbytes"] == [values["bytes_before"], values["bytes"]]
    assert costs["parameters"][1] == sum(x.numel() for x in loaded.parameters())
    assert 0 < costs["attention"][1] < costs["model"][1]
    assert "interleaved runs" in (tmp_path / "new.html").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("checked_here")
def test_an_interrupted_run_goes_on(
    folders: dict[str, Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    real: Callable[..., object] = choice.ablations

    def stop_in_the_second(model: object, inputs: list[Any], **options: object) -> object:
        measured.append(str(inputs[0]["input_ids"]))
        if len(measured) == 2:
            raise KeyboardInterrupt
        return real(model, inputs, **options)

    monkeypatch.setattr(stored_models, "BATCH", 4)  # of 8 lines to choose on
    monkeypatch.setattr(choice, "ablations", stop_in_the_second)
    command = [folders["llama"], "--data", data, "--out", tmp_path / "new"]
    assert runner.invoke(app, ["prune", *map(str, command)]).exit_code == 130
    assert not (tmp_path / "new").exists()
    run(*command)
    assert len(measured) == 3  # the second batch alone is measured again
    assert measured[1] == measured[2] != measured[0]
    # Another question has other effects.
    measured.clear()
    shutil.rmtree(tmp_path / "new")
    (tmp_path / "new.html").unlink()
    monkeypatch.setattr(choice, "ablations", real)
    run(*command, "--repair", "zero")


@pytest.mark.parametrize(
    ("change", "kind", "saw"),
    [
        (lambda data, out: data.write_text("one\ntwo\none\n"), OptionError, "with 2 lines of text"),
        (lambda data, out: data.unlink(), OptionError, "cannot be read"),
        (lambda data, out: data.write_bytes(b"\xff\xfe\x00"), OptionError, "cannot be read"),
        (lambda data, out: out.mkdir(), CheckpointError, "new"),
    ],
    ids=["few lines", "no file", "another encoding", "a target that exists"],
)
def test_what_is_refused(
    folders: dict[str, Path],
    data: Path,
    tmp_path: Path,
    change: Callable[[Path, Path], object],
    kind: type[HeadwiseError],
    saw: str,
) -> None:
    out = tmp_path / "new"
    change(data, out)
    error = refused(folders["llama"], "--data", data, "--out", out)
    assert isinstance(error, kind)
    assert saw in error.saw


@pytest.mark.parametrize(("short", "use"), [(0, "to choose and fit on"), (1, "to measure on")])
def test_a_half_of_single_tokens_is_refused(
    folders: dict[str, Path], tmp_path: Path, short: int, use: str
) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(folders["llama"], folder)
    tokens = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**tokens, "post_processor": None}))
    lines = [word if n % 2 == short else f"{word} {WORDS[0]}" for n, word in enumerate(WORDS)]
    data = tmp_path / "data.txt"
    data.write_text("\n".join(lines))
    error = refused(folder, "--data", data, "--out", tmp_path / "new")
    assert f"data.txt without a line of two tokens {use}" in error.saw


def test_a_folder_that_only_headwise_loads_is_refused(
    folders: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    model = FAMILIES["llama"](**SHARP)
    headwise.surgery.write(
        without(model, [0, 1]), folders["llama"], tmp_path / "cut", form="headwise"
    )
    error = refused(tmp_path / "cut", "--data", data, "--out", tmp_path / "new")
    assert "which is cut in the form of headwise" in error.saw
    assert "Cut.load('cut.json').then(cut)" in error.do


def test_a_share_outside_its_range(folders: dict[str, Path], data: Path, tmp_path: Path) -> None:
    error = refused(folders["llama"], "--data", data, "--out", tmp_path / "n", "--keep", 1.5)
    assert "keep=1.5" in error.saw
    assert error.lines(output.option_text)[2] == "--keep=0.75 for three quarters"


def test_a_page_that_exists_is_kept(folders: dict[str, Path], data: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    error = refused(folders["llama"], "--data", data, "--out", tmp_path / "n", "--page", page)
    assert error.saw == f"{page} exists already"
    assert page.read_text() == "mine"
    assert not (tmp_path / "n").exists()


def test_the_text_is_taken_as_it_is(folders: dict[str, Path], tmp_path: Path) -> None:
    """Indentation stays; repeated and empty lines are counted."""
    data = tmp_path / "code.txt"
    lines = [f"{'  ' * n}{WORDS[n]} {WORDS[n + 1]}" for n in range(6)]
    data.write_text("\n".join([*lines, "", lines[0], *lines[:2]]) + "\n")
    assert read_lines(data) == lines
    text = run(folders["llama"], "--data", data, "--out", tmp_path / "n", "--dry-run")
    expected = "3 sequences to choose and fit on, 3 held out, of 10 lines of code.txt; 4 empty, "
    assert text.startswith(expected)
