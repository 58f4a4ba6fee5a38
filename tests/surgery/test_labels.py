"""Scans of what was cut: heads keep the numbers that they had."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import headwise
from headwise import Attention
from headwise.errors import OptionError
from headwise.reports.page import save_scan_page, viewer_data
from headwise.reports.report import ScanReport
from headwise.scanning import HeadScan
from headwise.scanning.importance import ablations, next_token
from headwise.surgery import Cut, LayerCut, cut_layer, cut_model
from tests.reports.browser import Chromium, needs_a_browser
from tests.surgery.families import FAMILIES, whole

IDS = torch.arange(34).reshape(2, 17)
KEPT = ([4, 5, 0, 1], [0, 3, 5])  # of the first layer, of the others


def cut_of(model: nn.Module) -> Cut:
    return Cut({name: cut.keep(kept) for (name, cut), kept in zip(whole(model), KEPT, strict=True)})


def test_a_scan_of_a_cut_model_has_the_original_numbers() -> None:
    model = FAMILIES["llama"]()
    made = cut_model(cut_of(model), model)
    scan = headwise.scan(made, IDS)
    assert [layer.heads for layer in scan.layer_scans] == [tuple(kept) for kept in KEPT]
    assert [layer.num_heads for layer in scan.layer_scans] == [6, 6]
    # The first layer has the input that it had: head 4 attends as head 4 did.
    before, after = (x["entropy"][0] for x in (headwise.scan(model, IDS), scan))
    for head in range(6):
        if head in KEPT[0]:
            torch.testing.assert_close(after[head], before[head], rtol=1e-5, atol=1e-6)
        else:
            assert after[head].isnan()


def test_heads_are_chosen_by_their_original_numbers() -> None:
    model = FAMILIES["llama"]()
    made = cut_model(cut_of(model), model)
    scan = headwise.scan(made, IDS, heads=[5, 0])
    every = headwise.scan(made, IDS)
    assert [layer.heads for layer in scan.layer_scans] == [(5, 0), (5, 0)]
    for head in (5, 0):
        assert torch.equal(scan["entropy"][:, head], every["entropy"][:, head])
    with pytest.raises(OptionError, match=r"heads among 4, 5, 0 and 1 more|heads among 4, 5, 0, 1"):
        headwise.scan(made, IDS, heads=[2])


def test_ablations_are_of_the_same_heads() -> None:
    model = FAMILIES["llama"]()
    made = cut_model(cut_of(model), model)
    effects = ablations(made, IDS, heads=[5])["ablation_zero"]
    # Without head 5 by hand: it is at the second place of the first layer.
    layer = copy.deepcopy(made)
    layer.model.layers[0].self_attn.o_proj.weight.data[:, 10:20] = 0
    losses = [next_token(m(input_ids=IDS), IDS).mean() for m in (made, layer)]
    torch.testing.assert_close(
        effects[0, 5], (losses[1] - losses[0]).detach().double(), rtol=1e-4, atol=1e-6
    )


def test_a_layer_that_was_cut_twice() -> None:
    torch.manual_seed(0)
    layer = Attention(40, 6, head_dim=10)
    made = cut_layer(LayerCut(4, 4).keep([3, 0]), cut_layer(LayerCut(6, 6).drop([0, 2]), layer))
    scan = headwise.scan(made, torch.randn(2, 9, 40))
    assert (scan.layer_scans[0].heads, scan.layer_scans[0].num_heads) == ((5, 1), 6)


def test_the_file_of_a_scan_keeps_them(tmp_path: object) -> None:
    model = FAMILIES["llama"]()
    scan = headwise.scan(cut_model(cut_of(model), model), IDS)
    path = f"{tmp_path}/scan.safetensors"
    scan.save(path)
    read = HeadScan.load(path)
    assert [layer.heads for layer in read.layer_scans] == [tuple(kept) for kept in KEPT]
    assert torch.equal(read["entropy"].nan_to_num(-1), scan["entropy"].nan_to_num(-1))


def page_of(made: nn.Module, path: Path) -> list[list[int]]:
    """Write the page of a scan, and return the numbers of the heads in its data."""
    report = ScanReport.of(headwise.scan(made, IDS))
    save_scan_page(path, report)
    return [layer["heads"] for layer in viewer_data(report)[0]["scans"][0]["layers"]]


@pytest.mark.slow
@needs_a_browser
def test_the_page_has_the_original_numbers(browser: Chromium, tmp_path: Path) -> None:
    """In the labels of cells, and above the columns where the layers have the same heads."""
    model, path = FAMILIES["llama"](), tmp_path / "page.html"
    alike = Cut({name: cut.keep([4, 5, 0, 1]) for name, cut in whole(model)})
    columns = "[...document.querySelectorAll('.numbers .column')].map((each) => each.textContent)"
    labels = "[...document.querySelectorAll('[data-id]')].map((each) => each.ariaLabel)"
    for cut, kept in ((cut_of(model), KEPT), (alike, [[4, 5, 0, 1]] * 2)):
        assert page_of(cut_model(cut, model), path) == [list(each) for each in kept]
        with browser.open(path) as opened:
            heads = [f"layer {n}, head {h}: " for n, each in enumerate(kept) for h in each]
            shown = [each for each in opened.page.evaluate(labels) if each]
            assert all(any(x.startswith(head) for x in shown) for head in heads), shown
            above = opened.page.evaluate(columns)
            assert above == (["4", "5", "0", "1"] if cut is alike else [""] * 4)


@pytest.mark.slow
@needs_a_browser
def test_a_head_stands_in_the_column_of_its_number(browser: Chromium, tmp_path: Path) -> None:
    """Where a layer lost a head, its place is empty, and the arrow keys pass over it."""
    model, path = FAMILIES["llama"](), tmp_path / "page.html"
    kept = iter(([0, 1, 4, 5], [2, 3, 4, 5]))
    page_of(cut_model(Cut({name: cut.keep(next(kept)) for name, cut in whole(model)}), model), path)
    middle = """(element) => {
      const { left, right } = element.getBoundingClientRect();
      return Math.round((left + right) / 2);
    }"""
    with browser.open(path) as opened:
        columns = opened.page.locator(".numbers .column")
        assert columns.all_text_contents() == ["0", "1", "2", "3", "4", "5"]
        for name in ("0.0", "0.4", "1.2", "1.5"):
            cell = opened.page.locator(f"[data-id='{name}']").first
            assert cell.evaluate(middle) == columns.nth(int(name[2:])).evaluate(middle), name
        opened.page.locator(".cells [data-id='0.1']").click()
        for key, name in (("ArrowRight", "0.4"), ("ArrowDown", "1.4")):
            opened.page.keyboard.press(key)
            focused = opened.page.evaluate("document.activeElement.dataset.id")
            assert focused == name, key
