"""The text as it was written, in the viewer: drawn, copied, searched, and its tokens chosen."""

import json
import unicodedata
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from headwise.models import tiny
from headwise.reports.page import save_scan_page
from headwise.scanning.written import WrittenText
from tests.quick import others_extra, others_slow
from tests.reports.browser import Chromium, Opened, needs_a_browser
from tests.reports.viewer_scans import WORDS, viewer_report, viewer_scan
from tests.reports.written_pages import DRAWN, LINES, page_of, tokenized
from tests.scanning.written_texts import KINDS, TEXTS

pytestmark = [needs_a_browser, pytest.mark.usefixtures("shapes_unchecked")]

FLAGS = {chr(code) for code in range(0x1F1E6, 0x1F200)}  # letters, two for each flag
JOINED = "\u200d\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"  # to what stands before
WIDTHS = {"wide": 1400, "phone": 390}
BOXES = """(all) => all.map((each) => {
  const { top, left, right } = each.getBoundingClientRect();
  return [top, left, right];
})"""
LISTEN = """() => {
  const keep = (event) => { window.copied = event.clipboardData.getData("text/plain"); };
  document.addEventListener("copy", keep);
}"""


def show(opened: Opened, sequence: int) -> None:
    opened.do(
        f"headwise.app.set({{ sequence: {sequence}, token: null }})", f"s.sequence === {sequence}"
    )
    first = json.dumps([*TEXTS.values()][sequence])
    opened.poll(f"{first}.startsWith(document.querySelector('.sheet .row')?.textContent || '-')")


