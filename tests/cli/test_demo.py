"""``headwise demo``: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from headwise.cli.demo import demo
from headwise.errors import MissingExtraError, OptionError
from headwise.models import minilm
from headwise.studies import first_look as study
from headwise.studies.encoder import Fallback
from headwise.studies.first_look import FirstLook
from tests.looks import random_look, with_distinct_checks


@pytest.fixture(scope="module")
def result() -> FirstLook:
    return with_distinct_checks(random_look())


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, result: FirstLook) -> Callable[[FirstLook], None]:
    """Makes the study give a result at once."""

    def show(given: FirstLook) -> None:
        def at_once(*, progress: Callable[[str, int, int], None]) -> FirstLook:
            progress("reading", 1, 2)
            return given

        monkeypatch.setattr(study, "first_look", at_once)

    show(result)
    return show


def app() -> typer.Typer:
    """The command alone."""
    alone = typer.Typer()
    alone.command()(demo)
    return alone


def run(*arguments: str) -> tuple[str, str]:
    """Standard output and standard error of a run that succeeds."""
    done = CliRunner(env={"COLUMNS": "80"}).invoke(app(), arguments)
    assert done.exit_code == 0, done.exception
    return done.stdout, done.stderr


def test_it_prints_the_heads_and_ends_in_the_path_of_the_page(
    shown: object, result: FirstLook, tmp_path: Path
) -> None:
    out, _ = run("--out", str(tmp_path / "a" / "page.html"))
    lines = out.splitlines()
    assert lines[-1] == str(tmp_path / "a" / "page.html")
    assert Path(lines[-1]).read_text("utf-8").startswith("<!doctype html>")
    assert "The same function. In all 3 layers" in out
    assert max(map(len, lines[:-1])) <= 80
    for layer, equality in enumerate(result.equalities):
        row = next(line.split() for line in lines if line.startswith(f"{layer:6d} "))
        assert row[1] == f"{equality.drop_in.error:.1e}"
        assert row[3:] == [
            f"{check.ratio:.2f}"
            for check in (equality.drop_in, equality.reference, equality.matrix)
        ]


def test_the_pictures_are_in_per_cent(shown: object, result: FirstLook, tmp_path: Path) -> None:
    lines = run("--out", str(tmp_path / "page.html"))[0].splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("Entropy"))
    for layer, row in enumerate(result.grid("entropy")):
        expected = [f"{100 * value / result.even_entropy:.0f}" for value in row]
        assert lines[first + 2 + layer].split()[1:6] == expected
    for shown_head in result.close_ups:
        head = result.head(shown_head.layer, shown_head.head)
        row = next(line for line in lines if line.strip().startswith(shown_head.reasons[0]))
        assert row.split()[-4:] == [
            f"{head.entropy:.2f}",
            *(f"{x:.3f}" for x in (head.previous_token, head.first_token, head.separator)),
        ]


def test_json_is_all_of_standard_output(shown: object, result: FirstLook, tmp_path: Path) -> None:
    out, err = run("--json", "--out", str(tmp_path / "page.html"))
    record = json.loads(out)
    assert [head["entropy"] for head in record["heads"]] == [h.entropy for h in result.heads]
    assert record == json.loads(json.dumps(result.as_json()))
    assert str(tmp_path / "page.html") in err


def test_the_fallback_is_announced(
    shown: Callable[[FirstLook], None], result: FirstLook, tmp_path: Path
) -> None:
    remedy = "pip install --no-deps something==1.0"
    shown(replace(result, fallback=Fallback("something is not installed", remedy)))
    out, _ = run("--out", str(tmp_path / "page.html"))
    assert "Not the trained encoder: something is not installed." in out
    assert remedy in out


def test_a_failed_comparison_is_announced(
    shown: Callable[[FirstLook], None], result: FirstLook, tmp_path: Path
) -> None:
    first = result.equalities[0]
    wrong = replace(first, drop_in=replace(first.drop_in, ratio=31.5, within=False))
    shown(replace(result, equalities=(wrong, *result.equalities[1:])))
    out, _ = run("--out", str(tmp_path / "page.html"))
    assert "Not the same function." in out
    assert "31.50" in out


def test_a_folder_is_refused(shown: object, tmp_path: Path) -> None:
    done = CliRunner().invoke(app(), ["--out", str(tmp_path)])
    assert done.exit_code != 0
    assert isinstance(done.exception, OptionError)


def test_the_command_itself(tmp_path: Path) -> None:
    try:
        minilm.folder()
    except MissingExtraError as missing:
        pytest.skip(str(missing))
    command = [sys.executable, "-m", "headwise", "demo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = tmp_path / "headwise-demo" / "index.html"
    assert done.stdout.splitlines()[-1] == str(page)
    assert "In all 6 layers" in done.stdout
    assert "all-MiniLM-L6-v2" in page.read_text("utf-8")
    assert [p.name for p in page.parent.iterdir()] == ["index.html"]
