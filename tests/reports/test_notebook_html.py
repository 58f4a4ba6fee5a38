"""What a notebook shows of single results, and their plain reprs."""

import base64
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwise import AttentionMatrix, Mask
from headwise.layouts.registry import layout
from headwise.reports import notebook
from headwise.reports.report import NO_CHANGE
from tests.reports.html import Tree, outside
from tests.reports.viewer_scans import viewer_scan


def test_plain_reprs() -> None:
    scan = viewer_scan()
    assert repr(scan.layer_scans[0]) == (
        "LayerScan('h.0.attn', self attention, heads=5, calls=1, statistics=10)"
    )
    diff = scan.diff(viewer_scan())
    assert repr(diff) == "ScanDiff(MadeUp, layers=3, heads=15, statistics=8)"
    assert " ".join(str(diff).split()) == f"{diff!r}. {NO_CHANGE}"
    other = viewer_scan()
    other.layer_scans[1].summaries["induction"]["sum"][2] -= 0.5
    last = str(scan.diff(other)).splitlines()[-1]
    assert last.strip() == "induction of layer 1, head 2: 92 % before, 42 % after"


def test_a_difference_is_a_signed_grid() -> None:
    scan, other = viewer_scan(), viewer_scan()
    other.layer_scans[1].summaries["induction"]["sum"][2] -= 0.5
    html = scan.diff(other)._repr_html_()
    assert outside(html) == []
    cells = [cell.text for cell in Tree(html).root.all("table")[0].all("td")]
    assert cells[5 + 2] == "−0.5"
    assert set(cells) == {"−0.5", "0"}
    changes = [item.text for item in Tree(html).root.all("li")]
    assert changes == ["induction of layer 1, head 2: 92 % before, 42 % after"]
    assert NO_CHANGE in scan.diff(scan)._repr_html_()


def test_a_small_change_is_pale() -> None:
    scan, other = viewer_scan(), viewer_scan()
    other.layer_scans[1].summaries["induction"]["sum"][2] -= 1e-3
    assert "Colours: −0.05 to 0.05" in scan.diff(other)._repr_html_()


def test_a_mask_is_drawn() -> None:
    html = (Mask.causal() & Mask.lengths(torch.tensor([5, 9])))._repr_html_()
    assert outside(html) == []
    assert "16 queries by 16 keys" in html
    assert Tree(html).root.all("img")[0].attributes["src"].startswith("data:image/png")
    assert torch.equal(Mask.causal().dense(4), torch.ones(4, 4).tril().bool())
    wide = Mask.may_attend(torch.ones(1, 2**23, dtype=torch.bool), axes="batch keys")
    assert "img" not in wide._repr_html_()
    empty = Mask.may_attend(torch.ones(0, 5, 5, dtype=torch.bool), axes="batch queries keys")
    assert "img" not in empty._repr_html_()


def test_a_large_mask_is_a_small_picture_of_its_shape() -> None:
    wide = Mask.may_attend(torch.ones(500, 2000).tril().bool(), axes="queries keys")
    (picture,) = Tree(wide._repr_html_()).root.all("img")
    assert "width:96px;height:24px" in picture.attributes["style"]
    png = base64.b64decode(picture.attributes["src"].partition(",")[2])
    assert struct.unpack(">II", png[16:24]) == (96, 96)


def test_a_matrix_is_a_few_thumbnails(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = (torch.randn(1, 12, 50, 7) for _ in range(2))
    matrix = AttentionMatrix(q, k)
    html = matrix._repr_html_()
    assert len(Tree(html).root.all("img")) == notebook.MOST_HEADS
    assert "queries=50" in html
    monkeypatch.setattr(notebook, "MOST_WORK", 1)
    assert "img" not in matrix._repr_html_()


def test_a_layout_is_a_table() -> None:
    gpt2 = layout("gpt2")
    rows = Tree(gpt2._repr_html_()).root.all("tr")[1:]
    assert [row.all("td")[0].text for row in rows] == list(gpt2.tensors)
    hostile = replace(gpt2, source="<script>")
    assert "<script>" not in hostile._repr_html_()


def test_pages_are_written_from_python(tmp_path: Path) -> None:
    scan = viewer_scan()
    page = scan.save_page(tmp_path / "scan.html", title="mine", name_of=lambda token: f"<{token}>")
    assert "What 15 attention heads of mine" in page.read_text("utf-8")
    both = scan.diff(viewer_scan()).save_page(tmp_path / "both.html", names=("epoch 1", "epoch 2"))
    assert '"name":"epoch 2"' in both.read_text("utf-8")
