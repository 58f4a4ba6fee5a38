"""``headwise regroup``: plan, folder, page, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from headwise.cli import app
from headwise.errors import HeadwiseError
from headwise.surgery import Cut
from tests.huggingface.stored import WORDS, stored
from tests.reports.html import Tree, outside
from tests.surgery.families import FAMILIES

runner = CliRunner()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {name: stored(place / name, FAMILIES[name]()) for name in ("llama", "bert")}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(0)
    lines = []
    for length in range(4, 20):
        numbers = torch.randint(len(WORDS), (length,), generator=generator).tolist()
        lines.append(" ".join(WORDS[n] for n in numbers))
    path = tmp_path_factory.mktemp("data") / "data.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def run(*arguments: object) -> str:
    result = runner.invoke(app, ["regroup", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
def test_plain_transformers_loads_fewer_kv_heads(
    folders: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in folders["llama"].iterdir()}
    out = tmp_path / "grouped"
    text = run(folders["llama"], "--kv-heads", 1, "--data", data, "--out", out)
    assert "1 of 3 kv heads in each layer, merged by the maps that lose least" in text
    assert "config.json: num_key_value_heads 1; plain transformers loads" in text
    order = ("predicted loss", "no interval below", "mean of neighbours:", "fitted:", "The page:")
    assert [*map(text.index, order)] == sorted(map(text.index, order))
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.config.num_key_value_heads == 1
    assert [len(layer.origins.kv) for _, layer in Cut.load(out / "cut.json")] == [1, 1]
    assert {path: path.read_bytes() for path in folders["llama"].iterdir()} == before
    page = (tmp_path / "grouped.html").read_text()
    assert outside(page) == []
    root = Tree(page).root
    assert [each.text for each in root.all("h1")] == ["llama with 1 kv head in each layer"]
    assert "1 kv heads: " in next(each.text for each in root.all("svg"))
    assert "0 + 1 + 2" in page
    assert "LlamaForCausalLM.from_pretrained" in page


@pytest.mark.extra
@pytest.mark.usefixtures("checked_here")
def test_a_class_without_kv_heads_has_copies(
    folders: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "grouped"
    options = ["--merge", "aligned", "--json"]
    text = run(folders["bert"], "--kv-heads", 2, "--data", data, "--out", out, *options)
    values = json.loads(text)
    assert values["kv_heads"] == 2
    assert values["merge"] == "aligned"
    assert values["bytes"] == values["bytes_before"]
    assert values["change"]["low"] is values["change"]["high"] is None  # of 8 sequences
    assert [point["kv_heads"] for point in values["curve"]] == [1, 2, 3, 6]
    model = transformers.AutoModel.from_pretrained(out)
    key = model.encoder.layer[0].attention.self.key.weight.unflatten(0, (6, -1))
    assert all(torch.equal(key[n], key[n + 1]) for n in (0, 1, 3, 4))
    assert not torch.equal(key[2], key[3])


def test_a_dry_run_writes_nothing(folders: dict[str, Path], data: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    text = run(
        folders["bert"],
        "--kv-heads",
        3,
        "--data",
        data,
        "--out",
        new,
        "--dry-run",
        "--merge",
        "mean",
    )
    assert "3 of 6 kv heads in each layer, the mean of merged heads" in text
    assert "no smaller: BertModel has a key and a value for each head" in text
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_does_not_divide_is_refused(
    folders: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    arguments = [folders["llama"], "--kv-heads", 2, "--data", data, "--out", tmp_path / "new"]
    error = runner.invoke(app, ["regroup", *map(str, arguments)]).exception
    assert isinstance(error, HeadwiseError)
    assert "for layers of 3 kv heads" in error.saw
    assert error.needed == "a divisor below: 1"


@pytest.mark.slow
@pytest.mark.usefixtures("checked_here")
def test_without_a_text_sentences_of_the_package_are_used(tmp_path: Path) -> None:
    """The tokenizer knows letters, so that all sentences differ."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path / "letters"
    letters = {letter: n for n, letter in enumerate("?abcdefghijklmnopqrstuvwxyz ,.")}
    plain = Tokenizer(models.WordLevel(letters, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="?", pad_token="?"
    )
    tokenizer.save_pretrained(folder)
    FAMILIES["llama"]().save_pretrained(folder)
    text = run(folder, "--kv-heads", 1, "--out", tmp_path / "new", "--length", 12)
    assert "on 200 sequences" in text
