"""Every page without script in a real browser: nothing is fetched, nothing overflows."""

from pathlib import Path

import pytest

from headwise.reports import diagnosis
from headwise.reports import page as scan_page
from headwise.reports.report import SameFunction, ScanReport
from tests.quick import others_extra, others_slow
from tests.reports.browser import FAULTS, NO_FAULTS, Chromium, needs_a_browser
from tests.reports.diagnoses import report_of_many_heads, report_of_model, report_of_weights
from tests.reports.prunings import page_of_pruning, page_of_regrouping
from tests.reports.scans import made_up, report
from tests.reports.studies import recorded_study

pytestmark = needs_a_browser

NAME = "a_name_without_any_place_to_break_it/of-a-model-that-somebody-called-so"


def report_of(heads: int) -> ScanReport:
    scan = made_up(heads=heads, length=70, notes=("2 layers were not seen",))
    same = SameFunction(NAME, 3, {"headwise.MultiheadAttention": 0.41, "its own layers": 0.38})
    return report(scan, title=NAME, same_function=same)


PAGES = {
    "scan-numbers": lambda: scan_page.render_static(report_of(5)),
    "scan-pictures": lambda: scan_page.render_static(report_of(17)),
    "viewer": lambda: scan_page.render_scan_page(report_of(5)),
    "study": recorded_study,
    "diagnosis": lambda: diagnosis.render_diagnosis_page(report_of_many_heads(NAME)),
    "model": lambda: diagnosis.render_diagnosis_page(report_of_model()),
    "pruning": lambda: page_of_pruning(NAME),
    "regrouping": lambda: page_of_regrouping(NAME),
    "weights": lambda: diagnosis.render_diagnosis_page(report_of_weights()),
}


@pytest.fixture(scope="module", params=others_slow(PAGES, "scan-numbers", "viewer", "diagnosis"))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = tmp_path_factory.mktemp(request.param) / "page.html"
    page.write_text(PAGES[request.param](), "utf-8")
    return page


@pytest.mark.slow
def test_the_first_screen_of_the_study_has_every_answer_beside_its_question(
    browser: Chromium, tmp_path: Path
) -> None:
    page = tmp_path / "study.html"
    page.write_text(recorded_study(), "utf-8")
    with browser.open(page, width=1280, height=720, script=False) as opened:
        rows = opened.page.locator("#questions li")
        assert rows.count() == 12
        for row in rows.all():
            question, answer = row.locator("a").bounding_box(), row.locator("span").bounding_box()
            assert question is not None
            assert answer is not None
            assert question["x"] + question["width"] <= answer["x"]
            assert abs(question["y"] - answer["y"]) < 5
            assert answer["y"] + answer["height"] <= 720
            assert len(row.locator("span").inner_text()) > 10


@pytest.mark.parametrize(
    ("width", "dark"),
    others_extra([(1280, False), (900, True), (390, False)], quick=[(390, False)]),
)
def test_every_picture_is_drawn_and_nothing_overflows(
    browser: Chromium, path: Path, width: int, dark: bool
) -> None:
    scheme = "dark" if dark else "light"
    with browser.open(path, width=width, script=False, color_scheme=scheme) as opened:
        # A page without script cannot be asked from within; Playwright's own world can.
        assert opened.page.evaluate(FAULTS) == NO_FAULTS
        paper = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(20, 23, 27)" if dark else "rgb(251, 250, 247)")
        assert opened.requests == [path.as_uri()]
        assert opened.complaints == []
