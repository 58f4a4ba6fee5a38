"""Every page in a real browser: nothing is fetched, nothing overflows, every picture is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwise.reports import diagnosis_page, scan_page, study_page
from headwise.study.experiments.same_weights import SameFunction
from headwise.study.run import Study
from tests.reports.browser import DARK, framed, measured, needs_a_browser, with_probe
from tests.reports.diagnoses import report_of_many_heads, report_of_model, report_of_weights
from tests.reports.scans import made_up, report
from tools import study as documentation

pytestmark = [needs_a_browser, pytest.mark.slow]

NAME = "a_name_without_any_place_to_break_it/of-a-model-that-somebody-called-so"


def scans_page(heads: int) -> str:
    found = made_up(heads=heads, length=70, notes=("2 layers were not seen",))
    same = SameFunction(NAME, 3, {"headwise.MultiheadAttention": 0.41, "its own layers": 0.38})
    return scan_page.render(report(found, title=NAME, same_function=same))


def studys_page() -> str:
    record = documentation.read_record()
    return study_page.render(Study(tuple(documentation.answers_of(record)), (), record["setting"]))


PAGES = {
    "scan-numbers": lambda: scans_page(5),
    "scan-pictures": lambda: scans_page(17),
    "study": studys_page,
    "diagnosis": lambda: diagnosis_page.render(report_of_many_heads(NAME)),
    "model": lambda: diagnosis_page.render(report_of_model()),
    "weights": lambda: diagnosis_page.render(report_of_weights()),
}


@pytest.fixture(scope="module", params=PAGES)
def copy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_probe(PAGES[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("width", [500, 1280])
def test_every_picture_is_drawn_and_nothing_overflows(
    copy: Path, tmp_path: Path, width: int
) -> None:
    found = measured(copy.as_uri(), tmp_path, width=width)
    assert found["window"] == width
    assert found["wide"] <= width
    assert found["spilled"] == 0
    assert found["cut"] == []
    assert found["fetched"] == []
    assert found["images"] == found["drawn"]
    assert found["facts"] == 0


def test_a_phone(copy: Path, tmp_path: Path) -> None:
    found = measured(framed(copy, width=360).as_uri(), tmp_path)
    assert found["window"] == 360
    assert found["wide"] <= 360
    assert found["spilled"] == 0


def test_dark_where_the_reader_wants_it_dark(copy: Path, tmp_path: Path) -> None:
    assert measured(copy.as_uri(), tmp_path)["paper"] == "rgb(251, 250, 247)"
    assert measured(copy.as_uri(), tmp_path, DARK)["paper"] == "rgb(20, 23, 27)"


def test_a_map_is_enlarged_where_a_link_leads_to_it(tmp_path: Path) -> None:
    copy = with_probe(scans_page(5), tmp_path)
    found = measured(f"{copy.as_uri()}#head-1-2", tmp_path)
    assert found["images"] >= 15
    assert found["facts"] == 1
    assert found["enlarged"] > 300
