"""The page of a scan in a real browser: nothing is fetched, nothing overflows, no word is cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwise.reports.scan import render
from tests.reports.scans import made_up, report
from tests.reports.test_in_a_browser import measured, needs_a_browser, with_probe

pytestmark = [needs_a_browser, pytest.mark.slow]

NAME = "a_name_without_any_place_to_break_it/of-a-model-that-somebody-called-so"


@pytest.fixture(scope="module", params=[5, 17], ids=["numbers", "pictures"])
def copy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    scan = made_up(heads=request.param, length=70, notes=("2 layers were not seen",))
    return with_probe(render(report(scan, title=NAME)), tmp_path_factory.mktemp("page"))


@pytest.mark.parametrize("width", [500, 1280])
def test_nothing_overflows(copy: Path, tmp_path: Path, width: int) -> None:
    found = measured(copy.as_uri(), tmp_path, width=width)
    assert found["wide"] <= width
    assert found["spilled"] == 0
    assert found["cut"] == []
    assert found["fetched"] == []
    assert found["facts"] == 0


def test_a_map_is_enlarged_where_a_link_leads_to_it(copy: Path, tmp_path: Path) -> None:
    found = measured(f"{copy.as_uri()}#head-1-2", tmp_path)
    assert found["facts"] == 1
    assert found["enlarged"] > 300


def test_dark_where_the_reader_wants_it_dark(copy: Path, tmp_path: Path) -> None:
    dark = measured(copy.as_uri(), tmp_path, "--blink-settings=preferredColorScheme=0")
    assert dark["paper"] == "rgb(20, 23, 27)"


def test_a_phone(copy: Path, tmp_path: Path) -> None:
    frame = copy.with_name("frame.html")
    frame.write_text(
        "<!doctype html><body><script>addEventListener('message', (e) => "
        "{ document.documentElement.dataset.probe = e.data; });</script>"
        f'<iframe src="{copy.name}" style="width:360px;height:800px;border:0"></iframe>',
        "utf-8",
    )
    found = measured(frame.as_uri(), tmp_path)
    assert found["window"] == 360
    assert found["wide"] <= 360
    assert found["spilled"] == 0
