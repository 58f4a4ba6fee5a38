"""The viewer with texts of several kinds: two under cross attention, several, one of groups."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise import AttentionMatrix, Mask
from headwise import scan as scan_model
from headwise.models import tiny
from headwise.reports.page import save_scan_page
from headwise.reports.report import ScanReport
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.maps import Map, TopKeysOfEveryQuery
from tests.reports.browser import Chromium, Opened, needs_a_browser
from tests.scanning.models import BATCH, LENGTH, SOURCE, llama, t5, tokens

pytestmark = needs_a_browser

STATISTICS = ["standard", Map(128), TopKeysOfEveryQuery()]
CROSS = 3  # the first layer of T5 in which queries and keys are of two texts
HALF = 0.5 / 255  # of a step of the stored square root
LEAST = 0.01  # that is lit


def page_of(scan: HeadScan, folder: Path) -> Path:
    return save_scan_page(
        folder / "page.html", ScanReport.of(scan, name_of=lambda token: f"w{token}")
    )


def entries(opened: Opened) -> dict[int, float]:
    return {each["first"]: each["weight"] for each in opened.state()["lit"]["entries"]}


def side(opened: Opened, number: int) -> Any:
    return opened.page.locator(".side").nth(number)


# ---- cross attention -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crossed() -> HeadScan:
    torch.manual_seed(3)
    inputs = {"input_ids": tokens(BATCH, SOURCE), "decoder_input_ids": tokens(BATCH, LENGTH)}
    return scan_model(t5(), inputs, statistics=STATISTICS)


@pytest.fixture
def cross(browser: Chromium, crossed: HeadScan, tmp_path: Path) -> Iterator[Opened]:
    path = page_of(crossed, tmp_path)
    with browser.open(path, address=f"#s=entropy&h={CROSS}.1&x=1") as opened:
        opened.poll("document.querySelectorAll('.side .t').length > 0")
        yield opened
        assert opened.complaints == []


def test_a_token_of_the_queries_lights_tokens_of_the_keys(cross: Opened, crossed: HeadScan) -> None:
    queries, keys = (side(cross, number) for number in (0, 1))
    assert queries.locator(".t").count() == LENGTH
    assert keys.locator(".t").count() == SOURCE
    queries.locator('[data-t="5"]').click()
    cross.wait("s.token === 5 && s.direction === 'keys' && s.lit.exact === 'top'")
    summary = crossed.layer_scans[CROSS].summaries["top_keys_of_every_query"]
    row = LENGTH + 5  # of the second sequence
    expected = dict(
        zip(summary["key"][1, row].tolist(), summary["share"][1, row].tolist(), strict=True)
    )
    shown = entries(cross)
    for key, share in expected.items():
        assert shown.get(key, 0.0) ** 0.5 == pytest.approx(share**0.5, abs=HALF + 1e-6)
    lit = [key for key, weight in shown.items() if weight >= LEAST]
    assert keys.locator(".t[class*=lit-]").count() == len(lit) > 0
    assert queries.locator(".t[class*=lit-]").count() == 0
    assert queries.locator(".t.pinned").inner_text() == f"w{crossed.texts[1].ids[row]}"


@pytest.mark.slow
def test_a_token_of_the_keys_lights_tokens_of_the_queries(cross: Opened) -> None:
    queries, keys = (side(cross, number) for number in (0, 1))
    keys.locator('[data-t="4"]').hover()
    cross.poll(
        "headwise.app.light.lights.what === 'queries' && headwise.app.light.lights.token === 4"
    )
    lit = [query for query, weight in entries(cross).items() if weight >= LEAST]
    assert queries.locator(".t[class*=lit-]").count() == len(lit)
    assert keys.locator(".t[class*=lit-]").count() == 0
    assert keys.locator(".t.pinned").count() == 1


@pytest.mark.slow
def test_axes_name_only_tokens_that_are_there(cross: Opened, crossed: HeadScan) -> None:
    ids = crossed.texts[0].ids[SOURCE:].tolist()  # of the second sequence
    words = cross.page.locator(".axis").first.locator("css=text").all_text_contents()
    assert words
    assert set(words) <= {f"w{token}" for token in ids}


def test_self_attention_has_one_text(cross: Opened) -> None:
    cross.do("headwise.app.choose({ layer: 0, head: 1 })", "s.layer === 0")
    assert side(cross, 0).is_visible()
    assert not side(cross, 1).is_visible()
    assert cross.page.locator("[data-direction]:visible").count() == 2


@pytest.mark.slow
def test_at_most_15_tab_stops_on_the_fullest_page(browser: Chromium, tmp_path: Path) -> None:
    """Of two models, each with two scans of several texts: the page with most to choose."""
    texts = [tiny.encode(text)[None] for text in ("one text", "another text")]
    scan = scan_model(tiny.load(), texts, statistics=STATISTICS[:2])
    report = ScanReport.of(scan, name_of=lambda token: f"w{token}")
    report = replace(report, second=scan, command="headwise scan DIR --top-keys {heads}")
    path = save_scan_page(tmp_path / "page.html", report, report)
    with browser.open(path) as opened:
        opened.poll("document.querySelector('.t') !== null")
        stops = []
        while not opened.page.evaluate("document.activeElement.closest('.scroller') !== null"):
            opened.page.keyboard.press("Tab")
            stops.append(opened.page.evaluate("document.activeElement.outerHTML.slice(0, 90)"))
            assert len(stops) <= 16, stops
        assert len(stops) > 12


# ---- several texts, groups, random weights -------------------------------------------------------


@pytest.mark.slow
def test_several_texts_to_choose_from(browser: Chromium, tmp_path: Path) -> None:
    words = ("the quick brown fox jumps. " * 3, "Alice was tired. " * 2, "one")
    texts = [tiny.encode(text)[None] for text in words]
    scan = scan_model(tiny.load(), texts, statistics=STATISTICS)
    with browser.open(page_of(scan, tmp_path), address="#s=entropy&h=2.0&t=3") as opened:
        page = opened.page
        names = page.locator('select[aria-label="text"] option').all_inner_texts()
        assert names == [f"text {n}, {ids.numel()} tokens" for n, ids in enumerate(texts)]
        page.select_option('select[aria-label="text"]', "1")
        opened.wait("s.sequence === 1 && s.token === null")
        opened.poll(f"document.querySelectorAll('.side .t').length === {texts[1].numel()}")
        page.click('[data-t="20"]')
        opened.wait("s.token === 20")
        summary = scan.layer_scans[2].summaries["top_keys_of_every_query"]
        row = texts[0].numel() + 20
        strong = summary["key"][0, row][summary["share"][0, row] > 0.01].tolist()
        assert set(strong) <= set(entries(opened))
        assert "mean of 3 sequences" in page.inner_text("[data-part=badge]")
        assert opened.complaints == []


@pytest.mark.slow
def test_heads_that_share_keys(browser: Chromium, tmp_path: Path) -> None:
    ids = tokens(1, LENGTH)
    scan = scan_model(llama(), {"input_ids": ids}, statistics=STATISTICS)
    with browser.open(page_of(scan, tmp_path)) as opened:
        assert opened.page.locator("[data-part=grid] .cell").count() == 2 * 4
        opened.do("headwise.app.choose({ layer: 1, head: 3 })", "s.head === 3")
        opened.do("headwise.app.pin(9)", "s.token === 9 && s.lit.exact === 'map'")
        summary = scan.layer_scans[1].summaries["top_keys_of_every_query"]
        assert next(iter(entries(opened))) == int(summary["key"][3, 9, 0])
        assert opened.complaints == []


def test_random_weights_look_alike(browser: Chromium, tmp_path: Path) -> None:
    """Heads of nearly equal weights, as of a model that was never trained."""
    generator = torch.Generator().manual_seed(0)
    q, k = (0.02 * torch.randn(1, 12, 60, 8, generator=generator) for _ in range(2))
    matrix = AttentionMatrix(q, k, mask=Mask.causal())
    scan = scan_model(matrix, torch.zeros_like(q), statistics=["standard"])
    with browser.open(page_of(scan, tmp_path)) as opened:
        assert "No head stands out." in opened.page.inner_text("[data-part=standouts]")
        opened.page.select_option('[aria-label="statistic"]', "effective_keys")
        opened.wait("s.statistic === 'effective_keys'")
        colours = opened.page.evaluate(
            "[...document.querySelectorAll('.cell')].map((cell) =>"
            " getComputedStyle(cell).backgroundColor.match(/\\d+/g).map(Number))"
        )
        spread = torch.tensor(colours).float()
        assert (spread.amax(0) - spread.amin(0)).max() < 16  # of 255
