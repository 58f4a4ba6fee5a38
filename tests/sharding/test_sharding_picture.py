"""The picture of the guide is the one that its tool draws."""

from tools.sharding_picture import CELLS, PANELS, PICTURE, RANKS, picture


def test_the_picture_is_current() -> None:
    assert PICTURE.read_text("utf-8") == picture(), "run: python -m tools.sharding_picture"


def test_every_rank_has_an_equal_part_of_every_grid() -> None:
    for panel in PANELS:
        for owner in panel.grids:
            owners = [owner(row, column) for row in range(CELLS) for column in range(CELLS)]
            parts = {rank: owners.count(rank) for rank in range(RANKS)}
            assert len(set(parts.values())) == 1, panel.title
