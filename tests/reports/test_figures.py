"""Figures of a scan by matplotlib: the scan's numbers, on scales from the definitions."""

import pickle
import re
import sys
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.testing.compare import compare_images

from headwise import scan as scan_model
from headwise.errors import MissingExtraError, OptionError
from headwise.models import tiny
from headwise.reports import report as view
from headwise.reports.report import diverging_colour, most_changed_statistic
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.maps import Map, TopKeysOfEveryQuery
from tests.reports.viewer_scans import WORDS, viewer_scan
from tools.viewer_pictures import FIGURE, save_figure

SHARES = ["0 %", "10 %", "25 %", "50 %", "100 %"]


def image_of(figure: Any) -> Any:
    (image,) = figure.axes[0].images
    return image


def label_of(figure: Any) -> str:
    """The label of the colour bar, which may have several lines."""
    return str(figure.axes[1].get_ylabel().replace("\n", " "))


def title_of(figure: Any) -> str:
    return " ".join(figure.get_suptitle().split())


def test_a_grid_is_the_statistic(scan: HeadScan) -> None:
    image = image_of(scan.plot("grid", statistic="entropy"))
    assert np.array_equal(image.get_array(), scan["entropy"].numpy())
    assert image.norm.vmin == 0  # from the definition: 0 to ln n
    assert image.norm.vmax == pytest.approx(np.log(640))
    figure = scan.plot(statistic="induction")
    assert title_of(figure) == "MadeUp: Induction: weight on what followed earlier copies"
    assert [each.get_text() for each in figure.axes[1].get_yticklabels()] == SHARES
    share = image_of(figure)
    assert (share.norm.vmin, share.norm.vmax) == (0, 1)
    assert float(share.norm(0.25)) == 0.5  # the square root, as on the page


def test_a_map_has_token_axes(scan: HeadScan) -> None:
    figure = scan.plot("map", layer=2, head=3)
    image = image_of(figure)
    assert np.allclose(image.get_array(), scan["map"][2, 3].numpy())
    assert image.get_extent() == [-0.5, 639.5, 639.5, -0.5]
    assert title_of(figure) == "MadeUp: layer 2, head 3"
    assert [each.get_text() for each in figure.axes[1].get_yticklabels()] == [
        "0 %",
        "1 %",
        *SHARES[1:],
    ]
    assert label_of(figure) == "weight of a block of 8 tokens"


def test_a_map_of_a_short_text_names_its_tokens() -> None:
    short = scan_model(tiny.load(), tiny.encode("a $x$ b")[None], statistics=["map"])
    figure = short.plot("map", layer=1, head=2, name_of=lambda token: chr(token)[:1])
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[1:] == ["a", "␣", r"\$", "x", r"\$", "␣", "b"]
    assert figure.axes[1].get_ylabel() == "weight"
    figure.savefig(BytesIO(), format="svg")


def test_a_map_of_texts_of_several_lengths_is_by_position() -> None:
    texts = [tiny.encode(text)[None] for text in ("one text", "a longer text")]
    figure = scan_model(tiny.load(), texts, statistics=["map"]).plot("map")
    last = texts[1].numel() - 0.5
    assert image_of(figure).get_extent() == [-0.5, last, last, -0.5]
    assert figure.axes[0].get_xlabel() == "key"
    assert figure.axes[1].get_ylabel() == "weight, mean of 2 texts"


def test_a_shorter_last_block_is_marked() -> None:
    whole, short = (viewer_scan(length=length).plot("map", layer=0) for length in (640, 637))
    assert not list(whole.axes[0].lines)
    assert image_of(short).get_extent() == [-0.5, 639.5, 639.5, -0.5]
    assert label_of(short) == "weight of a block of 8 tokens, the last of 5"
    across, down = short.axes[0].lines
    assert [*across.get_xdata()] == [*down.get_ydata()] == [631.5, 639.5]


def test_a_map_by_shares_has_its_own_blocks() -> None:
    """Of a scan of an earlier version."""
    figure = viewer_scan(length=600, by_shares=True).plot("map", layer=0)
    assert np.allclose(image_of(figure).get_extent(), [-0.5, 599.5, 599.5, -0.5])
    assert label_of(figure) == "weight of a block of 4 to 5 tokens"
    assert not list(figure.axes[0].lines)


def test_a_part_of_a_map_has_whole_blocks_and_words(scan: HeadScan) -> None:
    part: dict[str, Any] = {"queries": range(403, 418), "keys": range(391, 640)}
    figure = scan.plot("map", layer=2, head=3, **part, name_of=WORDS.__getitem__)
    image = image_of(figure)
    assert np.allclose(image.get_array(), scan["map"][2, 3, 50:53, 48:].numpy())
    assert image.get_extent() == [383.5, 639.5, 423.5, 399.5]
    ids = scan.texts[0].ids.tolist()
    labels = figure.axes[0].get_yticklabels()
    assert [each.get_text() for each in labels] == [
        WORDS[n].strip(" ").replace("\n", "\\n") for n in ids[400:424]
    ]
    assert list(figure.axes[0].get_yticks()) == list(range(400, 424))
    numbers = [each.get_text() for each in figure.axes[0].get_xticklabels()]
    assert set(numbers) <= {str(number) for number in range(0, 1000, 25)}


