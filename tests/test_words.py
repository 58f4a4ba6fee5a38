"""README and documentation are short, and so are their sentences."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from tests.root import ROOT

# The log is dense: its lines are counted, not its words.
LOG = ROOT / "docs" / "log.md"
PAGES = [
    ROOT / "README.md",
    *(path for path in sorted(ROOT.joinpath("docs").rglob("*.md")) if path != LOG),
]
MOST_WORDS_OF_THE_README = 700  # outside code
INSTALLED_BY_LINE = 25
PICTURED_BY_LINE = 40
MOST_LINES_OF_THE_LOG = 300
LONGEST_LINE_OF_THE_LOG = 205
MOST_WORDS = 35
MOST_WORDS_IN_THE_MIDDLE = 18

NO_CODE = re.compile(r"^ *```.*?^ *```$", re.M | re.S)
ABBREVIATIONS = re.compile(r"\b(et al|e\.g|i\.e|vs|J|Sci|Comput)\. ")
# A row of a table, a heading, a directive of the reference with its options, a title in YAML.
NO_PROSE = re.compile(r"^(\||#|:::| {4,}[\w-]+:|---).*$", re.M)


def prose(page: str) -> str:
    """The page without code, tables, headings, pictures and markup."""
    text = re.sub(r"\A---\n.*?\n---\n", "", page, flags=re.S)
    text = NO_CODE.sub("\n", text)
    text = re.sub(r"<!--.*?-->|<[^>\n]*>|!\[[^\]]*\]\([^)]*\)", "", text, flags=re.S)
    text = NO_PROSE.sub("\n", text)
    text = re.sub(r"(`+).+?\1", "Code", text, flags=re.S)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^ *(?:[-*+]|\d+\.) ", "\n\n", text, flags=re.M)
    return ABBREVIATIONS.sub(r"\1 ", text.replace("**", ""))


def sentences(page: str) -> Iterator[list[str]]:
    """The words of each sentence. A paragraph or an item of a list ends one as well."""
    for paragraph in re.split(r"\n\s*\n", prose(page)):
        line = " ".join(paragraph.split())
        for sentence in re.split(r"(?<=[.?!])[\"')*_]*\s+(?=[\"'(*_]*[A-Z0-9])", line):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            if len(words) > 1:
                yield words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page: Path) -> None:
    lengths = [len(words) for words in sentences(page.read_text("utf-8"))]
    assert median(lengths or [0]) <= MOST_WORDS_IN_THE_MIDDLE
    long = [words for words in sentences(page.read_text("utf-8")) if len(words) > MOST_WORDS]
    assert [" ".join(words) for words in long] == []


def test_the_readme_is_short_and_begins_with_the_installation_and_a_picture() -> None:
    text = ROOT.joinpath("README.md").read_text("utf-8")
    assert len(NO_CODE.sub("", text).split()) <= MOST_WORDS_OF_THE_README
    lines = text.splitlines()
    first = "\n".join(lines[:INSTALLED_BY_LINE])
    for command in ("pip install .", "headwise scan --demo"):
        assert command in first
    assert any(line.startswith("![") for line in lines[:PICTURED_BY_LINE])


def test_the_log_is_short() -> None:
    lines = LOG.read_text("utf-8").splitlines()
    assert len(lines) <= MOST_LINES_OF_THE_LOG, "shrink what stands under Newest"
    assert [line for line in lines if len(line) > LONGEST_LINE_OF_THE_LOG] == []
    after_text = [line for before, line in pairwise(lines) if before and before[0] != "#"]
    assert [line for line in after_text if line.startswith("**2")] == []


def test_sentences_are_counted() -> None:
    page = """---
title: x
---
# A heading is none

One two `a b c` four. "Five" [six seven](page.md), as et al. 2019 said
in two lines! And 3.5 is one word.

| a | row of a table |
- an item
- another `item`, e.g. This one

```python
x = "no sentence. At all."
```
"""
    assert [len(words) for words in sentences(page)] == [4, 11, 5, 2, 5]
    assert max(len(words) for words in sentences("word " * 36)) > MOST_WORDS
