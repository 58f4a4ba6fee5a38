"""Rich forms of results: a table of the functions that draw them, imported on first use.

Packages that measure therefore do not import packages that draw.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal

Form = Literal["text", "html", "page", "figure", "widget", "standouts"]

# (class, form) -> the function that draws a result of this class
DRAWN_BY: dict[tuple[str, Form], str] = {
    ("HeadScan", "text"): "headwise.reports.terminal.scan_text",
    ("HeadScan", "html"): "headwise.reports.static_page.render_in_frame",
    ("HeadScan", "page"): "headwise.reports.page.render_scan",
    ("HeadScan", "figure"): "headwise.reports.figures.plot_scan",
    ("HeadScan", "widget"): "headwise.reports.widget.view_scan",
    ("HeadScan", "standouts"): "headwise.reports.report.standout_heads",
    ("ScanDiff", "text"): "headwise.reports.terminal.diff_text",
    ("ScanDiff", "html"): "headwise.reports.notebook.diff_html",
    ("ScanDiff", "page"): "headwise.reports.page.render_diff",
    ("ScanDiff", "figure"): "headwise.reports.figures.plot_diff",
    ("Diagnosis", "html"): "headwise.reports.diagnosis.render_in_frame",
    ("Mask", "html"): "headwise.reports.notebook.mask_html",
    ("AttentionMatrix", "html"): "headwise.reports.notebook.matrix_html",
    ("Layout", "html"): "headwise.reports.notebook.layout_html",
}


class ShownInNotebook:
    """Base of results: a notebook shows their HTML."""

    def _repr_html_(self) -> str:
        html: str = render_form(self, "html")
        return html


class Displayed(ShownInNotebook):
    """Base of results: ``print`` shows their text, and a notebook their HTML."""

    def __str__(self) -> str:
        text: str = render_form(self, "text")
        return text


def render_form(result: object, form: Form, **options: Any) -> Any:
    """Return a result in one of its rich forms, with the options of the function that draws it.

    Raises:
        KeyError: the table has no such form of its class.
    """
    module, _, name = DRAWN_BY[type(result).__name__, form].rpartition(".")
    return getattr(import_module(module), name)(result, **options)
