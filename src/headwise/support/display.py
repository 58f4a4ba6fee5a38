"""Rich forms of results: a table of the functions that draw them, imported on first use.

Packages that measure therefore do not import packages that draw.
"""

from __future__ import annotations

from importlib import import_module
from typing import Literal

Form = Literal["text", "html"]

# (class, form) -> the function that draws a result of this class
DRAWN_BY: dict[tuple[str, Form], str] = {
    ("HeadScan", "text"): "headwise.reports.terminal.scan_text",
    ("HeadScan", "html"): "headwise.reports.scan_page.render_in_frame",
    ("Diagnosis", "html"): "headwise.reports.diagnosis_page.render_in_frame",
}


class Displayed:
    """Base of results: ``print`` shows their text, and a notebook their page."""

    def __str__(self) -> str:
        return render(self, "text")

    def _repr_html_(self) -> str:
        return render(self, "html")


def render(result: object, form: Form) -> str:
    """Return a result in one of its rich forms.

    Raises:
        KeyError: the table has no such form of its class.
    """
    module, _, name = DRAWN_BY[type(result).__name__, form].rpartition(".")
    drawing: str = getattr(import_module(module), name)(result)
    return drawing
