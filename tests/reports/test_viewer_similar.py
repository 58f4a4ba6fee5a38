"""The most similar heads on the page: the scan's distances, and on how many queries they are."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headwise import scan as scan_model
from headwise.models.tiny import Tiny
from headwise.reports.page import save_scan_page
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.statistic import Statistic
from tests.reports.browser import Chromium, Opened, needs_a_browser
from tests.reports.test_viewer_data import blobs_of
from tests.reports.viewer_scans import viewer_report, viewer_scan

DISTANCE = "head_distance"


def without_distances(scan: HeadScan) -> HeadScan:
    """The scan as a version without the statistic made it."""
    statistics: list[Statistic] = [s for s in scan.statistics if s.definition.name != DISTANCE]
    layers = [
        replace(layer, summaries={n: x for n, x in layer.summaries.items() if n != DISTANCE})
        for layer in scan.layer_scans
    ]
    return replace(scan, statistics=tuple(statistics), layer_scans=tuple(layers))


def with_layer(scan: HeadScan, index: int, reason: str) -> HeadScan:
    """The scan with a layer that has no distances."""
    layers = list(without_distances(scan).layer_scans)
    kept = [layer if n == index else scan.layer_scans[n] for n, layer in enumerate(layers)]
    kept[index] = replace(kept[index], missing={DISTANCE: reason})
    return replace(scan, layer_scans=tuple(kept))


def sentences(scan: HeadScan, **changes: object) -> list[str]:
    meta, _ = blobs_of(viewer_report(scan, **changes))
    return [layer["similar"] for layer in meta["scans"][0]["layers"]]


# ---- the data ------------------------------------------------------------------------------------


def test_a_step_is_the_rounded_distance() -> None:
    scan = viewer_scan(layers=2, heads=3)
    layer = scan.layer_scans[1].summaries[DISTANCE]
    layer["sum"][0, 1], layer["sum"][1, 0] = 1e-9, 0.0
    layer["count"][2, 2] = layer["sum"][2, 2] = 0.0
    _, blobs = blobs_of(viewer_report(scan))
    steps = np.frombuffer(blobs["0/distances"], "<u2")
    pairs = [(row, column) for row in range(6) for column in range(row)]
    assert len(steps) == len(pairs)
    for (row, column), step in zip(pairs, steps.tolist(), strict=True):
        distance = float(scan[DISTANCE][row // 3, row % 3, column])
        if (row, column) == (5, 2):
            assert step == 65535
        elif (row, column) == (3, 1):
            assert step == 1  # more than none, however little
        else:
            assert abs(step / 65534 - distance) <= 0.5 / 65534
    assert steps[pairs.index((4, 0))] == 0


@pytest.mark.parametrize(
    ("length", "counts", "words"),
    [
        (512, {}, "on every query"),
        (512, {(1, 0, 4): 64.0}, "on 64 to 512 of 512 queries"),
        (16_384, {}, "on 256 of 16,384 queries"),
        (16_384, {(1, 0, 4): 64.0}, "on 64 to 256 of 16,384 queries"),
    ],
)
def test_the_queries_are_in_words(
    length: int, counts: dict[tuple[int, int, int], float], words: str
) -> None:
    scan = viewer_scan(layers=2, heads=3, length=length)
    for (layer, *pair), count in counts.items():
        scan.layer_scans[layer].summaries[DISTANCE]["count"][tuple(pair)] = count
    assert sentences(scan)[1] == f"Share of the weight that lies elsewhere, {words}."


def test_a_scan_without_distances_says_what_measures_them() -> None:
    old = without_distances(viewer_scan(layers=2, heads=3))
    none = "This scan holds no distances between heads."
    assert sentences(old) == 2 * [f"{none} This command measures them: headwise scan FOLDER"]
    calls = "headwise.scan(model, inputs) measures them, and headwise scan MODEL_DIR."
    assert sentences(old, command=None) == 2 * [f"{none} {calls}"]
    assert "0/distances" not in blobs_of(viewer_report(old))[1]


def test_a_layer_without_distances_says_why() -> None:
    scan = with_layer(viewer_scan(layers=2, heads=3), 0, "cross attention: no key has a position")
    assert sentences(scan) == [
        "No distances to other heads (cross attention: no key has a position).",
        "Share of the weight that lies elsewhere, on 256 of 640 queries.",
    ]


# ---- the page ------------------------------------------------------------------------------------


def shown(opened: Opened) -> list[str]:
    opened.poll("headwise.app.loaded !== null")
    return [
        choice.inner_text() for choice in opened.page.locator("[data-part=similar] button").all()
    ]


def percent(share: float) -> str:
    """As the page writes it."""
    digits = 0 if share >= 0.0995 else 1 if share >= 0.00995 else 2
    return "0 %" if share == 0 else f"{100 * share:.{digits}f} %"


@pytest.mark.slow
@needs_a_browser
def test_the_page_has_the_distances_of_the_scan(browser: Chromium, tmp_path: Path) -> None:
    torch.manual_seed(0)
    scan = scan_model(Tiny().eval(), torch.randint(256, (1, 600)))
    path = save_scan_page(tmp_path / "page.html", viewer_report(scan))
    for layer, head in ((0, 0), (2, 5), (3, 7)):
        with browser.open(path, address=f"#h={layer}.{head}") as opened:
            nearest = scan.most_similar(layer, head)
            words = [f"{x.layer}.{x.head}\n{percent(x.distance)}" for x in nearest]
            assert shown(opened) == words
            note = opened.page.inner_text("[data-part=compared]")
            assert note == "Share of the weight that lies elsewhere, on 256 of 600 queries."
            options = opened.page.locator(
                "select[aria-label='compare with'] option"
            ).all_inner_texts()
            assert options[1:] == [
                f"head {x.layer}.{x.head}, {percent(x.distance)} elsewhere" for x in nearest
            ]
            opened.page.locator("[data-part=similar] button").first.click()
            opened.wait(f"s.layer === {nearest[0].layer} && s.head === {nearest[0].head}")


@pytest.mark.slow
@needs_a_browser
def test_maps_that_look_alike_are_no_measure(browser: Chromium, tmp_path: Path) -> None:
    """Heads 0 and 3 of layer 0 have one map, and the distances of the scan are others."""
    scan = viewer_scan(layers=2, heads=4)
    first = scan.layer_scans[0].summaries
    first["map"]["sum"][3] = first["map"]["sum"][0]
    rows = first[DISTANCE]["count"][0, 3]
    first[DISTANCE]["sum"][0, 3] = first[DISTANCE]["sum"][3, 0] = rows
    with browser.open(
        save_scan_page(tmp_path / "page.html", viewer_report(scan)), address="#h=0.0"
    ) as opened:
        words = shown(opened)
        assert len(words) == 5
        assert not any(each.startswith("0.3") for each in words)


@needs_a_browser
def test_a_page_without_distances_lists_no_heads(browser: Chromium, tmp_path: Path) -> None:
    old = without_distances(viewer_scan(layers=2, heads=3))
    with browser.open(save_scan_page(tmp_path / "page.html", viewer_report(old))) as opened:
        assert shown(opened) == []
        note = opened.page.inner_text("[data-part=compared]")
        assert note.startswith("This scan holds no distances between heads.")
        assert opened.page.locator("select[aria-label='compare with'] option").count() == 1
        assert opened.complaints == []


@needs_a_browser
def test_heads_without_a_distance_are_not_listed(browser: Chromium, tmp_path: Path) -> None:
    """The heads of layer 1 read another text than those of layer 0."""
    scan = viewer_scan(layers=2, heads=3)
    across = scan.layer_scans[1].summaries[DISTANCE]
    across["sum"][:, :3] = across["count"][:, :3] = 0.0
    with browser.open(
        save_scan_page(tmp_path / "page.html", viewer_report(scan)), address="#h=0.0"
    ) as opened:
        assert sorted(each[:3] for each in shown(opened)) == ["0.1", "0.2"]
