"""The viewer in Firefox: a token, a head, the map and the search, as Chromium shows them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwise.reports.images import viridis_colour
from headwise.scanning.result import HeadScan
from tests.reports.browser import Chromium, needs_a_browser
from tests.reports.firefox import Firefox, FirefoxPage, firefox, needs_firefox
from tests.reports.viewer_scans import WORDS
from tests.reports.written_pages import DRAWN, LINES, page_of, tokenized
from tests.scanning.written_texts import KINDS, TEXTS

pytestmark = [needs_firefox, needs_a_browser, pytest.mark.slow]

MAP = "[data-part=map] canvas"
SUMMARY = "document.querySelector('[data-part=text] .summary').textContent"


@pytest.fixture(scope="module")
def started() -> Iterator[Firefox]:
    with firefox() as started:
        yield started


@pytest.fixture
def page(started: Firefox, path: Path) -> Iterator[FirefoxPage]:
    with started.open(path) as page:
        yield page
        assert page.complaints == []
        assert page.requests == []


def test_a_pinned_token_has_the_sentence_of_chromium(
    page: FirefoxPage, browser: Chromium, path: Path
) -> None:
    page.click('[data-id="1.0"]')
    page.wait("s.layer === 1 && s.head === 0")
    page.click('[data-t="7"]')
    page.wait("s.token === 7")
    with browser.open(path) as opened:
        opened.page.click('[data-id="1.0"]')
        opened.wait("s.layer === 1 && s.head === 0")
        opened.page.click('[data-t="7"]')
        opened.wait("s.token === 7")
        assert page.evaluate(SUMMARY) == opened.page.evaluate(SUMMARY) != ""
        assert page.state()["lit"] == opened.state()["lit"]


@pytest.mark.extra
def test_a_word_in_all_heads_has_the_answers_of_chromium(
    page: FirefoxPage, browser: Chromium, path: Path
) -> None:
    asked = "s.parts.links.token === 300 && s.parts.links.all.length > 0"
    page.evaluate("headwise.app.pin(300)")
    page.wait("s.token === 300")
    page.click("[data-part=every-head]")
    page.wait(asked)
    with browser.open(path, address="#t=300&v=links") as other:
        other.wait(asked)
        assert page.state()["parts"]["links"] == other.state()["parts"]["links"]
        labels = "[...document.querySelectorAll('.cell')].map((cell) => cell.ariaLabel)"
        assert page.evaluate(labels) == other.page.evaluate(labels)


@pytest.mark.extra
def test_a_head_is_chosen_by_keys_and_its_map_is_drawn(page: FirefoxPage, scan: HeadScan) -> None:
    page.click('[data-id="0.0"]')
    page.wait("s.layer === 0 && s.head === 0")
    page.press("ArrowRight", "ArrowRight", "ArrowDown")
    page.wait("s.layer === 1 && s.head === 2")
    page.poll("headwise.app.loaded?.map")
    # Where the band of head 2 is, and that of the heads beside it is not.
    weights, places = scan["map"][1, 2], [(70, 68), (70, 66), (20, 18), (64, 60), (64, 64)]
    for row, col in places:
        colour = page.evaluate(
            f"""(() => {{
              const canvas = document.querySelector("{MAP}"), n = {len(weights)};
              const at = (cell, size) => Math.floor(((cell + 0.5) / n) * size);
              const from = [at({col}, canvas.width), at({row}, canvas.height)];
              return [...canvas.getContext("2d").getImageData(...from, 1, 1).data].slice(0, 3);
            }})()"""
        )
        expected = viridis_colour(float(weights[row, col]) ** 0.5)
        # Two tables of viridis, and the byte in which the weight is stored.
        assert max(abs(a - b) for a, b in zip(colour, expected, strict=True)) <= 6


@pytest.mark.extra
def test_the_wheel_zooms_and_the_axes_follow(page: FirefoxPage) -> None:
    labels = (
        "[...document.querySelectorAll('[data-part=map] .tick text')].map((t) => t.textContent)"
    )
    before = page.evaluate(labels)
    assert before
    page.turn_wheel(MAP, -400)
    page.wait(f"s.zoom[0] > 1.5 && String({labels}) !== {json.dumps(','.join(before))}")


@pytest.mark.extra
def test_the_search_pins_its_places(page: FirefoxPage, scan: HeadScan) -> None:
    ids = scan.texts[0].ids.tolist()
    places = [n for n, token in enumerate(ids) if WORDS[token] == " rabbit"]
    page.press("/", *"RABBIT")
    page.wait(f"s.parts.results === {len(places)}")
    page.press("Enter")
    page.wait(f"s.token === {places[0]}")
    page.press("Escape", "n")
    page.wait(f"s.token === {places[1]}")


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.extra
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_drawn_as_they_were_written(started: Firefox, tmp_path: Path, kind: str) -> None:
    """To the last character, with letters that join, in lines that fit."""
    text = "\n".join(TEXTS.values())
    with started.open(page_of(tmp_path, tokenized(kind, text))) as page:
        page.poll("document.querySelectorAll('.sheet .t').length > 9")
        page.evaluate(f"({DRAWN})().then((rows) => {{ window.drawn = rows; }})")
        page.poll("window.drawn")
        assert "".join(page.evaluate("drawn")) == text
        page.evaluate("document.querySelector('.scroller').scrollTop = 0")
        page.poll("document.querySelector('.sheet .row').style.top === '0px'")
        for pieces, bare, drawn, room in page.evaluate(f"({LINES})()"):
            assert pieces == pytest.approx(bare, abs=0.5)
            assert drawn <= room
        assert page.complaints == []