def test_words_that_were_written_need_no_names() -> None:
    text = "Café au lait, Café noir"
    spans = [(place, place + 1) for place in range(len(text))]
    ids = torch.arange(3, 3 + len(text))[None]
    written = scan_model(tiny.load(), ids, statistics=["map"], written=(text, spans))
    labels = written.plot("map", layer=0, head=0).axes[0].get_xticklabels()
    assert "".join(label.get_text() for label in labels) == text.replace(" ", "␣")


# ---- a token ------------------------------------------------------------------------------------


def bars_of(figure: Any) -> list[tuple[str, Any]]:
    axes = figure.axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    return list(zip(names, [bar.get_width() for bar in axes.patches], strict=True))


def test_a_token_of_a_head_with_top_keys(scan: HeadScan) -> None:
    summary = scan.layer_scans[1].summaries["top_keys_of_every_query"]
    keys, shares = (summary[name][0, 300].tolist() for name in ("key", "share"))
    ids = scan.texts[0].ids.tolist()
    figure = scan.plot("token", layer=1, head=0, token=300, name_of=WORDS.__getitem__)
    pairs = [pair for pair in zip(keys, shares, strict=True) if pair[1] >= 0.01]
    assert bars_of(figure) == [
        (f"“{WORDS[ids[key]].strip()}” at {key:,}", pytest.approx(share)) for key, share in pairs
    ]
    total = f"{100 * sum(shares):.0f} % of all"
    assert title_of(figure) == (
        f"MadeUp: layer 1, head 0: what “{WORDS[ids[300]].strip()}” at 300 looks at; "
        f"its 4 largest weights among its top 4, {total}"
    )


def test_the_queries_that_look_at_a_token(scan: HeadScan) -> None:
    summary = scan.layer_scans[1].summaries["top_keys_of_every_query"]
    given = summary["share"][0].where(summary["key"][0] == 3, 0).amax(-1)
    expected = {f"token {n}": weight for n, weight in enumerate(given.tolist()) if weight >= 0.01}
    figure = scan.plot("token", layer=1, head=0, token=3, direction="queries")
    bars = bars_of(figure)
    assert dict(bars) == {name: pytest.approx(expected[name]) for name, _ in bars}
    assert len(bars) == min(16, len(expected)) > 1
    assert sorted(bars, key=lambda bar: -bar[1]) == bars
    assert "what looks at token 3; the queries that have it among their top 4" in title_of(figure)


@pytest.mark.parametrize("direction", ["keys", "queries"])
def test_a_map_of_single_tokens_has_every_weight(direction: Any) -> None:
    ids = tiny.encode("the quick brown fox, the quick")[None, :31]
    ids = torch.nn.functional.pad(ids, (0, 32 - ids.shape[1]), value=7)
    whole = scan_model(tiny.load(), ids, statistics=[Map(32), TopKeysOfEveryQuery()])
    values = whole["map"][0, 1]
    row = values[21] if direction == "keys" else values[:, 9]
    token = 21 if direction == "keys" else 9
    figure = whole.plot("token", layer=0, head=1, token=token, direction=direction)
    order = [n for n in row.argsort(descending=True).tolist() if row[n] >= 0.01][:16]
    assert bars_of(figure) == [(f"token {n}", pytest.approx(float(row[n]))) for n in order]
    marked = row[row >= 0.01]
    part = 100 * float(marked.sum() / row.sum())
    words = f"its {len(marked)} largest weights, {part:.0f} % of all"
    assert title_of(figure).endswith(
        words + (" that it receives" if direction == "queries" else "")
    )
    assert len(marked) > 4


def test_small_weights_have_some_bars(scan: HeadScan) -> None:
    even = viewer_scan()
    summary = even.layer_scans[1].summaries["top_keys_of_every_query"]
    summary["share"][0, 300] = torch.tensor([0.008, 0.006, 0.004, 0.002])
    figure = even.plot("token", layer=1, head=0, token=300)
    assert [width for _, width in bars_of(figure)] == pytest.approx([0.008, 0.006, 0.004, 0.002])
    assert figure.axes[0].texts[0].get_text() == "0.80 %"


def test_a_layer_may_be_named(scan: HeadScan) -> None:
    for standout in scan.standouts()[:2]:
        head = standout.head
        for kind in ("map", "profile"):
            by_name = scan.plot(kind, layer=head.layer, head=head.head)
            by_number = scan.plot(kind, layer=head.layer_index, head=head.head)
            assert title_of(by_name) == title_of(by_number)
    assert "layer 1, head 0" in title_of(scan.plot("map", layer=scan.layers[1]))


def test_a_profile_says_what_is_outside(scan: HeadScan) -> None:
    figure = scan.plot("profile", layer=0, head=1)
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert np.allclose(heights, scan["offset_profile"][0, 1].numpy(), atol=1e-6)
    assert figure.axes[0].get_ylim() == (0, 1)
    outside = 1 - float(scan["offset_profile"][0, 1].sum())
    assert f"{100 * outside:.0f} % of the weight lies outside" in title_of(figure)


