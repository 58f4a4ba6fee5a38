"""The standard set of head statistics, by name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from headwise.errors import OptionError
from headwise.scanning.statistics import row_statistics
from headwise.scanning.statistics.output_statistics import (
    CKA,
    CONTRIBUTED,
    Copying,
    EffectiveRank,
    OutputCosine,
    TotalVariation,
)
from headwise.scanning.statistics.statistic import TileStatistic
from headwise.scanning.statistics.view_statistics import Map, MostReceived, OffsetProfile, TopKeys
from headwise.support.axes import describe_value

STANDARD: tuple[TileStatistic, ...] = (
    *row_statistics.SPREAD,
    *row_statistics.ONE_KEY,
    MostReceived(),
    row_statistics.PREVIOUS_TOKEN,
    OffsetProfile(),
    *row_statistics.NEAR,
    *row_statistics.REPEATED,
    Copying(),
    *row_statistics.MARKED,
    *CONTRIBUTED,
    EffectiveRank(),
    OutputCosine(),
    CKA(),
    TotalVariation(),
    TopKeys(),
    Map(),
)
# The order of pictures; statistics that are not named here come after these.
PICTURED = (
    "effective_keys",
    "previous_token",
    "induction",
    "first_token",
    "separator",
    "duplicate_token",
    "copying",
    "sink",
    "special",
    "relative_contribution",
    "distance",
    "contribution_norm",
    "value_weighted",
    "logsumexp",
    "score_range",
    "effective_rank",
    "relative_entropy",
    "entropy",
    "maximum",
    "participation",
    "within_16",
    "within_64",
    "within_256",
)
# What a head is known for, in the order in which it is said.
KNOWN_FOR = (
    "previous_token",
    "induction",
    "duplicate_token",
    "first_token",
    "separator",
    "special",
    "sink",
    "copying",
    "effective_keys",
    "distance",
    "relative_contribution",
)
LONGEST_NAME = 80  # characters that are compared with those of the names


def named(names: Iterable[str]) -> tuple[TileStatistic, ...]:
    """These of the standard set, in the order given.

    Raises:
        OptionError: a name that none of them has.
    """
    by_name = {statistic.definition.name: statistic for statistic in STANDARD}
    wanted = tuple(names)
    for name in wanted:
        if name not in by_name:
            raise unknown_statistic(
                name, by_name, do="choose from these, or pass a Statistic of your own"
            )
    return tuple(by_name[name] for name in wanted)


def unknown_statistic(
    name: object, known: Iterable[str], *, do: str, parameter: str = ""
) -> OptionError:
    """Return the error for a name that is not among these, with the nearest, if any is near.

    Args:
        name: what was given.
        known: the names that there are.
        do: the advice where none is near.
        parameter: the argument that the name was given as, where the message is to say it.
    """
    known = tuple(known)
    what = f"{{{parameter}}}" if parameter else "statistic"
    if near := get_close_matches(str(name)[:LONGEST_NAME], known, n=1):
        do = f"{what} {near[0]}" if parameter else f"{near[0]!r} is the nearest"
    return OptionError(
        saw=f"{what} {describe_value(name)}",
        needed=f"one of {', '.join(known)}",
        do=do,
        parameter=parameter,
    )
