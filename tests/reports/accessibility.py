"""What is wrong with an open page for readers without a mouse, or without good eyes."""

from importlib.resources import files
from typing import Any

from tests.reports.browser import Opened

AXE = files("axe_playwright_python").joinpath("axe.min.js")


def violations(opened: Opened) -> list[str]:
    """What axe finds: the rule, and the first element that breaks it."""
    opened.page.evaluate(AXE.read_text("utf-8"))
    found: dict[str, Any] = opened.page.evaluate("axe.run({ resultTypes: ['violations'] })")
    return [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in found["violations"]]


def small_targets(opened: Opened, least: int) -> list[str]:
    """What can be pressed and is less than some pixels wide or high.

    A head of the grid may be 24 pixels wide, so that all of a layer are in sight.
    """
    small: list[str] = opened.page.evaluate(
        """(least) => [...document.querySelectorAll("button, select, input, summary")]
          .filter((e) => e.checkVisibility() && e.type !== "checkbox")
          .map((e) => [e.outerHTML.slice(0, 80), e.getBoundingClientRect(),
            e.matches(".cells.layers .cell") ? 24 : least])
          .filter(([, box, wide]) => box.width < wide - 0.5 || box.height < least - 0.5)
          .map(([html, box]) => `${html} ${box.width} x ${box.height}`)""",
        least,
    )
    return small
