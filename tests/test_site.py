"""The documentation as a site: the search, the filter boxes, narrow screens; in a real browser."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote

import pytest

from tests.reports.browser import Chromium, needs_a_browser
from tests.root import ROOT
from tools import live_pages, site

pytestmark = [pytest.mark.slow, needs_a_browser]

SECONDS = 60  # until a step returns something


class Handler(SimpleHTTPRequestHandler):
    """Serves the site."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@dataclass
class Site:
    folder: Path
    home: str
    browser: Chromium

    def probe(self, path: str, step: str, *, width: int = 1280) -> Any:
        """What the step returns, a piece of JavaScript, once it is no longer empty."""
        page = self.browser.browser.new_page(viewport={"width": width, "height": 800})
        try:
            page.goto(self.home + path)
            end = time.monotonic() + SECONDS
            while not (answer := page.evaluate(f"(() => {{ {step} }})()")):
                assert time.monotonic() < end, f"{path}: never an answer"
                page.wait_for_timeout(100)
            return answer
        finally:
            page.close()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, browser: Chromium) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder))
    Thread(target=server.serve_forever, daemon=True).start()
    yield Site(folder, f"http://127.0.0.1:{server.server_port}", browser)
    server.shutdown()
    server.server_close()


SEARCHED = """
const links = [...document.querySelectorAll("a.md-search-result__link")];
return links.length && links.map((link) => new URL(link.href).pathname);
"""


@pytest.mark.parametrize(
    ("query", "page"), [("induction head", "/scan.html"), ("mask True means", "/masks.html")]
)
def test_the_search_finds_the_guide_first(built: Site, query: str, page: str) -> None:
    assert built.probe(f"/?q={quote(query)}", SEARCHED)[0] == page


def test_the_search_works_from_a_file(built: Site) -> None:
    from_file = replace(built, home=built.folder.as_uri())
    paths = from_file.probe(f"/index.html?q={quote('mask True means')}", SEARCHED)
    assert paths[0] == built.folder.joinpath("masks.html").as_posix()


FILTERED = """
const input = document.querySelector(".filter input");
if (!input || document.querySelector(".filter").hidden) return null;
input.value = "{words}";
input.dispatchEvent(new Event("input"));
const shown = (e) => e.getClientRects().length > 0;
return {
  rows: [...document.querySelectorAll("article tbody tr")].filter(shown).map((e) => e.innerText),
  count: document.querySelector(".filter output").textContent,
};
"""


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("statistics", "induction Olsson repeated"),
        ("catalogue", "layout falcon 40b"),
        ("huggingface", "gpt2model"),
        ("mutants", "off-by-one window"),
        ("causes/index", "long rope_theta"),
    ],
)
def test_a_filter_box_leaves_the_rows_with_all_words(built: Site, path: str, words: str) -> None:
    found = built.probe(f"/{path}.html", FILTERED.replace("{words}", words))
    wanted = words.lower().split()
    assert all(word in row.lower() for row in found["rows"] for word in wanted)
    shown, _, every = found["count"].partition(" of ")
    assert int(shown) == len(found["rows"]) < int(every)


def test_the_log_is_filtered_by_entries(built: Site) -> None:
    entries = FILTERED.replace("article tbody tr", "article > p, article > ul > li")
    found = built.probe("/log.html", entries.replace("{words}", "anywidget"))
    log = ROOT.joinpath("docs", "log.md").read_text("utf-8")
    written = re.findall(r"^(?:- )?\*\*\d{4}-", log, re.M)
    assert found["count"] == f"1 of {len(written)}"
    assert sum("anywidget" in text for text in found["rows"]) == 1


MEASURED = """
return {
  wide: document.documentElement.scrollWidth - window.innerWidth,
  elsewhere: window.performance.getEntriesByType("resource").map((entry) => entry.name)
    .filter((name) => !name.startsWith(window.location.origin) && !name.startsWith("data:")),
};
"""


@pytest.mark.parametrize(
    "path", ["/", "/reference/operator.html", "/tutorials/checkpoint.html", "/log.html"]
)
def test_a_page_fits_a_phone_and_loads_nothing_from_elsewhere(built: Site, path: str) -> None:
    assert built.probe(path, MEASURED, width=390) == {"wide": 0, "elsewhere": []}


CUT = """
const wide = (e) => e.scrollWidth > e.clientWidth + 1;
return {
  code: [...document.querySelectorAll("article pre > code")].filter(wide).length,
  tables: [...document.querySelectorAll("article .md-typeset__scrollwrap")].filter(wide).length,
};
"""


@pytest.mark.parametrize("width", [390, 1300])
@pytest.mark.parametrize("page", ["doors", "comparing", "troubleshooting", "notebooks/look"])
def test_no_line_of_code_and_no_table_is_cut(built: Site, page: str, width: int) -> None:
    assert built.probe(f"/{page}.html", CUT, width=width) == {"code": 0, "tables": 0}


def test_the_check_of_the_reference_sees_what_is_missing(built: Site) -> None:
    documented = site.inventory(built.folder.joinpath("objects.inv").read_bytes())
    assert site.wanted(documented) <= documented
    for last in (".scan", ".AttentionMatrix.received", ".MaskError", ".importance.next_token"):
        without = {name for name in documented if not name.endswith(last)}
        assert without < documented
        (missing,) = site.wanted(without) - without
        assert missing.endswith(last)


FRAMED = """
const frame = document.querySelector("iframe.live");
frame.scrollIntoView();
const root = frame.contentDocument.querySelector(".headwise .cell")?.closest(".headwise");
if (!root) return null;
const isDark = frame.contentWindow.getComputedStyle(root).getPropertyValue("--is-dark").trim();
return isDark === "{is_dark}";
"""


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_the_live_page_has_the_scheme_of_the_site(built: Site, scheme: str) -> None:
    """Also if the reader chose another than the system's, which is light here."""
    is_dark = {"default": "0", "slate": "1"}[scheme]
    step = f"document.body.dataset.mdColorScheme = '{scheme}';"
    assert built.probe("/viewer.html", step + FRAMED.replace("{is_dark}", is_dark))


def test_the_live_pages_are_linked(built: Site) -> None:
    for page in ("viewer", "index"):
        links = (
            "return [...document.querySelectorAll('article a')].map((a) => a.getAttribute('href'));"
        )
        found = built.probe(f"/{page}.html", links)
        assert {live_pages.HEADS, live_pages.TWO_MODELS} <= {*found}
    for name in (live_pages.HEADS, live_pages.TWO_MODELS):
        cells = "return document.querySelectorAll('.cell').length;"
        assert built.probe(f"/{name}", cells) >= 32


def test_a_picture_of_a_page_stands_in_both_schemes(built: Site) -> None:
    shown = """return [...document.querySelectorAll("article img")]
      .map((img) => [img.getAttribute("src"), img.checkVisibility()]);"""
    pictures = dict(built.probe("/viewer.html", shown))
    assert pictures["images/viewer/light.png#only-light"]
    assert not pictures["images/viewer/light-dark.png#only-dark"]
