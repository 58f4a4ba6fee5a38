"""The page in a real browser: nothing is fetched, nothing overflows, every picture is drawn.

Needs chromium or Google Chrome on the path; skipped where there is none.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headwise.reports import study
from headwise.reports.first_look import render
from headwise.studies.study import Study
from tests.looks import random_look
from tools import study as documentation

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

# The page itself runs no script. This one is put into a copy of it, and writes what it measured.
PROBE = """
<script>
addEventListener("load", () => {
  const root = document.documentElement, seen = (e) => getComputedStyle(e).display;
  const drawn = [...document.images].filter((i) => i.complete && i.naturalWidth === 32).length;
  const found = JSON.stringify({
    wide: root.scrollWidth, window: innerWidth, images: document.images.length, drawn,
    fetched: performance.getEntriesByType("resource").map((r) => r.name)
      .filter((name) => !name.startsWith("data:")),
    spilled: [...document.querySelectorAll(".card, .map, .status")]
      .filter((e) => e.scrollWidth > e.clientWidth + 2).length,
    paper: getComputedStyle(document.body).backgroundColor,
    cut: [...document.querySelectorAll("svg text")].filter((t) => {
      const box = t.getBoundingClientRect(), all = t.ownerSVGElement.getBoundingClientRect();
      return box.left < all.left - 1 || box.right > all.right + 1 ||
        box.top < all.top - 1 || box.bottom > all.bottom + 1;
    }).map((t) => t.textContent),
    facts: [...document.querySelectorAll(".map .more")].filter((e) => seen(e) !== "none").length,
    enlarged: document.querySelector(":target")?.querySelector("img").clientWidth,
  });
  if (parent === window) root.dataset.probe = found; else parent.postMessage(found, "*");
});
</script>
"""

NO_BROWSER = f"no browser on the path: none of {', '.join(NAMES)}"
# Where CI is set, nothing is left out: there the tests fail instead.
needs_a_browser = pytest.mark.skipif(
    BROWSER is None and not os.environ.get("CI"), reason=NO_BROWSER
)
pytestmark = [needs_a_browser, pytest.mark.slow]


def with_probe(html: str, folder: Path) -> Path:
    page = folder / "copy.html"
    page.write_text(html.replace("</body>", PROBE + "</body>"), "utf-8")
    return page


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_probe(render(random_look()), tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def study_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    record = documentation.read()
    result = Study(tuple(documentation.answers(record)), (), record["setting"])
    return with_probe(study.render(result), tmp_path_factory.mktemp("study"))


def measured(address: str, tmp_path: Path, *flags: str, width: int = 1280) -> dict[str, Any]:
    """What the probe found. A headless window is at least 500 wide; narrow ones need a frame."""
    assert BROWSER is not None, NO_BROWSER
    command = [BROWSER, *FLAGS, *flags, f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*command, f"--window-size={width},900", "--dump-dom", address],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r'data-probe="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(found[1].replace("&quot;", '"'))
    return result


@pytest.mark.parametrize("width", [500, 1280])
def test_every_picture_is_drawn_and_nothing_overflows(
    copy: Path, tmp_path: Path, width: int
) -> None:
    found = measured(copy.as_uri(), tmp_path, width=width)
    assert found["window"] == width
    assert found["wide"] <= width
    assert found["spilled"] == 0
    assert found["images"] == found["drawn"] >= 15
    assert found["fetched"] == []
    assert found["facts"] == 0


def test_a_map_is_enlarged_where_a_link_leads_to_it(copy: Path, tmp_path: Path) -> None:
    found = measured(f"{copy.as_uri()}#head-1-2", tmp_path)
    assert found["facts"] == 1
    assert found["enlarged"] > 300


def test_dark_where_the_reader_wants_it_dark(copy: Path, tmp_path: Path) -> None:
    light = measured(copy.as_uri(), tmp_path)
    dark = measured(copy.as_uri(), tmp_path, "--blink-settings=preferredColorScheme=0")
    assert light["paper"] == "rgb(251, 250, 247)"
    assert dark["paper"] == "rgb(20, 23, 27)"


@pytest.mark.parametrize("width", [500, 1280])
def test_no_word_of_the_studys_pictures_is_cut_off(
    study_copy: Path, tmp_path: Path, width: int
) -> None:
    found = measured(study_copy.as_uri(), tmp_path, width=width)
    assert found["wide"] <= width
    assert found["spilled"] == 0
    assert found["cut"] == []
    assert found["fetched"] == []


@pytest.mark.parametrize("page", ["copy", "study_copy"])
def test_a_phone(page: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    copy: Path = request.getfixturevalue(page)
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
