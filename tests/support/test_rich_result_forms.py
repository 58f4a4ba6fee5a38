"""Rich forms of results, from the one table of what draws them."""

from html import unescape
from pkgutil import resolve_name

import pytest

from headwise import AttentionMatrix, Mask
from headwise.identify.results import Diagnosis
from headwise.layouts._layout import Layout
from headwise.scanning.diff import ScanDiff
from headwise.scanning.result import HeadScan
from headwise.support.lazy import DRAWN_BY, Displayed, ShownInNotebook, render_form
from tests.scanning.scans import random_scan


@pytest.mark.parametrize("target", DRAWN_BY.values())
def test_what_draws_is_there(target: str) -> None:
    assert callable(resolve_name(target))


def test_every_class_of_the_table_takes_its_forms_from_it() -> None:
    printed = {HeadScan, ScanDiff, Diagnosis}
    shown = printed | {Mask, AttentionMatrix, Layout}
    assert {name for name, _ in DRAWN_BY} == {each.__name__ for each in shown}
    assert all(issubclass(each, ShownInNotebook) for each in shown)
    assert all(issubclass(each, Displayed) for each in printed)
    texts = {name for name, form in DRAWN_BY if form == "text"}
    assert texts == {"HeadScan", "ScanDiff"}  # a diagnosis has a text of its own


def test_a_scan_has_a_plain_repr_and_rich_forms() -> None:
    scan = random_scan(layers=2)
    assert (
        repr(scan) == "HeadScan(Model, layers=2, heads=12, statistics=11, sequences=3, tokens=72)"
    )
    text = str(scan)
    assert text.startswith("Model: HeadScan of 11 statistics; 2 layers")
    assert "\n" in text
    frame = scan._repr_html_()
    assert frame.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    page = unescape(frame)
    assert "<h1" in page
    assert all(name in page for name in scan.layers)


def test_what_has_no_such_form_says_so() -> None:
    class Other(Displayed):
        pass

    with pytest.raises(KeyError, match="Other"):
        render_form(Other(), "text")
