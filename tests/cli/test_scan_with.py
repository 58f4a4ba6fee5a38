"""``headwise scan A --with B``: a model that was saved twice, and texts that are compared."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headwise.models import minilm
from headwise.scanning.parts import SCAN
from headwise.scanning.result import HeadScan
from tests.cli.scan_command import refused, run
from tests.huggingface.stored import SHARP, TEXT, bert, stored
from tests.models.test_minilm import here
from tests.reports.browser import Chromium, needs_a_browser

pytestmark = pytest.mark.usefixtures("in_a_folder_of_its_own")

HALVED = 2  # the layer in which a norm's weight is halved


def gpt2() -> Any:
    torch.manual_seed(2)
    sizes = {"vocab_size": 60, "n_embd": 42, "n_layer": 5, "n_head": 6, "n_positions": 40}
    config = transformers.GPT2Config(**sizes, initializer_range=SHARP["initializer_range"])
    return transformers.GPT2LMHeadModel(config).eval()


# A model, the weight that is halved, and the first layer whose attention it changes.
MODELS: dict[str, tuple[Callable[[], Any], str, int]] = {
    "before its attention": (gpt2, f"transformer.h.{HALVED}.ln_1.weight", HALVED),
    "after its attention": (
        lambda: bert(num_hidden_layers=5),
        f"encoder.layer.{HALVED}.attention.output.LayerNorm.weight",
        HALVED + 1,
    ),
}


def halve(folder: Path, name: str, target: Path) -> Path:
    """The model of a folder, saved again with a weight halved."""
    shutil.copytree(folder, target)
    state = load_file(folder / "model.safetensors")
    state[name] = 0.5 * state[name]
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    return target


def largest(before: HeadScan, after: HeadScan) -> tuple[float, str, int, int]:
    """The largest change as a part of the scale, found the slow way."""
    best = (0.0, "", -1, -1)
    for name in before.scalars:
        one, two = before[name].tolist(), after[name].tolist()
        both = [x for scan in (one, two) for row in scan for x in row if not math.isnan(x)]
        span = max(both) - min(both)
        if before.definition(name).unit.startswith("share"):
            span = 1.0
        elif name == "entropy":
            span = math.log(max(before.texts[0].lengths))
        for layer, (row, other) in enumerate(zip(one, two, strict=True)):
            for head, (a, b) in enumerate(zip(row, other, strict=True)):
                if span and not math.isnan(a - b) and abs(a - b) / span > best[0]:
                    best = (abs(a - b) / span, name, layer, head)
    return best


def require_found(old: Path, new: Path, first: int, *arguments: object) -> dict[str, Any]:
    """Require that the first change is the largest of the two scans, and return what is printed."""
    for name, folder in (("old", old), ("new", new)):
        run(folder, "--out", f"saved-{name}", "--page", f"{name}.html", *arguments)
    before, after = (HeadScan.load(Path(f"saved-{name}") / SCAN) for name in ("old", "new"))
    out, _ = run(old, "--with", new, "--json", *arguments)
    content: dict[str, Any] = json.loads(out)
    size, name, layer, head = largest(before, after)
    change = content["changes"][0]
    assert (change["statistic"], change["layer_index"], change["head"]) == (name, layer, head)
    assert change["size"] == pytest.approx(size)
    assert change["first"] == pytest.approx(float(before[name][layer, head]), abs=1e-6)
    assert change["second"] == pytest.approx(float(after[name][layer, head]), abs=1e-6)
    assert all(row["layer_index"] >= first for row in content["changes"])
    assert f"of layer {layer}, head {head}: " in change["sentence"]
    for row in content["changes"]:
        assert f" in {content['compared']['first']}, " in row["sentence"]
        assert row["sentence"].endswith(f" in {content['compared']['second']}")
    again, _ = run(old, "--with", "saved-new", "--json", "--force", *arguments)
    sizes = [row["size"] for row in json.loads(again)["changes"]]
    assert sizes == [row["size"] for row in content["changes"]]
    return content


@pytest.mark.slow
@pytest.mark.parametrize("case", ["before its attention", "after its attention"])
def test_a_halved_norm_is_found(tmp_path: Path, case: str) -> None:
    make, weight, first = MODELS[case]
    old = stored(tmp_path / "old", make(), with_tokenizer=False)
    new = halve(old, weight, tmp_path / "new")
    content = require_found(old, new, first, "--random-repeats", "--length", 31)
    assert content["compared"] == {"first": "old", "second": "new"}


@pytest.mark.extra
@here
def test_a_halved_norm_of_the_trained_encoder_is_found(tmp_path: Path) -> None:
    old = Path(minilm.model_folder())
    names = load_file(old / "model.safetensors")
    weight = next(name for name in names if "layer.3.attention.output.LayerNorm.weight" in name)
    new = halve(old, weight, tmp_path / "new")
    require_found(old, new, 4)


@pytest.mark.slow
@needs_a_browser
def test_the_page_opens_on_the_change(browser: Chromium, tmp_path: Path) -> None:
    make, weight, _ = MODELS["before its attention"]
    old = stored(tmp_path / "old", make(), with_tokenizer=False)
    new = halve(old, weight, tmp_path / "new")
    run(old, "--with", new, "--random-repeats", "--length", 31)
    with browser.open(Path("headwise-scan/index.html").absolute()) as opened:
        ways = [way.strip() for way in opened.page.locator(".way").all_inner_texts()]
        heads = [way.partition(" now ")[0] for way in ways]
        assert len({*heads}) == len(heads) > 1  # a card for each head
        state = opened.state()
        assert heads[0] == f"{state['layer']}.{state['head']}"
        assert state["statistic"] == "apart"
        command = opened.page.evaluate("headwise.app.meta.command")
        assert f"--with {new}" in command
        assert opened.complaints == []


def test_the_terminal_says_what_changed(tmp_path: Path) -> None:
    make, weight, _ = MODELS["before its attention"]
    old = stored(tmp_path / "old", make(), with_tokenizer=False)
    new = halve(old, weight, tmp_path / "new")
    arguments = ("--random-repeats", "--length", 31, "--stats", "previous_token,maximum")
    printed, _ = run(old, "--with", new, *arguments)
    assert "The largest changes come first, each as a part of the scale" in printed
    assert " in old, " in printed
    same, _ = run(old, "--with", old, "--force", *arguments)
    assert "Nothing has changed: every number of every head reads the same." in same


@pytest.mark.slow
def test_two_texts_of_one_model_are_compared(tmp_path: Path) -> None:
    folder = stored(tmp_path / "small", bert(num_hidden_layers=2))
    for name, text in (("one", TEXT), ("two", "the dog ran . the cat sat . far far")):
        Path(f"{name}.txt").write_text(text)
    run(folder, "--text", "one.txt", "--out", "first", "--page", "first.html")
    out, _ = run(folder, "--text", "two.txt", "--with", "first", "--json")
    content = json.loads(out)
    assert content["compared"] == {"first": "small", "second": "first"}
    assert len(content["changes"]) == 8
    assert "one.txt" in content["read"]["what"]
    assert "two.txt" in content["read"]["what"]


@pytest.mark.slow
def test_what_with_cannot_be_compared_with_is_refused(tmp_path: Path) -> None:
    folder = stored(tmp_path / "model", bert())
    for name in ("a", "b"):
        Path(f"{name}.txt").write_text(TEXT)
    texts = ("--text", "a.txt", "--text", "b.txt", "--out", "out")
    error = refused(folder, *texts, "--with", folder)
    assert error.saw == f"several texts, and --with {folder}, which holds no scan"
    error = refused(folder, *texts, "--with", "out", "--part", "1/2")
    assert error.saw == "--part and --with"
    deeper = stored(tmp_path / "deeper", bert(num_hidden_layers=3))
    assert "layers" in refused(folder, "--text", "a.txt", "--with", deeper).saw
