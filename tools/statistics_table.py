"""``python -m tools.statistics_table``: the standard set, written into docs/statistics.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from headwise.scanning.statistics.catalogue import STANDARD

PAGE = Path(__file__).parents[1] / "docs" / "statistics.md"
BEGIN, END = "<!-- the standard set -->", "<!-- end of the standard set -->"


def table() -> str:
    """Every definition, one row for each."""
    return "\n".join(_rows())


def _rows() -> Iterator[str]:
    yield "| name | what is computed | unit | left out | source |"
    yield "| --- | --- | --- | --- | --- |"
    for statistic in STANDARD:
        own = statistic.definition
        axes = f" ({', '.join(own.axes)})" if own.axes else ""
        cells = (f"`{own.name}`{axes}", own.formula, own.unit, own.excluded, own.source)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def with_table(page: str) -> str:
    """The page with the table of today."""
    pattern = re.compile(f"(?<={BEGIN}\n).*(?={END})", re.S)
    found, count = pattern.subn(lambda _: f"\n{table()}\n\n", page)
    assert count == 1, f"{PAGE.name} holds the place of the table {count} times"
    return found


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