def test_a_profile_of_a_causal_head_ends_at_the_query(scan: HeadScan) -> None:
    causal = viewer_scan()
    causal.layer_scans[0].summaries["offset_profile"]["sum"][1, 17:] = 0
    assert len(causal.plot("profile", layer=0, head=1).axes[0].patches) == 17
    assert len(scan.plot("profile", layer=0, head=1).axes[0].patches) == 33


def test_a_difference_is_centred_on_zero(scan: HeadScan) -> None:
    other = viewer_scan()
    other.layer_scans[1].summaries["induction"]["sum"][2] -= 0.5
    diff = scan.diff(other)
    assert most_changed_statistic(diff) == "induction"
    image = image_of(diff.plot())
    assert image.norm.vmin == -image.norm.vmax == pytest.approx(-0.5)
    assert diverging_colour(0) == (245, 245, 245)
    assert most_changed_statistic(scan.diff(scan)) is None
    total = diff.plot("apart")
    assert np.allclose(image_of(total).get_array(), diff.apart.numpy())
    assert title_of(total) == "MadeUp: Total change"


def test_a_small_change_is_pale(scan: HeadScan) -> None:
    other = viewer_scan()
    other.layer_scans[1].summaries["induction"]["sum"][2] -= 1e-6
    other.layer_scans[0].summaries["entropy"]["sum"][2] += 1e-6
    diff = scan.diff(other)
    assert image_of(diff.plot("induction")).norm.vmax == view.LEAST_SHARE
    middle = view.drawn_statistic(scan, "entropy").middle
    assert image_of(diff.plot("entropy")).norm.vmax == pytest.approx(0.1 * middle)


def text_of_pdf(pdf: bytes) -> str:
    """The letters that the operators of a page show, without the kerning between them."""
    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", pdf, re.DOTALL)
    pages = b"".join(zlib.decompress(each) for each in streams if each.startswith(b"x"))
    shown = b"".join(re.findall(rb"\(((?:[^()\\]|\\.)*)\)", pages))
    return shown.replace(b"\0", b"").decode("latin-1")  # two bytes a letter


@pytest.mark.slow
def test_text_stays_text(scan: HeadScan, tmp_path: Path) -> None:
    figure = scan.plot("map")
    figure.savefig(tmp_path / "a.svg")
    assert "<text" in (tmp_path / "a.svg").read_text("utf-8")
    token = scan.plot("token", layer=1, head=0, token=5)
    for each, word in ((figure, "layer"), (token, "looks")):
        each.savefig(tmp_path / "a.pdf")
        pdf = (tmp_path / "a.pdf").read_bytes()
        assert b"/Type3" not in pdf
        assert word in text_of_pdf(pdf)
    assert figure.get_size_inches()[0] == pytest.approx(3.35)


def test_a_label_is_inside_its_figure() -> None:
    figure = viewer_scan(layers=2).plot("grid", statistic="previous_token")
    figure.savefig(BytesIO())
    for axes in figure.axes:
        box = axes.get_tightbbox().transformed(figure.transFigure.inverted())
        assert 0 <= box.y0 < box.y1 <= 1
        assert 0 <= box.x0 < box.x1 <= 1


def test_a_notebook_shows_a_figure_without_pyplot(scan: HeadScan) -> None:
    assert scan.plot("map")._repr_png_().startswith(b"\x89PNG")
    again = pickle.loads(pickle.dumps(scan.plot("profile")))
    assert again.axes[0].get_ylim() == (0, 1)


def test_axes_of_a_figure_are_used(scan: HeadScan) -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.add_subplot()
    assert scan.plot("grid", ax=axes) is figure
    assert len(axes.images) == 1
    figure.savefig(BytesIO())


def test_the_picture_of_the_documentation(tmp_path: Path) -> None:
    drawn, kept = tmp_path / "figure.png", tmp_path / "kept.png"
    save_figure(drawn)
    kept.write_bytes(FIGURE.read_bytes())
    assert compare_images(str(kept), str(drawn), tol=5) is None


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"kind": "pie"}, "one of 'grid', 'map', 'profile', 'token'"),
    "no token": ({"kind": "token", "layer": 1, "head": 0}, "token=None"),
    "token": ({"kind": "token", "layer": 1, "head": 0, "token": 640}, "token=640"),
    "direction": (
        {"kind": "token", "layer": 1, "head": 0, "token": 6, "direction": "values"},
        "direction='values'",
    ),
    "no single tokens": (
        {"kind": "token", "layer": 1, "head": 3, "token": 6},
        "no single tokens of layer 1, head 3",
    ),
    "queries": ({"kind": "map", "queries": range(630, 641)}, "queries=range.630, 641."),
    "step": ({"kind": "map", "keys": range(0, 64, 2)}, "keys=range.0, 64, 2."),
    "head": ({"kind": "map", "layer": 0, "head": 9}, "layer=0, head=9"),
    "layer": ({"kind": "map", "layer": "h.0", "head": 0}, "layer='h.0', head=0"),
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
