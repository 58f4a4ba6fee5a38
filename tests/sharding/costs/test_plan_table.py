"""The table of the page is the one that the plan computes."""

from __future__ import annotations

from tools.plan_table import PAGE, replace_table


def test_the_page_has_the_current_table() -> None:
    page = PAGE.read_text("utf-8")
    assert replace_table(page) == page, "run: python -m tools.plan_table"
