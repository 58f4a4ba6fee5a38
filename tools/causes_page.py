"""Page of the causes that `headwise.compare` names: ``python -m tools.causes_page``."""

from __future__ import annotations

import inspect
from pathlib import Path

from headwise.diagnosis.causes.all_causes import CAUSES
from headwise.diagnosis.causes.cause import Cause

PAGE = Path(__file__).parents[1] / "docs" / "causes.md"
INTRODUCTION = """# Why two attentions differ

Each section is a cause that [`headwise.compare`](comparing.md) names. Its title is
what people see. It shows in stages that differ although everything before them is equal.
"""


def section(cause: Cause) -> str:
    """Return the section of one cause."""
    meaning = " ".join(inspect.getdoc(type(cause)).split("\n\n")[0].split())  # type: ignore[union-attr]
    stages = ", ".join(cause.stages)
    return f"## {cause.symptom}\n\n**{cause.name}**. {meaning}\n\nIt shows in: {stages}.\n"


def page() -> str:
    """Return the whole page, by name of the cause."""
    sections = [section(cause) for cause in sorted(CAUSES, key=lambda cause: cause.name)]
    return "\n".join([INTRODUCTION, *sections])


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    print(f"{len(CAUSES)} causes: {PAGE}")
