"""docs/paths.md is what the paths come to today, cell by cell."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.honest import hides_a_whole_sequence
from tests.paths.__main__ import run_apart
from tests.paths.outcomes import NOT_RUN, NOTES, Outcome
from tests.paths.registry import PATHS, Path
from tests.paths.subjects import SUBJECTS
from tests.paths.table import PAGE, page, read

SLOW, EXTRA = pytest.mark.slow, pytest.mark.extra
# Of a graph `make check` makes this column alone, on one path of each compiler.
COLUMN = "layer, masks"
FIRST = ("inductor", "onnx")
# Long ones that other tests look at too: half types, checkpoints, and batched derivatives, which
# tests/matrix/kernels/test_gradients_otherwise.py takes.
MARKS = dict.fromkeys(("double", "checkpoint", "training"), SLOW)
MARKS |= dict.fromkeys(("bfloat16", "float16", "autocast", "jvp", "vmap", "batched"), EXTRA)


def list_rows() -> Iterator[Any]:
    """The long ones first: two workers share them."""
    names = [subject.name for subject in SUBJECTS]
    others = [name for name in names if name != COLUMN]
    for path in PATHS:
        if path.traces:
            columns = others if path.key in FIRST else names
            yield pytest.param(path, columns, marks=EXTRA, id=path.key)
    for path in PATHS:
        if path.key in FIRST:
            yield pytest.param(path, [COLUMN], marks=SLOW, id=f"{path.key}, {COLUMN}")
        elif not path.traces:
            yield pytest.param(path, names, marks=MARKS.get(path.key, ()), id=path.key)


@hides_a_whole_sequence
@pytest.mark.parametrize(("path", "columns"), [*list_rows()])
def test_a_row_of_the_page_is_what_runs(path: Path, columns: list[str]) -> None:
    if lack := path.missing():
        pytest.skip(lack)
    found = run_apart(path, columns) if path.traces else path.row(columns)
    stated = read(PAGE.read_text("utf-8"))[path.key]
    assert found == {name: stated[name] for name in columns}, "python -m tests.paths --write"


def test_the_page_is_written_from_its_outcomes() -> None:
    # Nothing stands on the page by hand, and no note without a cell.
    text = PAGE.read_text("utf-8")
    assert page(read(text)) == text


def test_a_changed_cell_is_seen() -> None:
    text = PAGE.read_text("utf-8")
    rows = read(text)
    name = SUBJECTS[0].name
    assert rows["double"][name] == Outcome("raises", ("no second derivative",))
    rows["double"][name] = NOT_RUN
    assert page(rows) != text
    assert read(page(rows)) == rows


def test_every_note_has_its_own_text() -> None:
    assert len({note.text for note in NOTES.values()}) == len(NOTES)
