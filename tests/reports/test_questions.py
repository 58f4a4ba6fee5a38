"""The questions that people bring to the page, each answered in at most three actions.

By mouse, by keyboard and by touch. Moving the pointer or the focus is no action; a click, a tap, a
key and a typed word are one each. Every answer is compared with the `AttentionMatrix` of the head.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.cli.scan import ScanOptions, run_scan_with_progress
from headwise.models import minilm
from headwise.reports.page import save_scan_page
from headwise.scanning.inputs import list_inputs
from headwise.scanning.record import record_attention
from headwise.scanning.source import open_model, read_texts
from tests.reports.browser import Chromium, Opened, needs_a_browser

pytestmark = [needs_a_browser, pytest.mark.slow]

TEXT = (
    "The trophy did not fit into the brown suitcase, because it was too big.\n"
    "Maria told her sister that the train to Paris, and the café in it, were late.\n"
    "She laughed. The cat saw the train. It left at noon, and the suitcase stayed behind.\n"
)
MOST_ACTIONS = 3
STEP = 0.5 / 255  # of the square root of a weight, as the page stores it


@dataclass
class Seen:
    """What the model's own attention says: the weights of each layer, and the words."""

    weights: list[Tensor]  # (heads, queries, keys) of each layer, in float64
    words: list[str]

    def place(self, *words: str) -> int:
        """The first of the tokens that follow each other."""
        starts = range(len(self.words))
        return next(n for n in starts if self.words[n : n + len(words)] == [*words])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    (folder / "text.txt").write_text(TEXT, "utf-8")
    return folder


@pytest.fixture(scope="module")
def path(folder: Path) -> Path:
    options = ScanOptions(
        model_dir=minilm.model_folder(), text=[folder / "text.txt"], page=folder / "page.html"
    )
    return save_scan_page(folder / "page.html", run_scan_with_progress(options))


@pytest.fixture(scope="module")
def seen(folder: Path) -> Seen:
    model = open_model(minilm.model_folder())
    (text,) = read_texts(model, [folder / "text.txt"])
    weights: list[Tensor] = []

    def keep(call: Any) -> None:
        rows = torch.arange(call.matrix.shape[-2])
        weights.append(call.matrix.rows(rows)[0].double())

    with record_attention(model.model, on_complete=keep) as recorder, torch.no_grad():
        recorder.run(*list_inputs(model.inputs(text.ids)))
    return Seen(weights, [model.token_text(token) for token in text.ids[0].tolist()])


def within(shown: float, weight: float) -> bool:
    """True if a share is the weight: as a stored byte of its square root, and with its digits."""
    digits = 0.005 if shown >= 0.0995 else 0.0005 if shown >= 0.00995 else 0.00005
    low, high = (max(weight**0.5 + step, 0) ** 2 for step in (-STEP, STEP))
    return low - digits <= shown <= high + digits


class Reader:
    """Somebody at the page, with one way to act; counts what is done."""

    def __init__(self, opened: Opened, way: str) -> None:
        self.opened, self.page, self.way = opened, opened.page, way
        self.actions = 0

    def press(self, selector: str, *, key: str | None = None) -> None:
        """Click, tap, or go to a control by Tab and arrows and press Enter; or press its key."""
        self.actions += 1
        if self.way == "mouse":
            self.page.click(selector)
        elif self.way == "touch":
            self.page.tap(selector)
        elif key is not None:
            self.page.keyboard.press(key)
        else:
            self.go_to(selector)
            self.page.keyboard.press("Enter")
            self.opened.settle()  # the focus may move

    def go_to(self, selector: str) -> None:
        """Move the focus by Tab, and within a group by arrow keys."""
        for _ in range(80):
            place = self.page.evaluate(PLACE, selector)
            if place is not None:
                break
            # The number of a layer is left of its first head.
            in_row = "(s) => document.activeElement.matches('.cell') && s.includes('data-layer')"
            self.page.keyboard.press("ArrowLeft" if self.page.evaluate(in_row, selector) else "Tab")
        assert place is not None, f"Tab does not reach {selector}"
        keys = ("ArrowUp", "ArrowDown") if "data-layer" in selector else ("ArrowLeft", "ArrowRight")
        for _ in range(abs(place)):
            self.page.keyboard.press(keys[place > 0])
        assert self.page.evaluate("(s) => document.activeElement.matches(s)", selector)

    def press_token(self, token: int) -> None:
        """Pin a token of the text."""
        if self.way != "keyboard":
            self.press(f'.text [data-t="{token}"]')
            return
        self.actions += 1
        self.go_to(".text .scroller")
        at = self.opened.state()["token"] or 0
        for _ in range(abs(token - at)):
            self.page.keyboard.press("ArrowRight" if token > at else "ArrowLeft")
        self.page.keyboard.press("Enter")

    def tab(self, name: str) -> None:
        """Open a tab of a phone; a wide window shows all parts at once."""
        if self.way == "touch":
            self.press(f'.tabs [data-tab="{name}"]')

    def choose_head(self, layer: int, head: int) -> None:
        self.press(f'[data-part=grid] [data-id="{layer}.{head}"]')

    def text_of(self, part: str) -> str:
        return re.sub(r"\s+", " ", self.page.locator(part).first.inner_text()).strip()


