"""Heads that stand out by a statistic of a scan, each with a sentence."""

from __future__ import annotations

from collections.abc import Iterable

from headwise.reports.drawn_statistics import (
    DrawnStatistic,
    drawn_statistic,
    statistics_whose_heads_differ,
)
from headwise.scanning.head_scan import HeadScan
from headwise.scanning.layer_scan import HeadValue, StandoutHead

WIDTH = "effective_keys"
RULE = (
    "A head stands out by a statistic if its value is the highest and at least twice that of the "
    "middle head, and for shares 5 percentage points more. It also stands out if it attends to the "
    "fewest tokens, and to at most half as many as the middle head."
)


def standout_heads(scan: HeadScan) -> list[StandoutHead]:
    """Return the heads that stand out by the `RULE`."""
    candidates = [
        drawn_statistic(scan, name) for name in scan.characterising_scalars or scan.scalars
    ]
    heads = []
    for statistic in _drop_statistics_pictured_alike(s for s in candidates if s.varies_enough):
        definition = statistic.definition
        top = scan.top(statistic.name, 1)[0]
        if statistic.is_far_above(top.value):
            heads.append(_make_standout_head(scan, statistic, top, definition.highest_value_phrase))
        if definition.least:
            low = scan.top(statistic.name, 1, lowest=True)[0]
            if statistic.is_far_below(low.value):
                heads.append(_make_standout_head(scan, statistic, low, definition.least))
    return heads


def _drop_statistics_pictured_alike(statistics: Iterable[DrawnStatistic]) -> list[DrawnStatistic]:
    """Drop statistics with the same picture, as where the first token is the only special one."""
    distinct: dict[str, DrawnStatistic] = {}
    for statistic in statistics:
        distinct.setdefault(str(_format_values_of_all_heads(statistic)), statistic)
    return list(distinct.values())


def _format_values_of_all_heads(statistic: DrawnStatistic) -> list[list[str]]:
    short = statistic.scale.format_short
    return [["" if value != value else short(value) for value in row] for row in statistic.rows]


def _make_standout_head(
    scan: HeadScan, statistic: DrawnStatistic, head: HeadValue, phrase: str
) -> StandoutHead:
    value, middle = statistic.format_long(head.value), statistic.format_long(statistic.middle)
    if statistic.name == WIDTH:
        value, middle = (
            f"about {_format_token_count(count)} tokens" for count in (head.value, statistic.middle)
        )
        if scan.sequences == 1:
            value = f"about {_format_token_count(head.value)} of {scan.tokens:,} tokens"
    return StandoutHead(head, phrase.format(value), middle, statistic.name)


def _format_token_count(count: float) -> str:
    return f"{count:.1f}" if count < 9.95 else f"{count:,.0f}"


def clearest_statistic(scan: HeadScan) -> DrawnStatistic | None:
    """Return the statistic of the first head that stands out, else the first in which heads differ.

    None if heads differ in none.
    """
    if standouts := standout_heads(scan):
        return drawn_statistic(scan, standouts[0].statistic)
    return next((each for each in statistics_whose_heads_differ(scan) if each.varies_enough), None)
