"""``headwise study``: what it prints, what it writes, and how it fails."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from headwise.cli.study import study
from headwise.errors import OptionError
from headwise.study import question as studies
from headwise.study.question import Study
from tests.cli.alone import Alone
from tests.reports.html import Tree
from tests.study.answers import QUESTION, answer, made_up, missing

Show = Callable[[Study], None]
STUDY = Alone(study)
run = STUDY.run


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Show:
    """Makes the study give a result at once."""

    def show(given: Study) -> None:
        def at_once(ids: Sequence[str], *, progress: Callable[[str, int, int], None]) -> Study:
            progress("made-up", 1, 2)
            return given

        monkeypatch.setattr(studies, "answer_questions", at_once)

    show(made_up())
    return show


def test_questions_verdicts_and_the_path_of_the_page(shown: Show, tmp_path: Path) -> None:
    out, _ = run("--out", str(tmp_path / "a" / "page.html"))
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[:2] == ['Are two and two <four> & "more"?', "  Yes: the sum <is> 4."]
    assert "1 of 1 claims are borne out." in lines
    assert "a bar is" not in out
    assert lines[-1] == str(tmp_path / "a" / "page.html")
    assert Path(lines[-1]).read_text("utf-8").startswith("<!doctype html>")
    assert max(map(len, lines[:-1])) <= 80


def test_a_question_that_is_named_shows_its_facts_and_figures(
    shown: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown(made_up(answer(bars=[1.0, 1.5])))
    monkeypatch.setattr(studies, "IDS", ("made-up",))
    done = STUDY.invoke("made-up", "--out", str(tmp_path / "page.html"))
    assert done.exit_code == 1, done.exception
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert "✓ the sum is 4" in lines
    assert "✗ a bar is 1.50 high" in lines
    assert "Because 4 & nothing else." in lines
    assert ["<bar>", "1.5"] in [line.split() for line in lines]
    assert "0 of 1 claims are borne out." in lines


def test_json_is_all_of_standard_output(shown: Show, tmp_path: Path) -> None:
    out, err = run("--json", "--out", str(tmp_path / "page.html"))
    assert json.loads(out) == json.loads(json.dumps(made_up().as_json()))
    assert str(tmp_path / "page.html") in err


def test_what_was_left_out_is_announced(shown: Show, tmp_path: Path) -> None:
    needy = replace(QUESTION, id="needy", asks="And this?")
    shown(made_up(left_out=((needy, missing("no thing", "pip install thing")),)))
    out, _ = run("--out", str(tmp_path / "page.html"))
    assert "Left out: no thing." in out
    assert "To get it: pip install thing" in out


def test_the_list_has_every_question(tmp_path: Path) -> None:
    out, _ = run("--list")
    rows = [line.split(maxsplit=1) for line in out.splitlines()]
    assert rows == [[name, studies.load_question(name).asks] for name in studies.IDS]


def test_the_list_of_some(tmp_path: Path) -> None:
    out, _ = run("when-split", "--list")
    assert out.split() == ["when-split", *studies.load_question("when-split").asks.split()]


def test_the_fallback_is_announced(shown: Show, tmp_path: Path) -> None:
    shown(made_up(fallback=missing("no weights", "pip install weights[all]")))
    out, _ = run("--out", str(tmp_path / "page.html"))
    assert out.startswith("Not the trained encoder: no weights.\n")
    assert "To get it: pip install weights[all]" in out


def test_a_folder_is_refused_before_the_work(shown: Show, tmp_path: Path) -> None:
    done = STUDY.invoke("--out", tmp_path)
    assert isinstance(done.exception, OptionError)


@pytest.mark.slow
def test_the_command_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headwise", "study", "parameters", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(done.stdout)["questions"]
    assert (record["id"], record["holds"]) == ("parameters", True)
    page = tmp_path / "headwise-study" / "index.html"
    assert record["claim"] in Tree(page.read_text("utf-8")).root.text
    assert [p.name for p in page.parent.iterdir()] == ["index.html"]


def test_an_unknown_question_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "the question 'heads'" in str(STUDY.refused("heads"))
    assert list(tmp_path.iterdir()) == []
