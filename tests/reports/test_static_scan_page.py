"""The static form of a scan: complete in itself, and its numbers are the scan's."""

import base64
import json
import math
import struct
import zlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from headwise.reports import images
from headwise.reports import page as scan_page
from headwise.reports import report as view
from headwise.reports.page import render_static as render
from headwise.reports.page import standout_cards
from headwise.reports.report import ScanReport
from headwise.scanning.result import HeadScan
from headwise.support.text import escape_unprintable
from tests.reports.html import Element, Tree, outside
from tests.reports.scans import HEADS, LAYERS, LENGTH, made_up, report
from tests.reports.viewer_scans import viewer_scan


@pytest.fixture(scope="module")
def scan() -> HeadScan:
    return made_up()


@pytest.fixture(scope="module")
def shown(scan: HeadScan) -> ScanReport:
    return report(scan)


@pytest.fixture(scope="module")
def page(shown: ScanReport) -> Element:
    return Tree(render(shown)).root


# ---- what is in it ------------------------------------------------------------------------------


def test_the_check_for_loading_can_fail() -> None:
    assert outside('<p><img src="map.png"></p>') == ["map.png"]
    assert outside("<p><script>1</script></p>") == ["script"]
    style = "<style>@import 'a'; p { background: url(b.png) } /* https://c.org */</style>"
    assert outside(style) == ["@import", "url(b.png)", "https://c.org"]


def test_nothing_is_loaded_from_outside(shown: ScanReport) -> None:
    html = render(shown)
    assert outside(html) == []
    assert "a &lt;text&gt; &amp; more" in html


def test_every_number_of_the_grid(page: Element, shown: ScanReport, scan: HeadScan) -> None:
    (table,) = page.all("table", class_="grid")
    name = standout_cards(shown)[0].reasons[0].statistic
    assert table.attributes["data-statistic"] == name
    short = view.drawn_statistic(scan, name).scale.format_short
    cells = [cell.text for cell in table.all("td")]
    assert cells == [short(value) for value in scan[name].flatten().tolist()]


def test_every_statistic_is_explained(page: Element, scan: HeadScan) -> None:
    (words,) = page.all("dl", class_="defs")
    formulas = [each.text for each in words.all("span", class_="formula")]
    assert formulas == [scan.definition(name).formula for name in scan.measured]


def test_the_table_has_every_head(page: Element, scan: HeadScan) -> None:
    (table,) = page.all("table", class_="plain")
    rows = [[cell.text for cell in row.all("td")] for row in table.all("tr")[1:]]
    names = [one.name for one in view.drawn_statistics(scan)]
    assert rows == [
        [f"{row['layer_index']}, {row['head']}", *(f"{row[name]:.4g}" for name in names)]
        for row in scan.table()
    ]


def test_every_head_has_its_map(page: Element, scan: HeadScan) -> None:
    figures = page.all("figure", class_="map")
    assert len(figures) == LAYERS * HEADS
    for place, figure in enumerate(figures):
        layer, head = divmod(place, HEADS)
        values = scan["map"][layer, head]
        assert values.shape == (37, 37)
        expected = (values.sqrt() * (scan_page.MAP_COLOURS - 1)).round().int().tolist()
        assert indices_of(figure.all("img")[0].attributes["src"]) == expected


@pytest.mark.parametrize(
    ("length", "words"),
    [
        (37, "One token a cell."),
        (256, "Tokens of a block: 4."),
        (637, "Tokens of a block: 16, the last of 13."),
    ],
)
def test_maps_say_what_a_cell_is(length: int, words: str) -> None:
    root = Tree(render(report(viewer_scan(length=length, top=0)))).root
    layers = root.all("div", class_="layer")
    assert [layer.all("p")[0].text for layer in layers] == [words] * 3


def test_a_page_needs_its_words(page: Element) -> None:
    for image in page.all("img") + page.all("svg"):
        assert image.attributes.get("alt") or image.attributes.get("aria-label")
    assert page.all("html")[0].attributes["lang"] == "en"
    assert page.all("h1")[0].text == "What 15 attention heads of made-up attend to"


# ---- heads that stand out -----------------------------------------------------------------------


def test_a_card_says_the_most_of_a_statistic(shown: ScanReport, scan: HeadScan) -> None:
    values = scan["previous_token"]
    place = int(values.argmax())
    said = {
        (card.layer, card.head): [reason.sentence for reason in card.reasons]
        for card in standout_cards(shown)
    }
    assert (
        f"puts {100 * float(values.max()):.0f} % of its weight on the token before"
        in said[divmod(place, HEADS)]
    )


def test_a_card_shows_the_neighbours_and_what_receives_most(
    shown: ScanReport, scan: HeadScan
) -> None:
    for card in standout_cards(shown):
        profile = scan["offset_profile"][card.layer, card.head]
        expected = [(n - 16, x) for n, x in enumerate(profile.float().tolist()) if x == x]
        assert card.offsets == expected
        weights = scan.layer_scans[card.layer].summaries["offset_profile"]
        inside = float(weights["sum"][card.head].sum()) / LENGTH
        assert card.outside == pytest.approx(1 - inside)
        key, token, share = scan["most_received"][card.layer, card.head, 0].tolist()
        assert card.received[0] == (f"<{int(token)}>", int(key), share)


