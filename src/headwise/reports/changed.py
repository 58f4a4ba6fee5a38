"""The heads that changed most from one scan to another, each in a sentence."""

from __future__ import annotations

import math
from dataclasses import replace

from headwise.reports.report import (
    NO_CHANGE,
    WIDTH,
    change_sizes,
    drawn_statistic,
    format_token_count,
    is_missing,
    make_change,
)
from headwise.scanning.diff import HeadChange, ScanDiff
from headwise.scanning.result import HeadScan
from headwise.support.text import describe_count

EVENLY = 0.95  # of all tokens, from which a head attends evenly
MOST_HEADS = 8  # that are named
RULE = (
    "The heads with the largest total change come first: 1 is the mean distance of two heads of a "
    "layer. Each sentence is of the statistic that changed most, as a part of its scale."
)


def changed_heads(diff: ScanDiff, *, n: int, names: tuple[str, str]) -> list[HeadChange]:
    """Return the heads with the largest total change, each with a sentence on what it does now.

    The sentence is of the statistic that changed most, as a part of its scale; of the number of
    keys where that changed at least half as much. A value that one scan lacks is left out.
    """
    sizes = change_sizes(diff)
    heads: list[HeadChange] = []
    for total in diff.top(n=diff.apart.numel()):
        head = total.layer_index, total.head
        here = {name: float(size[head].nan_to_num()) for name, size in sizes.items()}
        here = {name: x for name, x in here.items() if x and not is_missing(diff, name, head)}
        ranked = sorted(here, key=here.__getitem__, reverse=True)
        if WIDTH in here and 2 * here[WIDTH] >= here[ranked[0]]:
            ranked.insert(0, WIDTH)
        made = (make_change(diff, name, head, here[name], names) for name in ranked)
        if change := next(filter(None, made), None):
            heads.append(replace(change, sentence=_describe_changed_head(diff, change)))
        if len(heads) >= n:
            break
    return heads


def _describe_changed_head(diff: ScanDiff, change: HeadChange) -> str:
    """Return such as ``now attends evenly: 12 to 112 keys``."""
    before = diff.before
    assert isinstance(before, HeadScan)
    drawn = drawn_statistic(before, change.statistic)
    values = change.before.value, change.after.value
    partner = "" if change.after.head == change.before.head else f"{change.after.head} in B: "
    if change.statistic != WIDTH:
        words = " to ".join(map(drawn.format_long, values))
        return f"{partner}{drawn.definition.label} {words}"
    tokens = diff.after.tokens if diff.after.sequences == 1 else math.inf
    how = "to more keys" if values[1] > values[0] else "to fewer keys"
    how = "evenly" if values[1] >= EVENLY * tokens else how
    words = " to ".join(map(format_token_count, values))
    return f"{partner}now attends {how}: {words} keys"


def describe_total_change(diff: ScanDiff) -> str:
    """Return how many heads changed by more than the mean distance of two heads, and the rest."""
    values = sorted(diff.apart[diff.apart.isfinite()].tolist(), reverse=True)
    large, total = sum(value > 1 for value in values), describe_count(len(values), "head")
    if not values or not values[0]:
        return NO_CHANGE
    if not large:
        return f"None of {total} changed by more than 1; the most by {_round_up(values[0])}"
    if large == len(values):
        return f"All {total} changed by more than 1; the least by {values[-1]:.2g}"
    rest = _round_up(values[large])
    return f"{large} of {total} changed by more than 1; the rest by at most {rest}"


def _round_up(value: float) -> str:
    """Return a number in two digits that is not below it."""
    if not value:
        return "0"
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / step - 1e-9) * step:.2g}"
