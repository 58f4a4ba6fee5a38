"""What the statistics of a scan are called among people, and what a head that has most of one does.

A terminal and a page say the same, so the words are here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headwise.reports import png_images
from headwise.scanning.head_scan import HeadScan
from headwise.scanning.layer_scan import HeadValue
from headwise.scanning.statistics.catalogue import PICTURED
from headwise.scanning.statistics.statistic import Definition

WIDTH = "effective_keys"
MOST_PICTURES = 6
# A head that gives less of its weight than this to anything does not stand out by it.
WORTH_TELLING = 0.05
# A head stands out by what it has so many times as much of as the middle head, or so many times
# less. Among heads that are alike some head has the most too, and that says nothing of it.
APART = 2
RULE = (
    "A head stands out by what it has most of, if that is at least twice what the middle head has, "
    "and for shares 5 per cent points more; and by looking at the fewest tokens, if these are at "
    "most half as many as those of the middle head."
)


@dataclass(frozen=True)
class Scale:
    """How a statistic becomes a colour and a few digits."""

    kind: str  # "weight" or "share" of 0 to 1, or "range"
    low: float
    high: float

    def position(self, value: float) -> float:
        """On the scale of colours; a share of the weight by its square root, as on a map."""
        if self.kind == "weight":
            return png_images.weight_position(value)
        span = self.high - self.low
        return (value - self.low) / span if span > 0 else 0.5

    def colour(self, value: float) -> png_images.RGB:
        """The colour at its position."""
        return png_images.viridis(self.position(value))

    def short(self, value: float) -> str:
        """At most three characters and a sign: ``78`` per cent, ``5.4`` nats, ``2k`` tokens."""
        if self.kind != "range":
            return _minus(f"{100 * value:.0f}")
        largest = max(abs(self.low), abs(self.high))
        if largest < 0.995:
            return _minus(f"{value:.2f}".replace("0.", ".", 1))
        if largest < 9.95:
            return _minus(f"{value:.1f}")
        return _minus(f"{value:.0f}" if abs(value) < 999.5 else f"{value / 1000:.0f}k")


@dataclass(frozen=True, eq=False)
class DrawnStatistic:
    """One scalar statistic of a scan, ready to be drawn: a row is a layer, a column a head."""

    name: str
    label: str
    definition: Definition
    rows: list[list[float]]  # NaN where a head has no value
    middle: float  # the median head
    scale: Scale

    @property
    def unit(self) -> str:
        """What the numbers of its picture count, in few words."""
        if self.scale.kind == "range":
            unit = self.definition.unit.split(",")[0].split(" (")[0].split(";")[0]
            return f"in units {unit}" if unit.startswith("of ") else unit
        return self.definition.unit.split(",")[0].replace("share", "per cent", 1)

    @property
    def is_telling(self) -> bool:
        """Whether heads differ in it as far as its picture can show, and one has much of it."""
        real = [value for row in self.rows for value in row if value == value]
        if len({self.scale.short(value) for value in real}) < 2:
            return False
        return self.scale.kind != "weight" or max(real) >= WORTH_TELLING

    @property
    def is_same(self) -> bool:
        """Whether there are heads to compare, and its picture would show the same for each."""
        real = [value for row in self.rows for value in row if value == value]
        return len(real) > 1 and any(
            len({digits(value) for value in real}) == 1 for digits in (self.scale.short, self.long)
        )

    def is_apart(self, value: float) -> bool:
        """Whether a head with so much has clearly more than the middle head; see `RULE`."""
        more = value - self.middle
        worth = 0.0 if self.scale.kind == "range" else WORTH_TELLING
        return more >= max(worth, (APART - 1) * abs(self.middle)) and more > 0

    def is_below(self, value: float) -> bool:
        """Whether a head with so much has clearly less than the middle head; see `RULE`."""
        return 0 < APART * value <= self.middle

    def long(self, value: float) -> str:
        """As in a sentence: ``87 %``, ``5.41 nats``."""
        if self.scale.kind != "range":
            if 0 < value < 0.0005:
                return "under 0.1 %"
            return _minus(f"{100 * value:.{0 if abs(value) >= 0.0095 else 1}f} %")
        size = abs(value)
        digits = f"{value:.{2 if size < 9.95 else 1 if size < 99.5 else 0}f}"
        counts = self.unit in ("tokens", "nats", "keys", "directions")
        return _minus(f"{digits} {self.unit}" if counts else digits)


def shown(scan: HeadScan, name: str) -> DrawnStatistic:
    """A scalar statistic that the scan has."""
    values, definition = scan[name], scan.definition(name)
    real = values[values.isfinite()]
    low, high = (float(real.min()), float(real.max())) if real.numel() else (0.0, 0.0)
    return DrawnStatistic(
        name=name,
        label=definition.heading,
        definition=definition,
        rows=values.tolist(),
        middle=float(real.median()) if real.numel() else float("nan"),
        # Shares run from 0 to 1, whatever was found.
        scale=Scale(
            definition.drawn, *((low, high) if definition.drawn == "range" else (0.0, 1.0))
        ),
    )


def in_order(scan: HeadScan) -> list[DrawnStatistic]:
    """Every scalar of the scan, those with words of their own first."""
    known = [name for name in PICTURED if name in scan.scalars]
    return [shown(scan, name) for name in [*known, *(n for n in scan.scalars if n not in known)]]


def pictured(scan: HeadScan) -> list[DrawnStatistic]:
    """Those whose pictures have something to show; `unpictured` has the others."""
    return [one for one in in_order(scan) if _nothing_to_show(scan, one) is None]


def unpictured(scan: HeadScan) -> dict[str, list[str]]:
    """Why there is no picture -> the statistics, as for those that were not measured."""
    reasons: dict[str, list[str]] = {}
    for one in in_order(scan):
        if (reason := _nothing_to_show(scan, one)) is not None:
            reasons.setdefault(reason, []).append(one.name)
    return reasons


def _nothing_to_show(scan: HeadScan, one: DrawnStatistic) -> str | None:
    reach = next(s.reach for s in scan.statistics if s.definition.name == one.name)
    if one.name.startswith("within_") and reach >= scan.tokens - 1:
        # Of several texts the longest is not known, but they are no longer than all together.
        return f"nothing is further away in {scan.tokens:,} tokens"
    return f"every head has {one.long(one.middle)}" if one.is_same else None


def most_telling(scan: HeadScan) -> list[DrawnStatistic]:
    """A few in which heads differ: what a terminal shows."""
    return _different(one for one in pictured(scan) if one.is_telling)[:MOST_PICTURES]


@dataclass(frozen=True)
class StandoutHead:
    """A head with the most of a statistic, and that in words."""

    head: HeadValue
    says: str
    middle: str


def standing_out(scan: HeadScan) -> list[StandoutHead]:
    """Heads far from the middle one: with most of a telling statistic, or looking most narrowly."""
    told = scan.known_for or scan.scalars
    found = []
    for one in _different(one for one in (shown(scan, name) for name in told) if one.is_telling):
        top = scan.top(one.name, 1)[0]
        if one.is_apart(top.value):
            found.append(_says(scan, one, top, one.definition.says))
        if one.definition.least:
            low = scan.top(one.name, 1, lowest=True)[0]
            if one.is_below(low.value):
                found.append(_says(scan, one, low, one.definition.least))
    return found


def _different(several: Iterable[DrawnStatistic]) -> list[DrawnStatistic]:
    """Without those that say the same again: the first token may be the only special one."""
    found: list[DrawnStatistic] = []
    for one in several:
        drawn = _digits(one)
        if all(_digits(other) != drawn for other in found):
            found.append(one)
    return found


def _digits(one: DrawnStatistic) -> list[list[str]]:
    return [["" if value != value else one.scale.short(value) for value in r] for r in one.rows]


def _says(scan: HeadScan, one: DrawnStatistic, head: HeadValue, phrase: str) -> StandoutHead:
    value, middle = one.long(head.value), one.long(one.middle)
    if one.name == WIDTH:
        value, middle = (f"about {_tokens(count)} tokens" for count in (head.value, one.middle))
        if scan.sequences == 1:
            value = f"about {_tokens(head.value)} of {scan.tokens:,} tokens"
    return StandoutHead(head, phrase.format(value), middle)


def _tokens(count: float) -> str:
    return f"{count:.1f}" if count < 9.95 else f"{count:,.0f}"


def _minus(text: str) -> str:
    return text.replace("-", "−")


def visible(text: str) -> str:
    """Text in which nothing is unseen: what cannot be printed is escaped, mere spaces are drawn.

    A control character would otherwise reach the reader's terminal, and do there what it does.
    """
    if text and not text.strip(" "):
        return "␣" * len(text)
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
