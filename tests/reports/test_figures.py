"""Figures of a scan by matplotlib: the scan's numbers, on scales from the definitions."""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwise.errors import MissingExtraError, OptionError
from headwise.reports.figures import clearest_change, diverging
from headwise.scanning.head_scan import HeadScan
from tests.reports.viewer_scans import viewer_scan


@pytest.fixture(scope="module")
def scan() -> HeadScan:
    return viewer_scan()


def image_of(figure: Any) -> Any:
    (image,) = figure.axes[0].images
    return image


def test_a_grid_is_the_statistic(scan: HeadScan) -> None:
    image = image_of(scan.plot("grid", statistic="entropy"))
    assert np.array_equal(image.get_array(), scan["entropy"].numpy())
    assert image.norm.vmin == 0  # from the definition: 0 to ln n
    assert image.norm.vmax == pytest.approx(np.log(640))
    share = image_of(scan.plot(statistic="induction"))
    assert (share.norm.vmin, share.norm.vmax) == (0, 1)
    assert float(share.norm(0.25)) == 0.5  # the square root, as on the page


def test_a_map_has_token_axes(scan: HeadScan) -> None:
    figure = scan.plot("map", layer=2, head=3)
    image = image_of(figure)
    assert np.allclose(image.get_array(), scan["map"][2, 3].numpy())
    assert image.get_extent() == [0, 640, 640, 0]
    assert figure.axes[0].get_title() == "layer 2, head 3"


def test_a_profile_says_what_is_outside(scan: HeadScan) -> None:
    figure = scan.plot("profile", layer=0, head=1)
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert np.allclose(heights, scan["offset_profile"][0, 1].numpy(), atol=1e-6)
    assert figure.axes[0].get_ylim() == (0, 1)
    outside = 1 - float(scan["offset_profile"][0, 1].sum())
    assert figure.axes[0].get_title().endswith(f"{outside:.0%} outside")


def test_a_difference_is_centred_on_zero(scan: HeadScan) -> None:
    other = viewer_scan()
    other.layer_scans[1].summaries["induction"]["sum"][2] -= 0.5
    diff = scan.diff(other)
    assert clearest_change(diff) == "induction"
    image = image_of(diff.plot())
    assert image.norm.vmin == -image.norm.vmax == pytest.approx(-0.5)
    assert diverging(0) == (245, 245, 245)
    assert clearest_change(scan.diff(scan)) is None


def test_text_stays_text(scan: HeadScan, tmp_path: Path) -> None:
    figure = scan.plot("map")
    figure.savefig(tmp_path / "a.svg")
    assert "<text" in (tmp_path / "a.svg").read_text("utf-8")
    figure.savefig(tmp_path / "a.pdf")
    assert b"/Type3" not in (tmp_path / "a.pdf").read_bytes()
    assert figure.get_size_inches()[0] == pytest.approx(3.35)


def test_axes_of_a_figure_are_used(scan: HeadScan) -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.add_subplot()
    assert scan.plot("grid", ax=axes) is figure
    assert len(axes.images) == 1
    figure.savefig(BytesIO())


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"kind": "pie"}, "one of 'grid', 'map', 'profile'"),
    "head": ({"kind": "map", "layer": 0, "head": 9}, "layer=0, head=9"),
    "statistic": ({"statistic": "map"}, "one number for each head"),
}


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_there_is_refused(scan: HeadScan, case: str) -> None:
    options, message = WRONG[case]
    with pytest.raises(OptionError, match=message):
        scan.plot(**options)


def test_without_matplotlib(scan: HeadScan, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match="pip install matplotlib"):
        scan.plot()
