"""The standard set of head statistics, by name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from headwise.errors import OptionError
from headwise.scanning.statistics import rows
from headwise.scanning.statistics.maps import (
    Map,
    MostReceived,
    OffsetProfile,
    TopKeysOfChosenQueries,
)
from headwise.scanning.statistics.outputs import (
    CKA,
    CONTRIBUTED,
    Copying,
    EffectiveRank,
    OutputCosine,
    TotalVariation,
)
from headwise.scanning.statistics.statistic import TileStatistic
from headwise.support.text import describe_value

STANDARD: tuple[TileStatistic, ...] = (
    *rows.SPREAD,
    *rows.ONE_KEY,
    MostReceived(),
    rows.PREVIOUS_TOKEN,
    OffsetProfile(),
    *rows.NEAR,
    *rows.REPEATED,
    Copying(),
    *rows.MARKED,
    *CONTRIBUTED,
    EffectiveRank(),
    OutputCosine(),
    CKA(),
    TotalVariation(),
    TopKeysOfChosenQueries(),
    Map(),
)
# The order of pictures; all other statistics come after these.
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
# The statistics that can characterise a head, in the order of the reports.
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
LONGEST_NAME = 80  # characters of an unknown name that are compared with the known names


def find_standard_statistics(names: Iterable[str]) -> tuple[TileStatistic, ...]:
    """Return statistics of the standard set, in the order of the names.

    Raises:
        OptionError: a name that is not in the standard set.
    """
    by_name = {statistic.definition.name: statistic for statistic in STANDARD}
    names = tuple(names)
    for name in names:
        if name not in by_name:
            raise unknown_statistic_error(
                name, by_name, do="choose from these, or pass a Statistic of your own"
            )
    return tuple(by_name[name] for name in names)


def unknown_statistic_error(
    name: object, known: Iterable[str], *, do: str, parameter: str = ""
) -> OptionError:
    """Return the error for an unknown name, with the nearest known name if there is one.

    Args:
        name: the unknown name.
        known: the known names.
        do: the advice if no known name is near.
        parameter: the parameter that holds the name, if the message shows it.
    """
    known = tuple(known)
    label = f"{{{parameter}}}" if parameter else "statistic"
    if near := get_close_matches(str(name)[:LONGEST_NAME], known, n=1):
        do = f"{label} {near[0]}" if parameter else f"{near[0]!r} is the nearest"
    return OptionError(
        saw=f"{label} {describe_value(name)}",
        needed=f"one of {', '.join(known)}",
        do=do,
        parameter=parameter,
    )
