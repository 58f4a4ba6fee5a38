"""Comparisons that end before everything was tried: by Ctrl-C or by a budget."""

import io
import time
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from headwise import Attention, compare
from headwise.diagnosis import watch
from headwise.errors import OptionError
from headwise.identify.results import Verdict
from headwise.support.progress import Progress, no_progress

WIDTH, HEADS = 40, 5
LONGEST = 120.0  # seconds that anything may take on a busy machine


@pytest.fixture
def layer() -> Attention:
    torch.manual_seed(0)
    return Attention(WIDTH, HEADS)


def unknown_of(layer: Attention, x: Tensor) -> Tensor:
    """An attention that no cause explains: the outputs of the layer, squared."""
    with torch.no_grad():
        output: Tensor = layer(x).square()
    return output


def interrupt_at(stage: str) -> Progress:
    """Return a progress callback that does what Ctrl-C does, at a stage."""

    def report(said: str, done: int, total: int) -> None:
        del done, total
        if said.startswith(stage):
            raise KeyboardInterrupt

    return report


def test_an_interrupted_search_says_what_was_not_tried(layer: Attention) -> None:
    progress = interrupt_at("trying scale")
    diagnosis = compare(lambda x: unknown_of(layer, x), layer, progress=progress)
    assert diagnosis.verdict is Verdict.UNKNOWN
    assert diagnosis.function is not None
    assert (diagnosis.function.stopped, diagnosis.function.untried) == ("interrupted", ("causes",))
    assert "  interrupted: not tried: causes" in diagnosis.lines
    assert "causes were tried" not in str(diagnosis)
    assert "was stopped before everything was tried" in diagnosis.answer
    assert diagnosis.as_dict()["function"]["stopped"] == "interrupted"


@pytest.mark.slow
def test_a_cause_that_was_found_before_is_named(layer: Attention) -> None:
    def port(x: Tensor) -> Tensor:
        with torch.no_grad():
            output: Tensor = layer(x) + x
        return output

    [last] = compare(port, layer).function.cause_names  # type: ignore[union-attr]
    progress = interrupt_at("trying norm inside")  # which comes after it
    function = compare(port, layer, progress=progress).function
    assert function is not None
    assert function.cause_names == [last] == ["residual inside"]
    assert function.stopped == "interrupted"
    [untried] = function.untried
    assert untried.endswith("causes")


def test_inputs_that_did_not_run_are_told(layer: Attention) -> None:
    def right(x: Tensor) -> Tensor:
        with torch.no_grad():
            output: Tensor = layer(x)
        return output

    progress = interrupt_at("running 3 random tokens")
    diagnosis = compare(right, layer, progress=progress)
    assert diagnosis.verdict is Verdict.INCONCLUSIVE
    assert diagnosis.function is not None
    assert diagnosis.function.untried == ("4 of 6 inputs",)
    assert len(diagnosis.function.probes) == 2
    with pytest.raises(KeyboardInterrupt):
        compare(right, layer, progress=interrupt_at("running 11"))


def test_a_budget_bounds_the_runs_and_the_search(
    layer: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: 0.1 * calls))

    def slow(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return unknown_of(layer, x)

    function = compare(slow, layer, budget=0.5).function
    assert function is not None
    assert function.stopped == "the budget of 0.5 s is spent"
    assert function.untried[0].endswith("of 6 inputs")
    assert 2 <= calls <= 7


def test_an_input_is_run_in_any_budget(layer: Attention) -> None:
    function = compare(lambda x: unknown_of(layer, x), layer, budget=1e-9).function
    assert function is not None
    assert len(function.probes) == 1


@pytest.mark.parametrize("budget", [0, -1.0])
def test_a_budget_is_positive(layer: Attention, budget: float) -> None:
    with pytest.raises(OptionError, match=f"budget={budget}"):
        compare(layer, layer, budget=budget)


def test_the_calls_of_a_slow_function_are_counted(
    layer: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwise.diagnosis.attentions.SLOW", 0.0)
    said: list[str] = []

    def report(stage: str, done: int, total: int) -> None:
        said.append(stage)
        interrupt_at("trying")(stage, done, total)

    compare(lambda x: unknown_of(layer, x), layer, progress=report)
    assert any("s a call, 8 calls are planned" in stage for stage in said)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_line_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for quiet in (1e6, 0.0):
        monkeypatch.setattr(watch, "QUIET", quiet)
        monkeypatch.setattr("sys.stderr", terminal := Terminal())
        with watch.watching(None, None):
            watch.look("trying scale", 3, 70)
            end = time.monotonic() + LONGEST
            while not quiet and not terminal.getvalue() and time.monotonic() < end:
                time.sleep(0.01)
        assert ("compare: trying scale, 3 of 70" in terminal.getvalue()) == (not quiet)


def test_a_file_gets_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "QUIET", 0.0)
    monkeypatch.setattr("sys.stderr", log := io.StringIO())
    with watch.watching(None, None) as each:
        watch.look("trying scale", 3, 70)
        assert each.progress is no_progress
    assert not log.getvalue()