def test_what_all_heads_have_alike_is_not_told() -> None:
    alone = made_up(layers=1, heads=1)
    assert alone.standouts() == []
    assert "Heads that stand out" not in render(report(alone))
    assert "What 1 attention head of made-up attends to" in Tree(render(report(alone))).root.text


def with_values(name: str, values: list[float], **changes: Any) -> HeadScan:
    """A layer of heads that differ in one number alone."""
    scan = made_up(layers=1, heads=len(values), names=[name])
    sums = {"sum": torch.tensor(values).double(), "count": torch.ones(len(values)).double()}
    layer = replace(scan.layer_scans[0], summaries={name: sums})
    return replace(scan, layer_scans=(layer,), **changes)


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        # A model that was never trained: one head has the most, and it says nothing.
        ("effective_keys", [26.0, 29.3, 33.0, 28.8, 29.2], []),
        ("previous_token", [0.45, 0.46, 0.44, 0.45, 0.47], []),
        # Twice the middle head's, though of next to no weight; and 5 points more, though not twice.
        ("previous_token", [0.02, 0.021, 0.02, 0.02, 0.06], []),
        ("previous_token", [0.80, 0.81, 0.82, 0.83, 0.90], []),
        (
            "previous_token",
            [0.03, 0.03, 0.03, 0.03, 0.09],
            ["puts 9 % of its weight on the token before"],
        ),
        ("distance", [10.0, 10.0, 11.0, 11.0, 21.9], []),
        (
            "distance",
            [10.0, 10.0, 11.0, 11.0, 22.0],
            ["attends furthest: 22.0 tokens away on average"],
        ),
        (
            "effective_keys",
            [1.04, 10.0, 10.0, 12.0, 24.0],
            [
                "attends most widely: to about 24 of 37 tokens",
                "attends most narrowly: to about 1.0 of 37 tokens",
            ],
        ),
        ("logsumexp", [-8.0, -8.0, -8.0, -7.0, -6.0], []),
    ],
)
def test_only_what_is_clearly_apart_from_the_middle_head_is_told(
    name: str, values: list[float], told: list[str]
) -> None:
    scan = with_values(name, values)
    assert [one.sentence for one in scan.standouts()] == told
    html = render(report(scan))
    assert ("No head stands out." in html) == (told == [])
    assert view.RULE in Tree(html).root.text


def test_of_several_texts_no_one_length_is_named() -> None:
    several = with_values("effective_keys", [2.0, 2.0, 2.0, 12.0], sequences=3)
    (one,) = several.standouts()
    assert one.sentence == "attends most widely: to about 12 tokens"
    assert one.middle == "about 2.0 tokens"


def test_what_a_token_receives_is_a_sum(page: Element, shown: ScanReport) -> None:
    rows = [row.text for table in page.all("table", class_="received") for row in table.all("tr")]
    given = [one for card in standout_cards(shown) for one in card.received]
    assert rows == [f"{weight:.1f}{name}, token {place}" for name, place, weight in given]


def test_a_token_that_cannot_be_printed_is_escaped(scan: HeadScan) -> None:
    html = render(report(scan, name_of=lambda token: f"\x17\x1b[{token}\u202e\n"))
    assert "\\x17\\x1b[" in html
    assert {char for char in html if not char.isprintable()} == {"\n"}


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("\x17", "\\x17"),
        ("\n\t", "\\n\\t"),
        ("\x85\u202e\U000e0001", "\\x85\\u202e\\U000e0001"),
        (" ", "␣"),
        (" the", " the"),
        ("é “ü” \\", "é “ü” \\"),
        ("", ""),
    ],
)
def test_everything_is_visible(text: str, seen: str) -> None:
    assert escape_unprintable(text) == seen


def test_what_has_nothing_to_show_has_no_picture(scan: HeadScan) -> None:
    names = [each.name for each in view.statistics_whose_heads_differ(scan)]
    assert {*scan.scalars} - {*names} == {"within_64", "within_256"}  # of 37 tokens
    at_most = with_values("within_16", [0.9, 0.5, 0.1], tokens=17)
    assert view.statistics_whose_heads_differ(at_most) == []  # the first and the last are 16 apart
    assert [
        one.name for one in view.statistics_whose_heads_differ(replace(at_most, tokens=18))
    ] == ["within_16"]
    same = with_values("first_token", [0.301, 0.3, 0.2999])
    assert view.statistics_whose_heads_differ(same) == []


# ---- other scans --------------------------------------------------------------------------------


def test_what_was_not_reached_is_said_in_red(scan: HeadScan) -> None:
    noted = report(replace(scan, notes=("2 layers were not seen",)), notes=("random <weights>",))
    (status,) = Tree(render(noted)).root.all("div", class_="status bad")
    assert [item.text for item in status.all("li")] == [
        "random <weights>",
        "2 layers were not seen",
    ]
    assert "status bad" not in render(report(scan))


