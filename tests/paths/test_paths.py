"""docs/paths.md is what the paths come to today, cell by cell."""

import pytest

from tests.honest import hides_a_whole_sequence
from tests.paths.__main__ import run_apart
from tests.paths.outcomes import NOT_RUN, NOTES, Outcome
from tests.paths.registry import PATHS, Path
from tests.paths.subjects import SUBJECTS
from tests.paths.table import PAGE, page, read

SLOW = pytest.mark.slow
# The long ones first: two workers share them.
ROWS = [pytest.param(path, marks=SLOW, id=path.key) for path in PATHS if path.traces]
# Long ones that other tests look at too: half types, checkpoints, batched and second derivatives.
LONG = ("double", "float16", "bfloat16", "autocast", "checkpoint", "training", "vmap", "jvp")
LONG += ("batched",)  # tests/matrix/kernels/test_gradients_otherwise.py
ROWS += [
    pytest.param(path, marks=SLOW if path.key in LONG else (), id=path.key)
    for path in PATHS
    if not path.traces
]


@hides_a_whole_sequence
@pytest.mark.parametrize("path", ROWS)
def test_a_row_of_the_page_is_what_runs(path: Path) -> None:
    if lack := path.missing():
        pytest.skip(lack)
    found = run_apart(path) if path.traces else path.row()
    stated = read(PAGE.read_text("utf-8"))[path.key]
    assert found == stated, "python -m tests.paths --write"


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
