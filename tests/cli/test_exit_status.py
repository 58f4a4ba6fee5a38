"""The exit statuses are the same for every command: 0 yes, 1 no, 2 wrong use, 3 undecided."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headwise import cli
from headwise.checkpoints import load_attention
from headwise.cli import output
from headwise.cli.output import CRASHED, INTERRUPTED, NO, UNDECIDED, USAGE, YES
from headwise.errors import ShapeError, UndecidedError
from headwise.function.weights import State
from headwise.study import question as studies
from headwise.study.question import Answer
from tests.checkpoints import llamas
from tests.quick import others_slow
from tests.root import ROOT
from tests.study.answers import answer, made_up

COMMANDS = (
    "demo",
    "study",
    "scan",
    "convert",
    "verify",
    "prune",
    "regroup",
    "compare",
    "detect",
    "layouts",
)
Status = Callable[..., int]


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> Status:
    """The exit status of the whole command line, called as a shell does."""

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["headwise", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert isinstance(stop.value.code, int)
        return stop.value.code

    return run


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """One layer of Llama's, with a config."""
    folder = tmp_path / "a"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (60, 40), "k": (20, 40), "v": (20, 40), "o": (40, 60)}
    state: State = {
        f"model.layers.0.self_attn.{name}_proj.weight": torch.randn(*shape, generator=generator)
        for name, shape in shapes.items()
    }
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


CONFIG = {
    "model_type": "llama",
    "num_attention_heads": llamas.HEADS,
    "num_key_value_heads": llamas.KV_HEADS,
}


def changed(place: Path, **config: Any) -> Path:
    """A copy with another config."""
    other = place.with_name("other")
    other.mkdir()
    (other / "model.safetensors").write_bytes((place / "model.safetensors").read_bytes())
    (other / "config.json").write_text(json.dumps(CONFIG | config))
    return other


def without_attention(folder: Path) -> Path:
    save_file({"x": torch.zeros(3)}, folder / "x.safetensors")
    return folder / "x.safetensors"


def test_detect(status: Status, place: Path, tmp_path: Path) -> None:
    assert status("detect", place) == YES
    assert status("detect", without_attention(tmp_path)) == NO
    assert status("detect", tmp_path / "nowhere") == USAGE
    assert status("detect", place, "--head") == USAGE
    assert status("detect", changed(place, model_type="gptj")) == UNDECIDED


@pytest.mark.slow
def test_compare(status: Status, place: Path, tmp_path: Path) -> None:
    assert status("compare", place, place) == YES
    assert status("compare", place, place, "--layer", 0) == YES
    other = changed(place, rope_theta=123.0)
    assert status("compare", place, other, "--layer", 0) == NO
    token = tmp_path / "token.npy"
    width = load_attention(place).embed_dim
    np.save(token, np.ones((1, 1, width), dtype=np.float32))
    assert status("compare", place, other, "--layer", 0, "--inputs", token) == UNDECIDED
    assert status("compare", place, place, "--inputs", token) == USAGE
    assert status("compare", place, place, "--layer", 99) == USAGE


def test_verify(status: Status, place: Path, tmp_path: Path) -> None:
    assert status("verify", place, place) == YES
    other = changed(place)
    state = load_file(place / "model.safetensors")
    save_file({name: x + 1 for name, x in state.items()}, other / "model.safetensors")
    assert status("verify", place, other) == NO
    assert status("verify", place) == USAGE
    assert status("verify", place, place, "--heads", 5) == USAGE
    assert status("verify", place, without_attention(tmp_path)) == UNDECIDED
    digests = tmp_path / "digests.json"
    assert status("verify", place, "--write-digests", digests) == YES
    assert status("verify", other, digests) == NO
    digests.write_text("{}")
    assert status("verify", place, digests) == USAGE


def test_convert(status: Status, place: Path, tmp_path: Path) -> None:
    assert status("convert", place, tmp_path / "b", "--to", "llama-meta") == YES
    assert status("convert", place, tmp_path / "b", "--to", "llama-meta") == USAGE  # it is there
    assert status("convert", place, tmp_path / "c", "--to", "gpt2") == USAGE
    undecided = changed(place, model_type="gptj")
    assert status("convert", undecided, tmp_path / "c", "--to", "llama-meta") == UNDECIDED


def test_scan_and_layouts(status: Status, tmp_path: Path) -> None:
    assert status("layouts", "llama") == YES
    assert status("layouts", "show", "lama") == USAGE
    assert status("scan", tmp_path) == USAGE
    assert status("scan") == USAGE


@pytest.mark.parametrize(
    ("answers", "expected"),
    others_slow([((answer(),), YES), ((answer(), answer(sum=5)), NO), ((), UNDECIDED)]),
)
def test_study(
    status: Status,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answers: tuple[Answer, ...],
    expected: int,
) -> None:
    page = tmp_path / "page.html"
    found = replace(made_up(), answers=answers)
    monkeypatch.setattr(studies, "answer_questions", lambda *_, **__: found)
    assert status("study", "parameters", "--out", page) == expected
    assert status("study", "no-such-question", "--out", page) == USAGE


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ShapeError(saw="a", needed="b", do="c"), USAGE),
        (UndecidedError(saw="a", needed="b", do="c"), UNDECIDED),
        (ZeroDivisionError("ours"), CRASHED),
    ],
)
def test_errors(
    status: Status,
    error: Exception,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    assert status() == expected
    assert ("Traceback" in capsys.readouterr().err) == (expected == CRASHED)


def test_an_interruption(status: Status, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headwise.identify.detection.detect", stop)
    assert status("detect", place) == INTERRUPTED


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_them(command: str, status: Status, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(command, "--help") == YES
    help_text = " ".join(capsys.readouterr().out.split())
    said = {int(number) for number in re.findall(r"\b(\d) ", help_text.partition("status:")[2])}
    assert said >= {YES, USAGE}
    asks = command in ("detect", "verify", "compare", "study", "demo", "scan")
    assert (NO in said) == asks


def test_the_commands_are_all_of_them() -> None:
    named = {command.callback.__name__ for command in cli.app.registered_commands}  # type: ignore[union-attr]
    assert {*named, *(group.name for group in cli.app.registered_groups)} == {*COMMANDS}


def test_the_documentation_says_them() -> None:
    page = ROOT.joinpath("docs", "command-line.md").read_text("utf-8")
    told = {int(number) for number in re.findall(r"^\| (\d+) \| ", page, re.M)}
    assert told == {YES, NO, USAGE, UNDECIDED, CRASHED, INTERRUPTED}
    source = output.__doc__ or ""
    assert {int(number) for number in re.findall(r"^(\d+) ", source, re.M)} == told
