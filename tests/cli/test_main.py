"""The command line's frame: version, and how an error is spoken."""

import pickle
import sys

import pytest

import headwise
from headwise import cli
from headwise.cli.output import CRASHED, USAGE, option_text
from headwise.errors import OptionError, ShapeError
from tests.test_door import HEAVY, loaded_by


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["headwise", "--version"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"headwise {headwise.__version__}\n"


@pytest.mark.parametrize("command", ["--help", "layouts"])
def test_help_and_the_list_of_layouts_start_without_torch(command: str) -> None:
    loaded = loaded_by("from headwise.cli import main; main()", command)
    assert "headwise.cli.layouts" in loaded
    assert HEAVY.isdisjoint(loaded)
    assert ("rich.console" in loaded) == (command == "layouts")


def test_an_error_is_a_message_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise ShapeError(saw="512 and 7 heads", needed="a multiple", do="take 8 heads")

    monkeypatch.setattr(cli, "app", refuse)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == USAGE
    assert capsys.readouterr().err == (
        "headwise: 512 and 7 heads\n  needed: a multiple\n  do:     take 8 heads\n"
    )


def test_an_error_names_arguments_as_the_caller_writes_them() -> None:
    error = OptionError(
        saw="{from} llama", needed="{}", do="pass {accept}", parameter={"from": (), "accept": "ab"}
    )
    for same in (error, pickle.loads(pickle.dumps(error))):
        assert str(same) == 'from llama\n  needed: {}\n  do:     pass accept=["a", "b"]'
        assert same.hint == "pass {accept}"
        assert same.lines(option_text) == ("--from llama", "{}", "pass --accept a --accept b")


def test_a_mistake_of_ours_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == CRASHED
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert error.endswith("ZeroDivisionError\n")
    assert ", in fail\n" in error
