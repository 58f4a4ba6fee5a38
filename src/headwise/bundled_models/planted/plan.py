"""What each head compares, and where it writes: the hand in "written by hand"."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

TOKEN_BITS, POSITION_BITS = 6, 14  # 64 tokens, 16,384 positions
GAP = 256.0  # exp(-GAP) is 0 in float32, and below every float64 sum's last bit

# The sections of a token's state, and how wide each is. A code is a number's bits as -1 and 1.
WIDTHS = {
    "token": TOKEN_BITS,  # code of the token
    "position": POSITION_BITS,  # code of i
    "one before": POSITION_BITS,  # code of i - 1, or of 0
    "two before": POSITION_BITS,  # code of i - 2, or of 0
    "constant": 1,  # 1
    "is first": 1,  # 1 at position 0, else 0
    "separator": 1,  # i / 2**14 where a separator is, else 0
    # What heads write: the mean code of the tokens that they attend to.
    "previous": TOKEN_BITS,  # position 0 has none: it starts at minus what the head will write
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
    """A part of a score: a section of the query times one of the key, times a factor."""

    of_query: str
    of_key: str
    factor: float


class PlantedHead(NamedTuple):
    """A head: its scores are the sum of its comparisons."""

    name: str
    comparisons: tuple[ScoreTerm, ...]
    writes: str | None


# Two codes of n bits have the product n where they are equal, and at most n - 2 where not.
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
                # Above keys that are no separator, below a separator at position 1.
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
                # Between a match, TOKEN_BITS gaps, and the nearest miss, two gaps less.
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
