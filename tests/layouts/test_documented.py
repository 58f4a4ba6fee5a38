"""The page of the layouts says what the catalogue has, and its pictures are those of the code."""

import pytest

from tools.layouts_table import IMAGES, PAGE, pictures, replace_table

HINT = "run: python -m tools.layouts_table"


def test_the_table_is_that_of_the_catalogue() -> None:
    page = PAGE.read_text("utf-8")
    assert replace_table(page) == page, HINT


@pytest.mark.parametrize("name", ["fused.svg", "grouped.svg", "pairing.svg"])
def test_the_pictures_are_those_of_the_code(name: str) -> None:
    assert {path.name for path in IMAGES.iterdir()} == set(pictures())
    picture = pictures()[name]
    assert IMAGES.joinpath(name).read_text("utf-8") == picture, HINT
    said = picture.partition('aria-label="')[2].partition('"')[0]
    page = PAGE.with_name("layouts.md").read_text("utf-8")
    assert f"![{said}](images/layouts/{name})" in page
