"""View model of scans and differences: sentences, columns, scales, text of values, heads.

Pages, terminals, figures and notebooks draw what stands here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib import metadata
from typing import Any, Literal

import torch
from torch import Tensor

from headwise.reports import blobs, images
from headwise.reports.images import RGB
from headwise.scanning.diff import APART, HeadChange, ScanDiff
from headwise.scanning.file import fields_of_statistic
from headwise.scanning.layer import (
    HEAD_DISTANCE,
    HeadValue,
    ScanReadings,
    StandoutHead,
    nearest_heads,
)
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.catalogue import PICTURED
from headwise.scanning.statistics.statistic import Definition
from headwise.support.text import describe_count, escape_unprintable, in_quotes

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
WIDTH = "effective_keys"  # as a number of tokens
ONE_KEY, FIRST_KEY = "one_key", "first_token"
# Shares that may be that of one key, by another name.
OF_ONE_KEY = (FIRST_KEY, "separator", "special")
LEAST_ON_ONE_KEY = 0.3  # of an attention sink: Gu et al. 2024, arXiv:2410.10781
SAME_SHARE = 1e-6  # the rounding between two sums of the same float32 weights
LONGEST_WORD = 32  # characters of a token in a sentence
RULE = (
    "A head stands out by a statistic if its value is the highest and at least twice that of the "
    "middle head, and for shares 5 percentage points more. It also stands out if it attends to the "
    "fewest tokens, and to at most half as many as the middle head. Of the heads that give over "
    "30 % of the weight of all queries to one key, the one that gives most is named too, whatever "
    "the middle head does; a query that cannot see the key counts with 0."
)
MOST_SIMILAR = 5  # heads that are listed as most similar to another
CHANGE_RULE = (
    "The largest changes come first, each as a part of the scale of its statistic: of 100 per cent "
    "for a share, else of the range of both scans. Values that one scan lacks come last."
)
NO_CHANGE = "Nothing has changed: every number of every head reads the same."
TOTAL = "total change"
LEAST_TOTAL = 0.1  # the least end of its scale, so that nearly equal scans look equal
_APART = Definition(
    name=APART,
    formula="mean over statistics of √(mean over entries of (a − b)²), beside the mean of the same "
    "over all pairs of heads of a layer: `ScanDiff.apart` in Python",
    unit="1 is the mean distance of two heads of a layer",
    excluded="statistics that compare the heads of a layer, or that name tokens",
    source="headwise",
    title="Total change",
)
TIME_WORDS = ("before", "after")  # names of scans that follow a value without "in"
# The ends and the middle of the diverging scale: ColorBrewer's BrBG, by Cynthia Brewer.
_LOW, _MIDDLE, _HIGH = (1, 102, 94), (245, 245, 245), (140, 81, 10)
LIBRARIES = ("headwise", "torch")


def library_versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in LIBRARIES}


@dataclass(frozen=True)
class SameFunction:
    """Comparison of headwise's layers with a model's own layers under the model's weights."""

    model: str
    layers: int  # the number of its attention layers
    shares: Mapping[str, float]  # the largest of the error budget, by name; the model's come last

    @property
    def holds(self) -> bool:
        """True if every layer is within the error budget."""
        return max(self.shares.values()) <= 1

    @property
    def summary_sentences(self) -> str:
        """The result and its figures, in three sentences."""
        *layers, encoder = self.shares
        verdict = (
            f"The same function. In all {self.layers} layers"
            if self.holds
            else f"Not the same function. In at least one of {self.layers} layers not all of"
        )
        shares = ", ".join(f"{name} {share:.2f}" for name, share in self.shares.items())
        return (
            f"{verdict} {' and '.join(layers)} with the weights of {self.model}, and {encoder}, "
            f"are within the error budget of the formula. The largest shares of it: {shares}."
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class ScanReport:
    """A scan with sentences on the model and its input."""

    scan: HeadScan
    title: str  # the name of the model
    about: str  # a phrase on its class, sizes and dtype
    read: str  # a phrase on the input
    chosen: str = ""  # sentences on the tokens that count as separators and as special
    notes: tuple[str, ...] = ()  # sentences on problems, shown before those of the scan
    name_of: Callable[[int], str] | None = None  # returns the text of a token
    versions: Mapping[str, str] = field(default_factory=library_versions)
    same_function: SameFunction | None = None
    command: str | None = None  # stores what each token of a head looks at, with {heads} for it
    # Whether the page has all stored keys of every query, or those of heads that stand out, and
    # the first key of others.
    top_keys: Literal["all", "standouts"] = "standouts"
    second: HeadScan | None = None  # the scan after this one, of the same layers and heads
    second_name_of: Callable[[int], str] | None = None  # of its tokens; `name_of` if None
    match: bool = False  # True to pair the heads of both by the least distance, else by number
    names: tuple[str, str] = ("A", "B")  # of the two scans
    saved: str | None = None  # the file of the scan

    @classmethod
    def of(
        cls,
        scan: HeadScan,
        *,
        title: str | None = None,
        name_of: Callable[[int], str] | None = None,
    ) -> ScanReport:
        """Return the report of a scan alone, for ``print`` and for a notebook."""
        return cls(
            scan=scan,
            title=title or scan.model,
            name_of=name_of,
            about=f"HeadScan of {describe_count(len(scan.measured), 'statistic')}",
            read=f"{describe_count(scan.sequences, 'sequence')}, "
            f"{describe_count(scan.tokens, 'token')}",
        )

    @cached_property
    def standouts(self) -> list[StandoutHead]:
        """The heads of the scan that stand out, with the words of their tokens."""
        return standout_heads(self.scan, self.name_of)

    @property
    def files(self) -> tuple[str, ...]:
        """The files of the scans, as the lines of Python on the page load them."""
        if self.second is not None:
            return tuple(f"{name}.safetensors" for name in self.names)
        return (self.saved or "scan.safetensors",)

    @property
    def all_notes(self) -> tuple[str, ...]:
        return (*self.notes, *self.scan.notes)

    @cached_property
    def diff(self) -> ScanDiff | None:
        """The change from this scan to the second one; None if there is one scan alone."""
        return None if self.second is None else self.scan.diff(self.second, match=self.match)

    @cached_property
    def changes(self) -> list[HeadChange]:
        """The largest changes from this scan to the second one; none if there is one alone."""
        return [] if self.diff is None else self.diff.changes(names=self.names)

    @property
    def num_heads(self) -> int:
        return sum(len(layer.heads) for layer in self.scan.layer_scans)

    @property
    def sizes_text(self) -> str:
        """``6 layers of 12 heads``."""
        counts = sorted({layer.num_heads for layer in self.scan.layer_scans})
        layers = describe_count(len(self.scan.layers), "layer")
        if not counts:
            return layers
        fewest = f"{counts[0]} to " if len(counts) > 1 else ""
        return f"{layers} of {fewest}{describe_count(counts[-1], 'head')}"

    @property
    def not_measured_sentences(self) -> list[str]:
        """Sentences on missing statistics, with the reason and the number of layers."""
        layers = self.scan.layer_scans
        missing = ((reason, name) for layer in layers for name, reason in layer.missing.items())
        groups: dict[tuple[str, int], list[str]] = {}
        for (reason, name), count in Counter(missing).items():
            groups.setdefault((reason, count), []).append(name)
        return [
            f"Not measured{'' if count == len(layers) else f' in {count} of {len(layers)} layers'}"
            f": {', '.join(self.scan.definition(name).label for name in names)} ({reason})."
            for (reason, count), names in groups.items()
        ]

    def similar_heads_sentences(self, scan: HeadScan) -> list[str]:
        """Return for each layer of a scan on how many queries its heads were compared.

        Or why they were not, and what measures the distances.
        """
        measures = "headwise.scan(model, inputs) measures them, and headwise scan MODEL_DIR."
        if self.command is not None:
            measures = f"This command measures them: {self.command.partition(' --top-keys')[0]}"
        sentences = []
        for layer, compared in zip(scan.layer_scans, scan.compared_queries, strict=True):
            if compared is not None:
                least, most, queries = compared
                some = f"{least:,}" if least == most else f"{least:,} to {most:,}"
                words = "every query" if least == queries else f"{some} of {queries:,} queries"
                sentences.append(f"Share of the weight that lies elsewhere, on {words}.")
            elif HEAD_DISTANCE in layer.missing:
                sentences.append(f"No distances to other heads ({layer.missing[HEAD_DISTANCE]}).")
            else:
                sentences.append(f"This scan holds no distances between heads. {measures}")
        return sentences

    @property
    def _similar_heads(self) -> list[dict[str, Any]]:
        scan, rows = self.scan, list[dict[str, Any]]()
        compared, places = scan.compared_queries, scan.heads
        distances = scan[HEAD_DISTANCE] if any(compared) else None
        for place, (_, layer, head) in enumerate(places):
            if distances is not None and (read := compared[layer]) is not None:
                nearest = nearest_heads(places, distances[layer, head], place, MOST_SIMILAR)
                similar = [
                    {"layer_index": other.layer, "head": other.head, "distance": other.distance}
                    for other in nearest
                ]
                queries = {"queries": read[0], "of_queries": read[2]}
                rows.append({"layer_index": layer, "head": head, **queries, "similar": similar})
        return rows

    def as_json(self) -> dict[str, Any]:
        """Return all but the pictures as JSON data; None where a head has no value."""
        scan, missing = self.scan, dict[str, list[str]]()
        for name in scan.names if scan.layers else ():
            if name not in scan.measured:
                missing.setdefault(scan.layer_scans[0].missing[name], []).append(name)
        return {
            "model": {"name": self.title, "class": scan.model, "about": self.about},
            "read": {"what": self.read, "sequences": scan.sequences, "tokens": scan.tokens},
            "chosen": self.chosen,
            "notes": list(self.all_notes),
            "missing": missing,
            "statistics": [fields_of_statistic(scan.definition(name)) for name in scan.scalars],
            "heads": [
                {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
                for row in scan.table()
            ],
            "similar_heads": self._similar_heads,
            **({} if self.second is None else self._changes_as_json()),
            "versions": dict(self.versions),
            **({"same_function": asdict(self.same_function)} if self.same_function else {}),
        }

    def _changes_as_json(self) -> dict[str, Any]:
        first, second = self.names
        rows = [
            {
                "layer_index": change.before.layer_index,
                "head": change.before.head,
                "other_head": change.after.head,
                "statistic": change.statistic,
                "first": None if math.isnan(change.before.value) else change.before.value,
                "second": None if math.isnan(change.after.value) else change.after.value,
                "size": change.size,
                "sentence": change.sentence,
            }
            for change in self.changes
        ]
        return {"compared": {"first": first, "second": second}, "changes": rows}


# ---- statistics, and heads that stand out --------------------------------------------------------


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
        real = [value for row in self.rows for value in row if value == value]
        forms = (self.scale.format_short, self.format_long)
        return len(real) > 1 and any(len(set(map(form, real))) == 1 for form in forms)

    def stands_out(self, value: float, *, of_one_key: float) -> bool:
        """True if the highest value is named by the `RULE`.

        ``of_one_key`` is the share that is named already, as that of one key, for the same head. A
        share that may hold it is left out if the rest would not stand out.
        """
        if self.name == ONE_KEY:
            return value > LEAST_ON_ONE_KEY
        if self.name in OF_ONE_KEY and value >= of_one_key * (1 - SAME_SHARE):
            value -= of_one_key
        more = value - self.middle
        least = 0.0 if self.scale.kind == "range" else LEAST_SHARE
        return more >= max(least, (FACTOR_APART - 1) * abs(self.middle)) and more > 0

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
    values, definition = scan[name], scan.definition(name)
    real = values[values.isfinite()]
    middle = float(real.median()) if real.numel() else float("nan")
    scale = _make_scale(scan, definition, real, middle)
    return DrawnStatistic(name, definition.heading, definition, values.tolist(), middle, scale)


def _make_scale(scan: HeadScan, definition: Definition, real: Tensor, middle: float) -> Scale:
    if definition.colour_scale != "range":
        return Scale(definition.colour_scale, 0.0, 1.0)
    if not real.numel():
        return Scale("range", 0.0, 0.0)
    if definition.name == "entropy":
        lengths = [length for text in scan.texts for length in text.lengths]
        return Scale("range", 0.0, math.log(max(2, *lengths, 0 if lengths else scan.tokens)))
    low, high = float(real.min()), float(real.max())
    missing = LEAST_SPAN * abs(middle) - (high - low)
    if missing > 0:
        low, high = low - missing / 2, high + missing / 2
    return Scale("range", low, high)


def drawn_statistics(scan: HeadScan) -> list[DrawnStatistic]:
    """Return every scalar of the scan, those of `PICTURED` first."""
    first = [name for name in PICTURED if name in scan.scalars]
    others = [name for name in scan.scalars if name not in first]
    return [drawn_statistic(scan, name) for name in [*first, *others]]


def statistics_whose_heads_differ(scan: HeadScan) -> list[DrawnStatistic]:
    """Return the statistics in whose picture heads differ."""
    reach = {s.definition.name: s.reach for s in scan.statistics if s.reach is not None}
    # No token is further away. The longest of several texts is no longer than all together.
    whole = {name for name, tokens in reach.items() if tokens >= scan.tokens - 1}
    return [
        statistic
        for statistic in drawn_statistics(scan)
        if not statistic.is_constant
        and not (statistic.name.startswith("within_") and statistic.name in whole)
    ]


def _use_minus_sign(text: str) -> str:
    return text.replace("-", "−")


def standout_heads(
    scan: HeadScan, name_of: Callable[[int], str] | None = None
) -> list[StandoutHead]:
    """Return the heads that stand out by the `RULE`; ``name_of`` returns the text of a token."""
    candidates = [
        drawn_statistic(scan, name) for name in scan.characterising_scalars or scan.scalars
    ]
    # Without those with the same picture, as where the first token is the only special one.
    distinct: dict[str, DrawnStatistic] = {}
    for statistic in candidates:
        if statistic.varies_enough or (statistic.name == ONE_KEY and len(scan.heads) > 1):
            short = statistic.scale.format_short
            texts = [["" if x != x else short(x) for x in row] for row in statistic.rows]
            distinct.setdefault(str(texts), statistic)
    heads, on_one_key = list[StandoutHead](), None
    for statistic in distinct.values():
        definition = statistic.definition
        for top in scan.top(statistic.name, 1):
            is_same = on_one_key is not None and on_one_key[:3] == top[:3]
            share = on_one_key.value if on_one_key is not None and is_same else 0.0
            if not statistic.stands_out(top.value, of_one_key=share):
                continue
            made = _make_standout_head(scan, statistic, top, definition.highest_value_phrase)
            if statistic.name == ONE_KEY:
                on_one_key, key = top, _describe_one_key(scan, top, name_of)
                made = replace(made, sentence=made.sentence.replace("one key", key))
            heads.append(made)
        if definition.least:
            low = scan.top(statistic.name, 1, lowest=True)[0]
            if 0 < FACTOR_APART * low.value <= statistic.middle:
                heads.append(_make_standout_head(scan, statistic, low, definition.least))
    return heads


def _describe_one_key(scan: HeadScan, head: HeadValue, name_of: Callable[[int], str] | None) -> str:
    """Return the key that receives most from a head: ``“[CLS]”, token 0``.

    Several texts have one key in common at most, the first.
    """
    layer = scan.layer_scans[head.layer_index]
    if scan.sequences > 1:
        if FIRST_KEY not in layer.summaries:
            return "one key of each text"
        first = float(scan[FIRST_KEY][head.layer_index, head.head])
        is_first = math.isclose(first, head.value, rel_tol=SAME_SHARE)
        return "the first token of each text" if is_first else "one key of each text"
    if blobs.RECEIVED not in layer.summaries:
        return "one key"
    rows = scan[blobs.RECEIVED][head.layer_index, head.head]
    key, word, _ = blobs.most_received_tokens(scan, head.layer_index, rows, name_of)[0]
    word = escape_unprintable(word)
    word = word if len(word) <= LONGEST_WORD else f"{word[:LONGEST_WORD]}…"
    return f"{in_quotes(word)}, token {key:,}" if word else f"token {key:,}"


def _make_standout_head(
    scan: HeadScan, statistic: DrawnStatistic, head: HeadValue, phrase: str
) -> StandoutHead:
    value, middle = statistic.format_long(head.value), statistic.format_long(statistic.middle)
    if statistic.name == WIDTH:
        value, middle = (
            f"about {format_token_count(count)} tokens" for count in (head.value, statistic.middle)
        )
        if scan.sequences == 1:
            value = f"about {format_token_count(head.value)} of {scan.tokens:,} tokens"
    return StandoutHead(head, phrase.format(value), middle, statistic.name)


def format_token_count(count: float) -> str:
    return f"{count:.1f}" if count < 9.95 else f"{count:,.0f}"


def clearest_statistic(scan: HeadScan) -> DrawnStatistic | None:
    """Return the statistic of the first head that stands out, else the first in which heads differ.

    None if heads differ in none.
    """
    if standouts := standout_heads(scan):
        return drawn_statistic(scan, standouts[0].statistic)
    return next((each for each in statistics_whose_heads_differ(scan) if each.varies_enough), None)


def first_head(scan: HeadScan, layer: int | None = None) -> tuple[int, int] | None:
    """Return (layer, head) of the head that is shown first: one that stands out, else the first."""
    if standouts := standout_heads(scan):
        head = standouts[0].head
        if layer in (None, head.layer_index):
            return head.layer_index, head.head
    heads = ((index, head) for _, index, head in scan.heads if layer in (None, index))
    return next(heads, None)


# ---- changes -------------------------------------------------------------------------------------


def largest_changes(diff: ScanDiff, *, n: int, names: tuple[str, str]) -> list[HeadChange]:
    """Return the largest changes as `ScanDiff.changes` does."""
    sizes = change_sizes(diff)
    ranked = [
        (is_missing(diff, name, head), -float(size[head]), order, head)
        for order, (name, size) in enumerate(sizes.items())
        for head in map(tuple, size.nan_to_num().nonzero().tolist())
    ]
    ordered, changes = list(sizes), list[HeadChange]()
    for _, size, order, head in sorted(ranked):
        if len(changes) >= n:
            break
        change = make_change(diff, ordered[order], head, -size, names)
        changes += [] if change is None else [change]
    return changes


def is_missing(diff: ScanDiff, name: str, head: tuple[int, ...]) -> bool:
    """True if one scan has no value of a statistic of a head; such a change comes last."""
    return bool(diff.before[name][head].isnan() or diff.partner_values(name)[head].isnan())


def change_sizes(diff: ScanDiff) -> dict[str, Tensor]:
    """Return the size of each change (layers, heads), by statistic; NaN where there is none."""
    sizes: dict[str, Tensor] = {}
    known: list[Tensor] = []
    scalars = [name for name in PICTURED if name in diff.scalars]
    for name in dict.fromkeys([*scalars, *diff.scalars]):
        pair = diff.before[name], diff.partner_values(name)
        both = torch.stack(pair)
        if any(torch.allclose(both, other, rtol=0, atol=0, equal_nan=True) for other in known):
            continue
        known.append(both)
        here, there = (values.isfinite() for values in pair)
        scale = joint_scale(diff, name)
        size = (pair[1] - pair[0]).abs() / max(scale.high - scale.low, 1e-12)
        size[here ^ there] = 1.0
        size[~(here.any(1) & there.any(1))] = torch.nan
        sizes[name] = size
    return sizes


def joint_scale(diff: ScanDiff, name: str) -> Scale:
    """Return one scale of a statistic for both scans."""
    scans = [scan for scan in (diff.before, diff.after) if scan[name].isfinite().any()]
    scales = [_drawn(scan, name).scale for scan in scans or [diff.before]]
    low, high = min(scale.low for scale in scales), max(scale.high for scale in scales)
    return Scale(scales[0].kind, low, high)


def _drawn(scan: ScanReadings, name: str) -> DrawnStatistic:
    assert isinstance(scan, HeadScan)
    return drawn_statistic(scan, name)


def make_change(
    diff: ScanDiff, name: str, head: tuple[int, int], size: float, names: tuple[str, str]
) -> HeadChange | None:
    """Return a change with its sentence; None if both values read the same."""
    layer, first = head
    record = diff.before.layer_scans[layer]
    second = diff.assignment[layer][record.heads.index(first)]
    values = [float(diff.before[name][head]), float(diff.after[name][layer, second])]
    drawn = _drawn(diff.before, name)
    words = ["no value" if math.isnan(x) else drawn.format_long(x) for x in values]
    if words[0] == words[1]:
        return None
    sides = [_name_side(*pair) for pair in zip(words, names, strict=True)]
    pair = f"layer {layer}, head {first}"
    if second != first:
        pair += f" ({_name_side(f'head {second}', names[1])})"
    return HeadChange(
        statistic=name,
        before=HeadValue(record.name, layer, first, values[0]),
        after=HeadValue(diff.after.layers[layer], layer, second, values[1]),
        size=size,
        sentence=f"{drawn.definition.label} of {pair}: {', '.join(sides)}",
    )


def _name_side(words: str, name: str) -> str:
    return f"{words} {name}" if name in TIME_WORDS else f"{words} in {name}"


def diverging_colour(position: float) -> RGB:
    """Return the colour of a position from −1 (teal) over 0 (white) to 1 (brown)."""
    share = min(1.0, abs(position))
    end = _HIGH if position > 0 else _LOW
    red, green, blue = (round(m + (e - m) * share) for m, e in zip(_MIDDLE, end, strict=True))
    return red, green, blue


def total_change(diff: ScanDiff) -> DrawnStatistic:
    """Return `ScanDiff.apart` as a picture, by the heads of the scan before."""
    values = diff.apart
    real = values[values.isfinite()]
    high = max([LEAST_TOTAL, *real.tolist()])
    middle = float(real.median()) if real.numel() else math.nan
    scale = Scale("range", 0.0, high)
    return DrawnStatistic(APART, TOTAL, _APART, values.tolist(), middle, scale)


def most_changed_statistic(diff: ScanDiff) -> str | None:
    """Return the scalar with the largest change beside the span of its scale; None without any."""
    most = {name: float(size.nan_to_num().max()) for name, size in change_sizes(diff).items()}
    return max(most, key=most.__getitem__) if any(most.values()) else None


def change_scale_end(diff: ScanDiff, name: str) -> float:
    """Return the end of the scale of a change: the largest, and at least the statistic's own."""
    least = _drawn(diff.before, name).least_change_scale_end
    return max([float(change) for change in diff[name].abs().nan_to_num().flatten()] + [least])