# How many places further the control is in the group of buttons with the focus; 0 if it has the
# focus, null if the focus is elsewhere.
PLACE = """(selector) => {
  const here = document.activeElement, wanted = document.querySelector(selector);
  if (here === wanted) return 0;
  const group = wanted.closest("[role=group]");
  const kind = [".cell", ".layer", "button"].find((each) => wanted.matches(each));
  if (!group || !group.contains(here) || !here.matches(kind)) return null;
  const buttons = [...group.querySelectorAll(`${kind}:not([disabled])`)];
  return buttons.indexOf(wanted) - buttons.indexOf(here);
}"""
WAYS = ["mouse", "keyboard", "touch"]


@contextmanager
def reading(browser: Chromium, path: Path, way: str, address: str = "") -> Iterator[Reader]:
    """Open the page for somebody with a mouse, with keys, or with a phone."""
    phone = {"width": 390, "height": 844, "has_touch": True} if way == "touch" else {}
    with browser.open(path, address=address, **phone) as opened:
        reader = Reader(opened, way)
        yield reader
        assert opened.complaints == []
        assert reader.actions <= MOST_ACTIONS


def answer(sentence: str) -> list[tuple[str, int, float]]:
    """The words, their places and their shares, of a sentence on a token."""
    found = re.findall(r"“([^“”]*)” at (\d+) \(([\d.]+) %\)", sentence)
    return [(word, int(place), float(share) / 100) for word, place, share in found]


# ---- one model -----------------------------------------------------------------------------------


def test_which_heads_are_special(browser: Chromium, path: Path, seen: Seen) -> None:
    with reading(browser, path, "mouse") as reader:
        cards = reader.page.locator("[data-part=standouts] button").all_inner_texts()
    named = [re.search(r"Layer (\d+), head (\d+) puts (\d+) % .*token before", c) for c in cards]
    layer, head, share = (int(x) for x in next(filter(None, named)).groups())
    before = [w.diagonal(offset=-1, dim1=-2, dim2=-1).mean(-1) for w in seen.weights]
    best = torch.stack(before)
    assert (layer, head) == divmod(int(best.argmax()), best.shape[1])
    assert abs(share / 100 - float(best.max())) <= 0.0051


@pytest.mark.parametrize("way", WAYS)
def test_what_does_this_token_look_at(browser: Chromium, path: Path, seen: Seen, way: str) -> None:
    token = seen.place("it")
    with reading(browser, path, way, "#s=entropy&h=3.1&t=none") as reader:
        reader.press_token(token)
        reader.opened.wait(f"s.token === {token} && s.lit.entries.length > 0")
        said = answer(reader.text_of(".text .summary"))
    row = seen.weights[3][1, token]
    order = row.argsort(descending=True).tolist()
    assert [place for _, place, _ in said] == order[: len(said)]
    assert said[0][1] == seen.place("suitcase")
    for _, place, share in said:
        assert within(share, float(row[place]))


@pytest.mark.parametrize("way", WAYS)
def test_who_looks_at_it(browser: Chromium, path: Path, seen: Seen, way: str) -> None:
    token = seen.place("suitcase")
    with reading(browser, path, way, "#s=entropy&h=3.1&t=none") as reader:
        reader.press_token(token)
        reader.press('.text [data-direction="queries"]')
        reader.opened.wait(f"s.token === {token} && s.direction === 'queries'")
        said = answer(reader.text_of(".text .summary"))
    column = seen.weights[3][1, :, token]
    assert [place for _, place, _ in said] == column.argsort(descending=True)[: len(said)].tolist()
    for _, place, share in said:
        assert within(share, float(column[place]))