@pytest.fixture(scope="module", params=others_extra(KINDS, quick=["byte-level"]))
def all_texts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of all texts, read by one tokenizer."""
    written = [tokenized(request.param, text) for text in TEXTS.values()]
    return page_of(tmp_path_factory.mktemp(request.param), *written)


# ---- drawn and copied ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_drawn_and_copied_is_the_text(
    browser: Chromium, all_texts: Path, width: str
) -> None:
    with browser.open(all_texts, width=WIDTHS[width], address="#p=text") as opened:
        opened.page.evaluate(LISTEN)
        for number, text in enumerate(TEXTS.values()):
            show(opened, number)
            rows = opened.page.evaluate(DRAWN)
            assert "".join(rows) == text
            assert all(not row[:-1].count("\n") for row in rows)
            opened.page.focus(".scroller")
            opened.page.keyboard.press("Control+a")
            opened.page.keyboard.press("Control+c")
            assert opened.page.evaluate("copied") == text
        assert opened.complaints == []


def test_a_part_that_is_copied_has_no_lines_of_the_page(browser: Chromium, all_texts: Path) -> None:
    """From the second character of the first line to the second of the third, on a phone."""
    text = TEXTS["long"]
    with browser.open(all_texts, width=390) as opened:
        show(opened, list(TEXTS).index("long"))
        opened.page.evaluate(LISTEN)
        first, second = opened.page.evaluate(
            "[...document.querySelectorAll('.sheet .row')].map((row) => row.textContent.length)"
        )[:2]
        opened.page.evaluate(
            """() => {
              const rows = [...document.querySelectorAll(".sheet .row")];
              const hits = rows.map((row) => row.querySelector(".t:not([data-mark])"));
              getSelection().setBaseAndExtent(hits[0].firstChild, 1, hits[2].firstChild, 2);
            }"""
        )
        opened.page.keyboard.press("Control+c")
        assert opened.page.evaluate("copied") == text[1 : first + second + 2]
        # The rows of the selection's ends stay, wherever the text is scrolled to.
        opened.page.evaluate("document.querySelector('.scroller').scrollTop = 1e6")
        opened.poll("/x$/.test([...document.querySelectorAll('.sheet .row')].at(-1).textContent)")
        tops = (
            "[...document.querySelectorAll('.sheet .row')].map((row) => parseFloat(row.style.top))"
        )
        assert 26 not in opened.page.evaluate(tops)  # the second line is out of sight
        opened.page.evaluate("window.copied = null")
        opened.page.keyboard.press("Control+c")
        assert opened.page.evaluate("copied") == text[1 : first + second + 2]


@pytest.mark.slow
def test_letters_join_and_stand_as_in_any_text(browser: Chromium, all_texts: Path) -> None:
    """The pieces of a line take the room of the bare line, and the line fits into the pane."""
    with browser.open(all_texts, address="#p=text") as opened:
        for number in range(len(TEXTS)):
            show(opened, number)
            lines = opened.page.evaluate(LINES)
            for pieces, bare, drawn, room in lines:
                assert pieces == pytest.approx(bare, abs=0.5)
                assert drawn <= room


@pytest.mark.slow
def test_no_piece_is_a_part_of_what_is_read_as_one_character(
    browser: Chromium, all_texts: Path
) -> None:
    """No accent, joiner, variation or colour of skin begins a piece, and no flag is divided."""
    with browser.open(all_texts, address="#p=text") as opened:
        for name in ("combining", "emoji", "hebrew"):
            show(opened, list(TEXTS).index(name))
            pieces = opened.page.locator(".t:not([data-mark])").all_text_contents()
            for piece in pieces:
                first = piece[:1]
                assert unicodedata.category(first)[0] != "M", piece
                assert first not in JOINED, piece
                assert not piece.endswith("\u200d"), piece
            flags = [char for piece in pieces for char in piece if char in FLAGS]
            assert len(flags) == sum(char in FLAGS for char in TEXTS[name])
            assert all(sum(char in FLAGS for char in piece) % 2 == 0 for piece in pieces)


@pytest.mark.parametrize("names", others_slow(["text", "numbers"], "text"))
def test_words_of_the_vocabulary_are_apart_in_lines_that_fit(
    browser: Chromium, tmp_path: Path, names: str
) -> None:
    """Of a tokenizer that does not tell the characters."""
    words = tuple(word.strip() or "end" for word in WORDS)
    given = {"name_of": None} if names == "numbers" else {"words": words}
    report = viewer_report(viewer_scan(), **given)  # type: ignore[arg-type]
    with browser.open(save_scan_page(tmp_path / "page.html", report)) as opened:
        opened.poll("document.querySelectorAll('.sheet .t').length > 9")
        boxes = opened.page.locator(".sheet .t").evaluate_all(BOXES)
        for (top, _, right), (below, left, _) in pairwise(boxes):
            assert below > top or left >= right - 0.5
        lines = opened.page.evaluate(LINES)  # which draws them bare
        assert max(pieces for pieces, *_ in lines) <= lines[0][-1]
        assert min(pieces - bare for pieces, bare, *_ in lines) > 0


# ---- right to left -------------------------------------------------------------------------------

PLACES = """(text) => {
  const runs = [...document.querySelectorAll(".run")];
  const run = runs.find((each) => each.textContent === text) ??
    runs.find((each) => each.textContent.includes(text));
  const walk = document.createTreeWalker(run, NodeFilter.SHOW_TEXT), places = [];
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    for (let at = 0; at < node.length; at++) {
      const range = document.createRange();
      range.setStart(node, at);
      range.setEnd(node, at + 1);
      const box = range.getBoundingClientRect();
      places.push([node.data[at], box.left, box.right]);
    }
  }
  return { places, dir: run.dir, right: run.getBoundingClientRect().right };
}"""


def words_apart(text: str) -> WrittenText:
    """One token for each word."""
    spans, at = [], 0
    for word in text.split(" "):
        spans.append((at, at + len(word)))
        at += len(word) + 1
    return WrittenText(text, torch.tensor(spans))


def test_right_to_left_text_runs_from_the_right(browser: Chromium, tmp_path: Path) -> None:
    text = "שלום עולם and English"
    with browser.open(page_of(tmp_path, words_apart(text))) as opened:
        found = opened.page.evaluate(PLACES, text)
        assert found["dir"] == "rtl"
        left = {n: place[1] for n, place in enumerate(found["places"])}
        assert left[0] > left[1] > left[3] > left[5] > left[8]  # Hebrew, from right to left
        assert left[10] < left[11] < left[12]  # English, from left to right
        assert left[8] > left[14]  # and it stands to the left of the Hebrew
        boxes = opened.page.locator(".t").evaluate_all(
            "(all) => all.map((e) => e.getBoundingClientRect().left)"
        )
        assert boxes[0] > boxes[1] > boxes[2]


@pytest.mark.slow
def test_what_follows_a_line_places_what_ends_it(browser: Chromium, tmp_path: Path) -> None:
    """A comma between Hebrew words is to the left of the first, at the end of a line too."""
    words = ["Text", *["אאאאאאא"] * 40]
    text = ", ".join(words)
    with browser.open(page_of(tmp_path, words_apart(text)), width=1400) as opened:
        rows = opened.page.evaluate(
            "[...document.querySelectorAll('.sheet .row')].map((row) => row.textContent)"
        )
        ends = [row for row in rows[:-1] if row.rstrip().endswith(",")]
        assert len(ends) > 3
        row = next(row for row in ends if row != rows[0])
        found = opened.page.evaluate(PLACES, row)
        assert found["dir"] == "ltr"
        comma = len(row.rstrip()) - 1
        letter = comma - 1
        assert found["places"][comma][0] == ","
        assert found["places"][comma][2] <= found["places"][letter][1] + 0.5


# ---- tokens --------------------------------------------------------------------------------------


@pytest.fixture
def emoji(browser: Chromium, tmp_path: Path) -> Iterator[Opened]:
    """Bytes, of which four are a rabbit at tokens 4 to 7."""
    text = "ab 🐇 cd"
    written = WrittenText(text, tiny.spans(text))
    with browser.open(page_of(tmp_path, written), address="#h=0.0") as opened:
        opened.poll("document.querySelectorAll('.t').length > 0")
        yield opened
        assert opened.complaints == []


@pytest.mark.slow
def test_clicks_walk_through_the_tokens_of_one_character(emoji: Opened) -> None:
    rabbit = emoji.page.locator(".t", has_text="🐇")
    assert rabbit.count() == 1
    for token in range(4, 8):
        rabbit.click()
        emoji.wait(f"s.token === {token}")
        assert "pinned" in (rabbit.get_attribute("class") or "").split()
        assert rabbit.get_attribute("data-t") == str(token)
        assert f"“🐇” at {token}" in emoji.state()["parts"]["summary"]
    rabbit.click()
    emoji.wait("s.token === null")
    assert emoji.page.locator(".pinned").count() == 0


def test_arrows_walk_through_all_tokens(emoji: Opened) -> None:
    emoji.page.focus(".scroller")
    seen = []
    for _ in range(9):
        emoji.page.keyboard.press("ArrowRight")
        seen.append(emoji.page.evaluate("headwise.app.light.lights.token"))
    assert seen == list(range(1, 10))
    emoji.page.keyboard.press("ArrowLeft")
    emoji.page.keyboard.press("Enter")
    emoji.wait("s.token === 8")


def test_a_token_without_characters_is_a_mark(emoji: Opened) -> None:
    mark, word = (emoji.page.locator(f'[data-t="{token}"]') for token in (0, 1))
    boxes = [each.bounding_box() for each in (mark, word)]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"] + 0.5
    assert mark.text_content() == ""
    assert mark.get_attribute("data-mark")
    mark.click()
    emoji.wait("s.token === 0")
    assert "pinned" in (mark.get_attribute("class") or "")


@pytest.mark.slow
def test_arrows_move_between_lines(browser: Chromium, all_texts: Path) -> None:
    with browser.open(all_texts, address="#p=text") as opened:
        show(opened, list(TEXTS).index("lines"))
        opened.page.focus(".scroller")
        lines = []
        for _ in range(4):
            opened.page.keyboard.press("ArrowDown")
            lines.append(
                opened.page.evaluate(
                    "parseFloat(document.querySelector('.cursor').closest('.row').style.top)"
                )
            )
        assert lines == sorted(set(lines))
        opened.page.keyboard.press("ArrowUp")
        top = "parseFloat(document.querySelector('.cursor').closest('.row').style.top)"
        assert opened.page.evaluate(top) == lines[-2]


def test_words_of_sentences_are_as_written(browser: Chromium, tmp_path: Path) -> None:
    written = tokenized("word-piece", TEXTS["accents"])
    words = [written.word(token) for token in range(len(written.spans))]
    token = words.index("CRÈME")
    with browser.open(page_of(tmp_path, written), address=f"#h=0.0&t={token}") as opened:
        opened.wait("s.lit.exact === 'map'")
        summary = opened.state()["parts"]["summary"]
        assert summary.startswith(f"0.0: “CRÈME” at {token} looks at")
        top = opened.state()["lit"]["entries"][0]["first"]
        assert f"“{words[top] or '∅'}” at {top}" in summary


# ---- search --------------------------------------------------------------------------------------

PHRASES = {
    "accents": {"the cafe": 1, "CREME BRULEE;": 1, "ångström, strasse": 1, "o": 4, "paulo ": 0},
    "combining": {"café and être": 1, "zlgo": 1},
    "cjk": {"電車": 1, "学习，": 1},
    "arabic": {"السلام عليكم»": 1},
    "hebrew": {"שלום עולם": 1, "(ארוך)": 1, "english WORDS": 1},
    "emoji": {"👋🏽!": 1, "flags 🇫🇷": 1},
    "lines": {"line second": 1, "line": 2, "blanks separated": 1},
    "blanks": {"two three, and": 1},
}


@pytest.mark.parametrize("name", others_extra(PHRASES, quick=["hebrew"]))
def test_phrases_are_found_and_marked(browser: Chromium, all_texts: Path, name: str) -> None:
    with browser.open(all_texts, address="#p=text") as opened:
        show(opened, list(TEXTS).index(name))
        for phrase, expected in PHRASES[name].items():
            opened.page.fill("[data-part=search] input", phrase)
            opened.wait(f"s.search === {phrase!r}")
            opened.poll("document.querySelector('.search [role=status]').textContent !== ''")
            status = opened.page.inner_text(".search [role=status]")
            sequence = list(TEXTS).index(name)
            found = opened.page.evaluate("headwise.app.parts.flatMap((part) => part.places ?? [])")
            here = [place for place in found if place["sequence"] == sequence]
            assert len(here) == expected, phrase
            number = f"{len(found)} place{'' if len(found) == 1 else 's'}"
            assert status == (f"{number}, Enter goes on" if found else "not in the text")
            opened.poll(f"document.querySelectorAll('[data-found]').length >= {expected and 1}")
            marked = opened.page.locator("[data-found]").all_text_contents()
            text = TEXTS[name].encode("utf-16-le")
            spans = [
                text[2 * place["from"] : 2 * place["to"]].decode("utf-16-le") for place in here
            ]
            assert "".join(marked) == "".join(spans)


def test_search_goes_to_a_place_and_to_a_token(browser: Chromium, all_texts: Path) -> None:
    with browser.open(all_texts, address="#p=text") as opened:
        show(opened, 0)
        opened.page.fill("[data-part=search] input", "sao paulo")
        opened.wait("s.parts.results === 1")
        opened.page.keyboard.press("Enter")
        opened.wait("s.token !== null")
        assert opened.page.inner_text(".search [role=status]") == "1 of 1 place"
        assert (
            "".join(opened.page.locator('[data-found="here"]').all_text_contents()) == "São Paulo"
        )
        pinned = opened.page.locator(".pinned").first.text_content() or ""
        assert "São Paulo".startswith(pinned.strip()[:1])
        opened.page.fill("[data-part=search] input", "#3")
        opened.wait("s.parts.results === 1")
        opened.page.keyboard.press("Enter")
        opened.wait("s.token === 3")
