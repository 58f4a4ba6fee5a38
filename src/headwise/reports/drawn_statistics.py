"""Statistics of a scan as pages and terminals draw them: a scale, and values as text."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from headwise.reports import png_images
from headwise.scanning.head_scan import HeadScan
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
            return png_images.weight_position(value)
        span = self.high - self.low
        return (value - self.low) / span if span > 0 else 0.5

    def colour(self, value: float) -> png_images.RGB:
        """Return the colour of a value."""
        return png_images.viridis_colour(self.position(value))

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
        """True if a value is clearly above the middle head; see `standout_heads.RULE`."""
        more = value - self.middle
        least = 0.0 if self.scale.kind == "range" else LEAST_SHARE
        return more >= max(least, (FACTOR_APART - 1) * abs(self.middle)) and more > 0

    def is_far_below(self, value: float) -> bool:
        """True if a value is clearly below the middle head; see `standout_heads.RULE`."""
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
