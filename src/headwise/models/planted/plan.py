"""Plan of the planted heads: the terms of their scores, and the section of their output."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

TOKEN_BITS, POSITION_BITS = 6, 14  # 64 tokens, 16,384 positions
GAP = 256.0  # exp(-GAP) is 0 in float32, and below every float64 sum's last bit

# Sections of a token's state with their widths. A code is a number's bits as -1 and 1.
WIDTHS = {
    "token": TOKEN_BITS,  # code of the token
    "position": POSITION_BITS,  # code of i
    "one before": POSITION_BITS,  # code of i - 1, or of 0
    "two before": POSITION_BITS,  # code of i - 2, or of 0
    "constant": 1,  # 1
    "is first": 1,  # 1 at position 0, else 0
    "separator": 1,  # i / 2**14 where a separator is, else 0
    # Sections that heads write: the mean code of the attended tokens.
    "previous": TOKEN_BITS,  # starts at minus the code at position 0, so that the result there is 0
    "first": TOKEN_BITS,
    "mean": TOKEN_BITS,
    "divided": TOKEN_BITS,
    "same": TOKEN_BITS,
    "induced": TOKEN_BITS,
    "second": TOKEN_BITS,
    "own": TOKEN_BITS,
}
EMBED_DIM = sum(WIDTHS.values())
SECTIONS = {
    name: slice(stop - width, stop)
    for (name, width), stop in zip(WIDTHS.items(), accumulate(WIDTHS.values()), strict=True)
}


class ScoreTerm(NamedTuple):
    """A term of a score: a section of the query, times a section of the key, times a factor."""

    of_query: str
    of_key: str
    factor: float


class PlantedHead(NamedTuple):
    """A head, whose scores are the sum of its terms."""

    name: str
    comparisons: tuple[ScoreTerm, ...]
    writes: str | None


# Two codes of n bits have the product n if they are equal, and at most n - 2 if not.
LAYERS = (
    (
        PlantedHead("previous token", (ScoreTerm("one before", "position", GAP),), "previous"),
        PlantedHead("first token", (ScoreTerm("constant", "is first", GAP),), "first"),
        PlantedHead("uniform", (), "mean"),
        PlantedHead(
            "nearest separator",
            (
                # Two gaps more for each position: the largest score is just below 2**23.
                ScoreTerm("constant", "separator", 2 * GAP * 2**POSITION_BITS),
                # Above keys without a separator, below a separator at position 1.
                ScoreTerm("constant", "is first", GAP),
            ),
            "divided",
        ),
        PlantedHead("same token", (ScoreTerm("token", "token", GAP),), "same"),
    ),
    (
        PlantedHead(
            "induction",
            (
                ScoreTerm("token", "previous", GAP),
                # Between a match (TOKEN_BITS gaps) and the nearest other key (two gaps less).
                ScoreTerm("constant", "is first", (TOKEN_BITS - 1) * GAP),
            ),
            "induced",
        ),
        PlantedHead("two back", (ScoreTerm("two before", "position", GAP),), "second"),
        PlantedHead("two back, again", (ScoreTerm("two before", "position", GAP),), "second"),
        PlantedHead("own token", (ScoreTerm("position", "position", GAP),), "own"),
        PlantedHead("dead", (), None),
    ),
)
NAMES = tuple(tuple(head.name for head in layer) for layer in LAYERS)
