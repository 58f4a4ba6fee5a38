"""Pages of the causes that `headwise.compare` names: ``python -m tools.causes_page``.

Each page is made of the class of a cause: its symptom, its docstring with the sections below, its
stages, and the docstring of its variants.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from headwise.diagnosis.causes.catalogue import CAUSES
from headwise.diagnosis.causes.cause import (
    CONFUSED,
    PAGES,
    REPAIR,
    RIGHT,
    WRONG,
    Cause,
    cause_page_path,
    describe_cause,
)

INDEX = "index.md"
INTRODUCTION = f"""# Why two attentions differ

`headwise.compare` names these {len(CAUSES)} causes. A cause is named only if it
explains a stage to rounding, in every head and every entry.

| what people see | cause | stages in which it shows |
| --- | --- | --- |
"""


def pages() -> dict[str, str]:
    """Return the file's name -> its text, for the index and for each cause."""
    by_symptom = sorted(CAUSES, key=lambda cause: cause.symptom.lower())
    index = INTRODUCTION + "".join(map(row, by_symptom))
    return {INDEX: index} | {file_name(cause.name): page(cause) for cause in CAUSES}


def file_name(cause: str) -> str:
    """Return the name of the page's file."""
    return Path(cause_page_path(cause)).name


def row(cause: Cause) -> str:
    """Return the row of a cause in the index."""
    return f"| {cause.symptom} | {link(cause.name)} | {', '.join(cause.stages)} |\n"


def page(cause: Cause) -> str:
    """Return the page of a cause."""
    return "\n\n".join([f"# {cause.symptom}", *_parts(cause)]) + "\n"


def _parts(cause: Cause) -> Iterator[str]:
    description = describe_cause(cause)
    sections = description.sections
    yield f"`compare` names this cause **{cause.name}**. {description.meaning}"
    if description.details:
        yield description.details
    if WRONG in sections:
        wrong, right = (sections[name].splitlines() for name in (WRONG, RIGHT))
        lines = [*(f"- {line}" for line in wrong), *(f"+ {line}" for line in right)]
        yield "\n".join(["```diff", *lines, "```"])
    yield "## Stages"
    yield (f"The cause shows in: {', '.join(cause.stages)}. The stages before agree.")
    yield f"## Search\n\n{searched(cause)}"
    if REPAIR in sections:
        yield f"## Repair\n\n{sections[REPAIR]}"
    if CONFUSED in sections:
        yield "## Causes that look the same"
        yield "On some inputs, or with some weights, these are the same function:"
        others = re.findall(r"^(\S.*?): (.*(?:\n .*)*)", sections[CONFUSED], re.M)
        yield "\n".join(f"- {link(name)}: {' '.join(when.split())}" for name, when in others)
    yield f"[All causes]({INDEX})"


def link(name: str) -> str:
    """Return a link to the page of a cause, from another page of causes."""
    if name not in {cause.name for cause in CAUSES}:
        raise KeyError(f"no cause has the name {name!r}")
    return f"[{name}]({file_name(name)})"


def searched(cause: Cause) -> str:
    """Return the sentences about the variants that are tried, and the fit."""
    variants = type(cause).variants
    first, *others = (inspect.getdoc(variants) or "").split("\n\n")
    constants = vars(sys.modules[type(cause).__module__])
    words = re.sub(r"\b[A-Z][A-Z_]{2,}\b", lambda m: str(constants.get(m[0], m[0])), first)
    sentences = [f"`compare` tries {words.removeprefix('Return ')}", *others]
    if "Family(" in inspect.getsource(variants):
        sentences.append("The number is fitted to the recorded stage by the Gauss-Newton method.")
    return " ".join(" ".join(sentences).split())


def write(folder: Path) -> None:
    """Write all pages, and remove those of causes that are no more."""
    current = pages()
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.md"):
        if path.name not in current:
            path.unlink()
    for name, text in current.items():
        folder.joinpath(name).write_text(text, "utf-8")


if __name__ == "__main__":
    write(PAGES)
    print(f"{len(CAUSES)} causes: {PAGES / INDEX}")
