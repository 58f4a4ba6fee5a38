"""The page of a scan: every head of a model in pictures, numbers and words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape
from torch import Tensor

from headwise.reports import png_images, wording
from headwise.reports.page_templates import templates
from headwise.reports.wording import StandoutHead
from headwise.scanning.head_scan import HeadScan
from headwise.scanning.scan_schema import fields_of_statistic
from headwise.scanning.statistics.statistic import Summary
from headwise.scanning.statistics.view_statistics import pyramid
from headwise.support.atomic_write import write_whole
from headwise.support.axes import many

if TYPE_CHECKING:
    from headwise.study.experiments.same_weights import SameFunction

MOST_NUMBERS = 16  # heads: numbers of more would not fit into a row
MOST_CARDS = 8
OFFSETS = "offset_profile"
RECEIVED = "most_received"
MAP = "map"
LIBRARIES = ("headwise", "torch")
TICKS = (0.0, 0.01, 0.1, 0.25, 0.5, 1.0)


@dataclass(frozen=True, eq=False, kw_only=True)
class ScanReport:
    """A scan with what is known of the model and of what it read.

    Attributes:
        scan: what was found.
        title: what the model is called.
        about: its class, sizes and dtype, in a sentence.
        read: what it read, in a sentence.
        chosen: which tokens count as separators and as special, in a sentence.
        notes: what is not as one would expect; those of the scan come on top.
        name_of: how a token is written; None where nobody knows.
        versions: what it was made with.
        same_function: whether headwise's layers give what the model's own give, where that was
            measured.
    """

    scan: HeadScan
    title: str
    about: str
    read: str
    chosen: str = ""
    notes: tuple[str, ...] = ()
    name_of: Callable[[int], str] | None = None
    versions: Mapping[str, str] = field(
        default_factory=lambda: {name: metadata.version(name) for name in LIBRARIES}
    )
    same_function: SameFunction | None = None

    @classmethod
    def of(cls, scan: HeadScan) -> ScanReport:
        """Return the report of a scan alone, for ``print`` and for a notebook."""
        return cls(
            scan=scan,
            title=scan.model,
            about=f"HeadScan of {many(len(scan.measured), 'statistic')}",
            read=f"{many(scan.sequences, 'sequence')}, {many(scan.tokens, 'token')}",
        )

    @property
    def all_notes(self) -> tuple[str, ...]:
        """Its own, those of the scan, and what no layer could have."""
        return (*self.notes, *self.scan.notes)

    @property
    def num_heads(self) -> int:
        """Heads of all layers that were looked at."""
        return sum(len(layer.heads) for layer in self.scan.layer_scans)

    @property
    def sizes(self) -> str:
        """``6 layers of 12 heads``."""
        counts = sorted({layer.num_heads for layer in self.scan.layer_scans})
        layers = many(len(self.scan.layers), "layer")
        heads = " to ".join(map(str, [*counts[:1], *counts[1:][-1:]]))
        return f"{layers} of {heads} heads" if counts else layers

    @property
    def missing(self) -> dict[str, list[str]]:
        """Why -> the statistics that no layer has for that reason."""
        reasons: dict[str, list[str]] = {}
        for name in self.scan.names:
            if self.scan.layers and name not in self.scan.measured:
                reasons.setdefault(self.scan.layer_scans[0].missing[name], []).append(name)
        return reasons

    @property
    def not_measured(self) -> list[str]:
        """Sentences on what is missing, with the reason and the number of layers."""
        layers = self.scan.layer_scans
        counts = Counter((why, name) for layer in layers for name, why in layer.missing.items())
        groups: dict[tuple[str, int], list[str]] = {}
        for (why, name), count in counts.items():
            groups.setdefault((why, count), []).append(name)
        return [
            f"Not measured{'' if count == len(layers) else f' in {count} of {len(layers)} layers'}"
            f": {', '.join(names)} ({why})."
            for (why, count), names in groups.items()
        ]

    def as_json(self) -> dict[str, Any]:
        """All but the pictures, as plain data; None where a head has no value."""
        scan = self.scan
        return {
            "model": {"name": self.title, "class": scan.model, "about": self.about},
            "read": {"what": self.read, "sequences": scan.sequences, "tokens": scan.tokens},
            "chosen": self.chosen,
            "notes": list(self.all_notes),
            "missing": self.missing,
            "statistics": [fields_of_statistic(scan.definition(name)) for name in scan.scalars],
            "heads": [
                {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
                for row in scan.table()
            ],
            "versions": dict(self.versions),
            **({"same_function": asdict(self.same_function)} if self.same_function else {}),
        }


@dataclass(frozen=True)
class HeadCard:
    """A head that stands out, with why."""

    layer: int
    head: int
    reasons: list[StandoutHead]
    offsets: list[tuple[int, float]]
    received: list[tuple[str, int, float]]


def save(report: ScanReport, path: Path) -> Path:
    """Write the page, whole or not at all. Returns its absolute path."""
    return write_whole(path, render(report))


def render(report: ScanReport) -> str:
    """The page as HTML."""
    scan = report.scan
    environment = templates()
    environment.filters |= {
        "css": png_images.css,
        "ink": png_images.ink,
        "image": lambda one: _image(one.rows, one.scale.position),
    }
    return environment.get_template("scan.html").render(
        report=report,
        version=report.versions["headwise"],
        scan=scan,
        shown=wording.pictured(scan),
        unpictured=wording.unpictured(scan),
        columns=wording.in_order(scan),
        rule=wording.RULE,
        cards=cards(report),
        maps=maps(scan),
        with_numbers=all(layer.num_heads <= MOST_NUMBERS for layer in scan.layer_scans),
        definitions=[scan.definition(name) for name in scan.measured],
        table=scan.table(),
        gradient=Markup(png_images.gradient()),
        ticks=[(weight, 100 * png_images.weight_position(weight)) for weight in TICKS],
        many=many,
    )


def framed(scan: HeadScan) -> str:
    """The page in a frame, for a notebook: its style stays its own."""
    page = escape(render(ScanReport.of(scan)))
    return f'<iframe srcdoc="{page}" width="100%" height="800" frameborder="0"></iframe>'


def cards(report: ScanReport) -> list[HeadCard]:
    """Each head that stands out once, with all of its reasons."""
    scan, found = report.scan, dict[tuple[int, int], list[StandoutHead]]()
    for one in wording.standing_out(scan):
        found.setdefault((one.head.layer_index, one.head.head), []).append(one)
    offsets = scan[OFFSETS] if OFFSETS in scan.measured else None
    received = scan[RECEIVED] if RECEIVED in scan.measured else None
    return [
        HeadCard(
            layer,
            head,
            reasons,
            [] if offsets is None else _around(offsets[layer, head]),
            [] if received is None else _received(received[layer, head], report.name_of),
        )
        for (layer, head), reasons in list(found.items())[:MOST_CARDS]
    ]


def maps(scan: HeadScan) -> dict[tuple[int, int], str]:
    """(layer, head) -> a picture of its weights, as a ``data:`` address."""
    return {
        (index, head): _image(values.tolist(), png_images.weight_position)
        for index, layer in enumerate(scan.layer_scans)
        if MAP in layer.summaries
        for head, values in zip(layer.heads, _finest(layer.summaries[MAP]), strict=True)
    }


def _finest(summary: Summary) -> Tensor:
    """(heads, size, size): as fine as can be without the gaps that a short text leaves."""
    levels = pyramid(summary)
    whole = [size for size, values in levels.items() if bool(values.isfinite().all())]
    return levels[max(whole, default=max(levels))]


def _image(rows: list[list[float]], position: Callable[[float], float]) -> str:
    """A pixel for each value, as a ``data:`` address; clear where there is none."""
    return png_images.positions_png(
        [[None if value != value else position(value) for value in row] for row in rows]
    )


def _around(profile: Tensor) -> list[tuple[int, float]]:
    """(offset, weight), where there is a weight."""
    reach = len(profile) // 2
    return [
        (place - reach, value) for place, value in enumerate(profile.tolist()) if value == value
    ]


def _received(rows: Tensor, name_of: Callable[[int], str] | None) -> list[tuple[str, int, float]]:
    """(how it is written, its place, what it receives) of the keys that receive most."""
    found = []
    for key, token, weight in rows.tolist()[:4]:
        if weight > 0:
            known = name_of is not None and token >= 0
            name = wording.visible(name_of(int(token))) if known and name_of else ""
            found.append((name, int(key), weight))
    return found
