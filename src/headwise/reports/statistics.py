"""Statistics as pages and terminals draw them: scales, text, heads that stand out, changes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from headwise.reports import images
from headwise.reports.images import RGB
from headwise.scanning.diff import ScanDiff
from headwise.scanning.layer import HeadValue, StandoutHead
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.catalogue import PICTURED
from headwise.scanning.statistics.statistic import Definition

LEAST_SHARE = 0.05  # a head with a smaller share of its weight does not stand out by this share
# A head stands out if its value is so many times that of the middle head, or so many times less.
# Without this factor some head would stand out even if all heads were alike.
FACTOR_APART = 2
WEIGHTS = (
    "Weights show where a head attends, and not how the model uses it. A row of weights sums to 1, "
    "less the share of a learned sink."
)
# A scale spans at least this part of the median, so that equal heads have about one colour.
LEAST_SPAN = 0.1


@dataclass(frozen=True)
class Scale:
    """The scale that turns values of a statistic into colours and digits."""

    kind: str  # "weight" or "share" of 0 to 1, or "range"
    low: float
    high: float

    def position(self, value: float) -> float:
        """Return the position on the colour scale; for weights by the square root, as on a map.

        That of NaN is NaN.
        """
        if math.isnan(value):
            return math.nan
        if self.kind == "weight":
            return images.weight_position(value)
        span = self.high - self.low
        return (value - self.low) / span if span > 0 else 0.5

    def colour(self, value: float) -> images.RGB:
        """Return the colour of a value."""
        return images.viridis_colour(self.position(value))

    def format_short(self, value: float) -> str:
        """Format at most three characters and a sign: ``78`` per cent, ``5.4`` nats, ``2k``."""
        if self.kind != "range":
            return _use_minus_sign(f"{100 * value:.0f}")
        largest = max(abs(self.low), abs(self.high))
        if largest < 0.995:
            return _use_minus_sign(f"{value:.2f}".replace("0.", ".", 1))
        if largest < 9.95:
            return _use_minus_sign(f"{value:.1f}")
        return _use_minus_sign(f"{value:.0f}" if abs(value) < 999.5 else f"{value / 1000:.0f}k")


@dataclass(frozen=True, eq=False)
class DrawnStatistic:
    """One scalar statistic of a scan for a picture: a row is a layer, a column a head."""

    name: str
    label: str
    definition: Definition
    rows: list[list[float]]  # NaN where a head has no value
    middle: float  # the median head
    scale: Scale

    @property
    def unit(self) -> str:
        """The unit of the numbers in the picture, in few words."""
        if self.scale.kind == "range":
            unit = self.definition.unit.split(",")[0].split(" (")[0].split(";")[0]
            return f"in units {unit}" if unit.startswith("of ") else unit
        return self.definition.unit.split(",")[0].replace("share", "per cent", 1)

    @property
    def least_change_scale_end(self) -> float:
        """The least end of the scale of a change, so that two nearly equal scans look equal."""
        if self.scale.kind != "range":
            return LEAST_SHARE
        return LEAST_SPAN * abs(self.middle) or 1e-9

    @property
    def varies_enough(self) -> bool:
        """True if the picture shows differences between heads, and a share reaches 5 per cent."""
        real = [value for row in self.rows for value in row if value == value]
        if len({self.scale.format_short(value) for value in real}) < 2:
            return False
        return self.scale.kind != "weight" or max(real) >= LEAST_SHARE

    @property
    def is_constant(self) -> bool:
        """True if there are several heads and the picture would show the same for each."""
        real = [value for row in self.rows for value in row if value == value]
        return len(real) > 1 and any(
            len({digits(value) for value in real}) == 1
            for digits in (self.scale.format_short, self.format_long)
        )

    def is_far_above(self, value: float) -> bool:
        """True if a value is clearly above the middle head; see `RULE`."""
        more = value - self.middle
        least = 0.0 if self.scale.kind == "range" else LEAST_SHARE
        return more >= max(least, (FACTOR_APART - 1) * abs(self.middle)) and more > 0

    def is_far_below(self, value: float) -> bool:
        """True if a value is clearly below the middle head; see `RULE`."""
        return 0 < FACTOR_APART * value <= self.middle

    def format_long(self, value: float) -> str:
        """Format a value for a sentence: ``87 %``, ``5.41 nats``."""
        if self.scale.kind != "range":
            if 0 < value < 0.0005:
                return "under 0.1 %"
            return _use_minus_sign(f"{100 * value:.{0 if abs(value) >= 0.0095 else 1}f} %")
        size = abs(value)
        digits = f"{value:.{2 if size < 9.95 else 1 if size < 99.5 else 0}f}"
        has_unit = self.unit in ("tokens", "nats", "keys", "directions")
        return _use_minus_sign(f"{digits} {self.unit}" if has_unit else digits)


def drawn_statistic(scan: HeadScan, name: str) -> DrawnStatistic:
    """Return a scalar statistic of the scan with its scale."""
    values, definition = scan[name], scan.definition(name)
    real = values[values.isfinite()]
    middle = float(real.median()) if real.numel() else float("nan")
    return DrawnStatistic(
        name=name,
        label=definition.heading,
        definition=definition,
        rows=values.tolist(),
        middle=middle,
        scale=_make_scale(scan, definition, real, middle),
    )


def _make_scale(scan: HeadScan, definition: Definition, real: Tensor, middle: float) -> Scale:
    """Return the scale: from the definition, or around the values, but never of a narrow range."""
    if definition.colour_scale != "range":
        return Scale(definition.colour_scale, 0.0, 1.0)
    if not real.numel():
        return Scale("range", 0.0, 0.0)
    if definition.name == "entropy":
        return Scale("range", 0.0, math.log(max(2, _longest_sequence_length(scan))))
    low, high = float(real.min()), float(real.max())
    missing = LEAST_SPAN * abs(middle) - (high - low)
    if missing > 0:
        low, high = low - missing / 2, high + missing / 2
    return Scale("range", low, high)


def _longest_sequence_length(scan: HeadScan) -> int:
    """Return the largest number of tokens of a sequence, as far as it is known."""
    lengths = [length for text in scan.texts for length in text.lengths]
    return max(lengths, default=scan.tokens)


def drawn_statistics(scan: HeadScan) -> list[DrawnStatistic]:
    """Return every scalar of the scan, those of `PICTURED` first."""
    first = [name for name in PICTURED if name in scan.scalars]
    others = [name for name in scan.scalars if name not in first]
    return [drawn_statistic(scan, name) for name in [*first, *others]]


def statistics_whose_heads_differ(scan: HeadScan) -> list[DrawnStatistic]:
    """Return the statistics in whose picture heads differ."""
    return [s for s in drawn_statistics(scan) if _heads_differ_in_picture(scan, s)]


def _heads_differ_in_picture(scan: HeadScan, statistic: DrawnStatistic) -> bool:
    reach = next(s.reach for s in scan.statistics if s.definition.name == statistic.name)
    # No token is further away. The longest of several texts is no longer than all together.
    is_everything = statistic.name.startswith("within_") and reach >= scan.tokens - 1
    return not is_everything and not statistic.is_constant


def _use_minus_sign(text: str) -> str:
    return text.replace("-", "−")


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


MOST_CHANGES = 8  # heads that are listed
# The ends and the middle of the diverging scale: ColorBrewer's BrBG, by Cynthia Brewer.
_LOW, _MIDDLE, _HIGH = (1, 102, 94), (245, 245, 245), (140, 81, 10)


def most_changed_heads(diff: ScanDiff) -> list[HeadValue]:
    """Return the heads that changed most over all statistics; none of them is unchanged."""
    return [change for change in diff.top(n=MOST_CHANGES) if change.value > 0]


def diverging_colour(position: float) -> RGB:
    """Return the colour of a position from −1 (teal) over 0 (white) to 1 (brown)."""
    share = min(1.0, abs(position))
    end = _HIGH if position > 0 else _LOW
    red, green, blue = (round(m + (e - m) * share) for m, e in zip(_MIDDLE, end, strict=True))
    return red, green, blue


def most_changed_statistic(diff: ScanDiff) -> str | None:
    """Return the scalar with the largest change beside the span of its scale; None without any."""
    best, most = None, 0.0
    for name in diff.scalars:
        assert isinstance(diff.before, HeadScan)
        scale = drawn_statistic(diff.before, name).scale
        change = float(diff[name].abs().nan_to_num().max()) / max(scale.high - scale.low, 1e-12)
        if change > most:
            best, most = name, change
    return best


def change_scale_end(diff: ScanDiff, name: str) -> float:
    """Return the end of the scale of a change: the largest, and at least the statistic's own."""
    assert isinstance(diff.before, HeadScan)
    least = drawn_statistic(diff.before, name).least_change_scale_end
    return max([float(change) for change in diff[name].abs().nan_to_num().flatten()] + [least])