@pytest.mark.parametrize("way", WAYS)
def test_which_head_links_it_to_suitcase(
    browser: Chromium, path: Path, seen: Seen, way: str
) -> None:
    query, key = seen.place("it"), seen.place("suitcase")
    with reading(browser, path, way, "#s=entropy&h=0.0&t=none&p=text") as reader:
        reader.press_token(query)
        reader.press("[data-part=every-head]", key="l")
        reader.opened.wait(f"s.order === 'links' && s.parts.links?.token === {query}")
        cells = reader.page.locator("[data-part=grid] [data-id]")
        names = {
            each.get_attribute("data-id"): each.get_attribute("aria-label") for each in cells.all()
        }
    weights = torch.stack([layer[:, query] for layer in seen.weights])  # (layers, heads, keys)
    for name, label in names.items():
        layer, head = map(int, str(name).split("."))
        found = re.search(r"looks at “([^“”]*)” at [\d,]+, ([\d.]+) %$", str(label))
        assert found, label
        row = weights[layer, head]
        assert within(float(found[2]) / 100, float(row.max())), label
    linking = [name for name, label in names.items() if "looks at “suitcase”" in str(label)]
    best = divmod(int(weights[:, :, key].argmax()), weights.shape[1])
    assert "{}.{}".format(*best) in linking


@pytest.mark.parametrize("way", WAYS)
def test_how_do_two_heads_differ(browser: Chromium, path: Path, seen: Seen, way: str) -> None:
    with reading(browser, path, way, "#s=previous_token&h=0.2&t=none&p=heads") as reader:
        if way == "touch":
            reader.tab("map")
        reader.press("[data-part=compare-with]")
        if way == "touch":
            reader.actions -= 1  # the press opens the heads, where one is chosen
        reader.choose_head(0, 5)
        reader.opened.wait("s.other?.layer === 0 && s.other?.head === 5")
        rows = reader.page.locator("[data-part=facts] table.changes tr").all_text_contents()
    row = next(row for row in rows if row.startswith("previous token"))
    said = [float(x) / 100 for x in re.findall(r"([\d.]+) ?%?", row.replace("previous token", ""))]
    before = seen.weights[0].diagonal(offset=-1, dim1=-2, dim2=-1).mean(-1)
    for shown, true in zip(said, (before[2], before[5]), strict=False):
        assert abs(shown - float(true)) <= 0.0051


def test_is_there_a_sink(browser: Chromium, path: Path, seen: Seen) -> None:
    with reading(browser, path, "mouse") as reader:
        cards = reader.page.locator("[data-part=standouts] button").all_inner_texts()
    shares = torch.stack([w.mean(1) for w in seen.weights]).mean((0, 1))
    said = [card for card in cards if "all queries" in card]
    assert bool(said) == (float(shares.max()) > 0.3)


@pytest.mark.parametrize("way", WAYS)
def test_how_do_two_layers_differ(browser: Chromium, path: Path, seen: Seen, way: str) -> None:
    with reading(browser, path, way, "#s=previous_token&h=1.0&t=none&p=heads") as reader:
        reader.press('[data-part=grid] [data-layer="1"]')
        reader.press("[data-part=compare-layer]")
        reader.press('[data-part=grid] [data-layer="4"]')
        reader.opened.wait("s.against === 4")
        rows = reader.page.locator("[data-part=layer] .dots p").all_text_contents()
    row = next(row for row in rows if row.startswith("previous token"))
    said = [float(x) / 100 for x in re.findall(r"([\d.]+) ?%?", row.replace("previous token", ""))]
    for shown, layer in zip(said, (1, 4), strict=False):
        true = seen.weights[layer].diagonal(offset=-1, dim1=-2, dim2=-1).mean()
        assert abs(shown - float(true)) <= 0.0051


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("typed", "begins"),
    [
        ("the train.", ["the", "train", "."]),
        ("the tram.", None),
        ("Paris, and", ["paris", ",", "and"]),
        ("CAFE", ["cafe"]),
    ],
)
def test_where_do_these_words_stand(
    browser: Chromium, path: Path, seen: Seen, way: str, typed: str, begins: list[str] | None
) -> None:
    with reading(browser, path, way, "#t=none&p=text") as reader:
        if way == "keyboard":
            reader.actions += 1
            reader.page.keyboard.press("/")
        else:
            reader.press(".search input")
        reader.actions += 1
        reader.page.keyboard.type(typed)
        reader.opened.wait(f"s.search === {typed!r}")
        reader.opened.settle()
        said = reader.text_of(".search [role=status]")
        if begins is not None:
            reader.actions += 1
            reader.page.keyboard.press("Enter")
            reader.opened.wait(f"s.token === {seen.place(*begins)}")
    assert said.startswith("1 place" if begins else "not in the text")
