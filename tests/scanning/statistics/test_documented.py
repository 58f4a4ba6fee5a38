"""The page of the scan says what the code computes."""

from tools.statistics_table import PAGE, with_table


def test_the_table_is_that_of_the_code() -> None:
    page = PAGE.read_text("utf-8")
    assert with_table(page) == page, "run: python -m tools.statistics_table"