def test_what_no_layer_has_is_said_with_the_reason(page: Element) -> None:
    assert "sink (the layer has no learned sink)" in page.text


def test_one_statistic_is_a_page_too() -> None:
    html = render(report(made_up(names=["entropy"])))
    assert Tree(html).root.all("figure", class_="map") == []
    assert len(Tree(html).root.all("table", class_="grid")) == 1


def test_many_heads_are_a_picture() -> None:
    wide = made_up(layers=2, heads=17, names=["entropy", "first_token"])
    root = Tree(render(report(wide))).root
    assert root.all("table", class_="grid") == []
    (image,) = root.all("img", class_="picture")
    name = standout_cards(report(wide))[0].reasons[0].statistic
    drawn = view.drawn_statistic(wide, name)
    expected = [[round(254 * drawn.scale.position(x)) for x in row] for row in drawn.rows]
    assert indices_of(image.attributes["src"]) == expected


def test_a_head_that_was_not_looked_at() -> None:
    scan = made_up(names=["entropy", "map"])
    last = scan.layer_scans[-1]
    part = replace(
        last,
        heads=(1, 3),
        summaries={
            name: {
                key: value[[1, 3]] if value.shape[:1] == (HEADS,) else value
                for key, value in summary.items()
            }
            for name, summary in last.summaries.items()
            if name in ("entropy", "map")
        },
        missing={
            **last.missing,
            **{n: "left out" for n in last.summaries if n not in ("entropy", "map")},
        },
    )
    fewer = replace(scan, layer_scans=(*scan.layer_scans[:-1], part))
    root = Tree(render(report(fewer))).root
    (table,) = root.all("table", class_="grid")
    row = [cell.text for cell in table.all("tr")[-1].all("td")]
    assert [place for place, text in enumerate(row) if text == "·"] == [0, 2, 4]
    assert len(root.all("figure", class_="map")) == 2 * HEADS + 2


def test_json_is_plain_and_complete(shown: ScanReport, scan: HeadScan) -> None:
    record = json.loads(json.dumps(shown.as_json(), allow_nan=False))
    assert [head["entropy"] for head in record["heads"]] == scan["entropy"].flatten().tolist()
    assert [one["name"] for one in record["statistics"]] == list(scan.scalars)
    assert record["read"]["tokens"] == LENGTH
    assert [(one["layer_index"], one["head"]) for one in record["similar_heads"]] == [
        place[1:] for place in scan.heads
    ]
    for one in record["similar_heads"]:
        assert (one["queries"], one["of_queries"]) == (LENGTH, LENGTH)
        similar = [(x["layer_index"], x["head"], x["distance"]) for x in one["similar"]]
        assert similar == scan.most_similar(one["layer_index"], one["head"])


def test_json_of_a_scan_without_distances_lists_no_similar_heads() -> None:
    assert report(made_up(names=["entropy"])).as_json()["similar_heads"] == []


# ---- numbers as few digits ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "value", "text"),
    [
        (view.Scale("weight", 0.0, 1.0), 0.784, "78"),
        (view.Scale("range", -0.5, 0.4), -0.5, "−.50"),
        (view.Scale("range", 0.0, 0.4), 0.123, ".12"),
        (view.Scale("range", 0.0, 9.9), 5.44, "5.4"),
        (view.Scale("range", 0.0, 800.0), 5.44, "5"),
        (view.Scale("range", 0.0, 9000.0), 8765.0, "9k"),
    ],
)
def test_short_numbers(scale: view.Scale, value: float, text: str) -> None:
    assert scale.format_short(value) == text


def test_scales() -> None:
    weight = view.Scale("weight", 0.0, 1.0)
    assert weight.colour(0.25) == images.viridis_colour(0.5)
    assert view.Scale("range", 2.0, 4.0).position(3.0) == 0.5
    assert view.Scale("range", 2.0, 2.0).position(2.0) == 0.5
    for scale in (weight, view.Scale("range", 2.0, 2.0)):
        assert math.isnan(scale.position(math.nan))


def test_heads_that_are_alike_have_about_one_colour() -> None:
    scale = view.drawn_statistic(
        with_values("effective_keys", [123.0, 124.0, 126.0]), "effective_keys"
    ).scale
    assert scale.high - scale.low == pytest.approx(0.1 * 124)
    assert abs(scale.position(126.0) - scale.position(123.0)) < 0.25
    entropy = view.drawn_statistic(with_values("entropy", [1.0, 2.0]), "entropy").scale
    assert (entropy.low, entropy.high) == (0.0, pytest.approx(math.log(LENGTH)))


def indices_of(address: str) -> list[list[int]]:
    """The palette indices of a PNG that was written without filters."""
    raw = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    wide, high = struct.unpack(">II", raw[16:24])
    at, packed = 8, b""
    while at < len(raw):
        (size,) = struct.unpack(">I", raw[at : at + 4])
        if raw[at + 4 : at + 8] == b"IDAT":
            packed += raw[at + 8 : at + 8 + size]
        at += 12 + size
    rows = zlib.decompress(packed)
    return [list(rows[n * (wide + 1) + 1 : (n + 1) * (wide + 1)]) for n in range(high)]
