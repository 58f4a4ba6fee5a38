"""Table of the standard statistics in docs/statistics.md: ``python -m tools.statistics_table``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from headwise.scanning.statistics.catalogue import STANDARD

PAGE = Path(__file__).parents[1] / "docs" / "statistics.md"
EMPTY_ROWS = "padded queries, and those that may attend to nothing"  # which the page says once
BEGIN, END = "<!-- the standard set -->", "<!-- end of the standard set -->"


def table() -> str:
    """Return a table with one row for each definition."""
    return "\n".join(_rows())


def _rows() -> Iterator[str]:
    yield "| name | what is computed | unit | left out | source |"
    yield "| --- | --- | --- | --- | --- |"
    for statistic in STANDARD:
        definition = statistic.definition
        axes = f" ({', '.join(definition.axes)})" if definition.axes else ""
        cells = (
            f"`{definition.name}`{axes}",
            definition.formula,
            definition.unit,
            definition.excluded.replace(EMPTY_ROWS, "empty rows"),
            definition.source,
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def with_table(page: str) -> str:
    """Return the page with the current table."""
    pattern = re.compile(f"(?<={BEGIN}\n).*(?={END})", re.S)
    text, count = pattern.subn(lambda _: f"\n{table()}\n\n", page)
    assert count == 1, f"{PAGE.name} has {count} table markers, not one"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
