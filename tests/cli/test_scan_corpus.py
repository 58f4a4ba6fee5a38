"""``headwise scan --out``: what is kept, what goes on after an interruption, what is refused."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from headwise.scanning import parts, plan
from headwise.scanning.result import HeadScan
from tests.cli.scan_command import invoke, refused, run
from tests.huggingface.stored import TEXT
from tests.quick import others_slow

pytestmark = pytest.mark.usefixtures("in_a_folder_of_its_own")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    words = TEXT.split()
    for n in range(3):
        (folder / f"{n}.txt").write_text(" ".join(words[n : n + 9]), "utf-8")
    return folder


def everything_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow
def test_an_interrupted_corpus_goes_on(
    model: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = run(model, "--text", texts, "--out", "whole", "--json")
    assert json.loads(whole)["read"]["sequences"] == 3
    real, written = parts.write_scan_file, []

    def interrupted(result: HeadScan, path: Path, **options: Any) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        real(result, path, **options)

    monkeypatch.setattr(parts, "write_scan_file", interrupted)
    stopped = invoke(model, "--text", texts, "--out", "again", "--force")
    assert stopped.exit_code == 130
    assert stopped.stderr.splitlines()[-1] == (
        "Interrupted; 2 of 3 texts are in again. Run the same command again to resume."
    )
    assert stopped.stdout == ""
    assert len(everything_in(Path("again"))) == 3  # two texts, and corpus.json
    monkeypatch.setattr(
        parts, "write_scan_file", lambda *a, **k: written.append(a[1].name) or real(*a, **k)
    )
    again, err = run(model, "--text", texts, "--out", "again", "--json", "--force")
    assert written[2:] == [sorted(Path("again/parts").iterdir())[-1].name, parts.SCAN]
    assert "2 of 3 texts are in again already." in err
    assert everything_in(Path("again")) == everything_in(Path("whole"))
    assert json.loads(again)["heads"] == json.loads(whole)["heads"]
    _, err = run(model, "--text", texts, "--out", "again", "--json", "--force")
    assert "All 3 texts are in again already; nothing is read again." in err
    assert written[4:] == [parts.SCAN]


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        ("plan_scan", "Interrupted before the scan began."),
        ("scan_text", "Interrupted; nothing is saved without --out."),
    ],
)
def test_an_interruption_is_a_line_and_a_status(
    model: Path, text: Path, monkeypatch: pytest.MonkeyPatch, stage: str, line: str
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan if stage == "plan_scan" else plan.PlannedScan, stage, interrupted)
    stopped = invoke(model, "--text", text)
    assert stopped.exit_code == 130
    assert stopped.stderr.splitlines()[-1] == line
    assert not Path("headwise-scan/index.html").exists()


def test_a_corpus_needs_a_folder(model: Path, texts: Path, text: Path) -> None:
    assert refused(model, "--text", texts).saw == "several texts, and no --out"
    assert refused(model, "--text", text, "--text", text).saw == "several texts, and no --out"


@pytest.mark.slow
def test_an_empty_text_is_named_or_left_out(model: Path, texts: Path) -> None:
    more = texts / "deep"
    more.mkdir()
    (more / "nothing.txt").write_text(" \n", "utf-8")
    (more / "one.txt").write_text("cat", "utf-8")
    options = (model, "--text", texts, "--out", "kept", "--stats", "entropy", "--json")
    error = refused(*options)
    assert error.saw == f"--text {more / 'nothing.txt'}, which is empty"
    assert error.do == "--skip-empty to leave such texts out"
    found = json.loads(run(*options, "--skip-empty")[0])
    assert found["read"]["sequences"] == 3
    assert found["notes"] == ["left out, with fewer than two tokens: nothing.txt, one.txt"]
    assert len(list(Path("kept/parts").iterdir())) == 3


def test_a_corpus_of_empty_texts(model: Path) -> None:
    folder = Path("empty")
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).touch()
    error = refused(model, "--text", folder, "--out", "kept", "--skip-empty")
    assert error.saw == "2 texts of fewer than two tokens"


@pytest.mark.slow
def test_a_folder_of_another_scan(model: Path, text: Path) -> None:
    run(model, "--text", text, "--out", "kept", "--page", "p.html")
    before = everything_in(Path("kept"))
    error = refused(model, "--text", text, "--out", "kept", "--length", 7)
    assert error.saw.endswith("made with length of the model")
    error = refused(model, "--text", text, "--out", "kept", "--stats", "entropy")
    assert error.saw.endswith("made with other statistics")
    whole = text.read_text("utf-8")
    text.write_text(whole.replace("cat", "dog"), "utf-8")
    assert "other content of 'cats.txt'" in refused(model, "--text", text, "--out", "kept").saw
    text.write_text(whole, "utf-8")
    assert everything_in(Path("kept")) == before
    run(model, "--text", text, "--out", "kept", "--page", "p.html", "--force")  # the same again
    assert everything_in(Path("kept")) == before


@pytest.mark.slow
def test_a_damaged_part_is_named(model: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(model, "--text", texts, "--out", "kept", "--stats", "entropy", "--page", "p.html")
    before = everything_in(Path("kept"))
    part = sorted(Path("kept/parts").iterdir())[1]
    raw = part.read_bytes()
    part.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    arguments = (model, "--text", texts, "--out", "kept", "--stats", "entropy")
    error = refused(*arguments)
    assert error.saw.startswith(f"the file {part.absolute()} is damaged or was edited: ")
    assert error.do.startswith("remove this file and start the same run again")
    part.unlink()
    real, written = parts.write_scan_file, []
    monkeypatch.setattr(
        parts, "write_scan_file", lambda *a, **k: written.append(a[1].name) or real(*a, **k)
    )
    run(*arguments)
    assert written == [part.name, parts.SCAN]  # the text of the part, and the merge
    assert everything_in(Path("kept")) == before


@pytest.mark.slow
def test_hidden_files_are_no_texts(model: Path, texts: Path) -> None:
    """Editors and archives leave copies of a text under names that begin with a dot."""
    for name in ("._0.txt", ".checkpoints/0.txt"):
        (texts / name).parent.mkdir(exist_ok=True)
        (texts / name).write_bytes(b"\xff")
    (texts / "2.txt").rename(texts / "2.TXT")
    found = json.loads(run(model, "--text", texts, "--out", "kept", "--json")[0])
    assert found["read"]["sequences"] == 3


def test_a_byte_order_mark_is_no_token(model: Path, texts: Path) -> None:
    file = texts / "0.txt"
    options = ("--text", file, "--stats", "entropy", "--json", "--force")
    heads = json.loads(run(model, *options)[0])["heads"]
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert json.loads(run(model, *options)[0])["heads"] == heads


@pytest.mark.slow
@pytest.mark.parametrize(("stored", "heads"), others_slow([("none", "1.0"), ("all", "all")]))
def test_the_command_for_more_single_tokens_runs(
    model: Path, texts: Path, stored: str, heads: str
) -> None:
    """Into another folder, where the scans of the one here lack them."""
    run(model, "--text", texts, "--out", "kept", "--top-keys", stored, "--length", 6)
    page = Path("headwise-scan/index.html").read_text("utf-8")
    command = str(
        json.loads(page.partition('id="headwise-meta">')[2].partition("</script>")[0])["command"]
    )
    program, name, *arguments = shlex.split(command.format(heads=heads))
    assert (program, name) == ("headwise", "scan")
    _, err = run(*arguments)
    assert ("nothing is read again" in err) == (stored == "all")
    page = Path("headwise-scan/index.html").read_text("utf-8")
    assert '"top":[4,' in page
