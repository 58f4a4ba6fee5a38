"""The picture of the guide is the one that its tool draws."""

from tools.probes_picture import KNOCKED, PANELS, PICTURE, WINDOW, picture


def test_the_picture_is_current() -> None:
    assert PICTURE.read_text("utf-8") == picture(), "run: python -m tools.probes_picture"


def test_the_queries_that_change_are_those_of_the_window() -> None:
    cells = PANELS[-1].cells
    changed = [query for query, row in enumerate(cells) if row[KNOCKED] == "changed"]
    assert changed == list(range(KNOCKED, KNOCKED + WINDOW))
