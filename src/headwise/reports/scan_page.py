"""HTML page of a scan: every head of a model in pictures, numbers and words."""

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
from headwise.reports.page_templates import template_environment
from headwise.reports.wording import StandoutHead
from headwise.scanning.head_scan import HeadScan
from headwise.scanning.scan_schema import fields_of_statistic
from headwise.scanning.statistics.statistic import Summary
from headwise.scanning.statistics.view_statistics import map_pyramid
from headwise.support.atomic_write import write_whole
from headwise.support.message_text import describe_count

if TYPE_CHECKING:
    from headwise.study.experiments.same_weights import SameFunction

MOST_NUMBERS = 16  # heads of a layer up to which a picture has numbers
MOST_CARDS = 8
OFFSETS = "offset_profile"
RECEIVED = "most_received"
MAP = "map"
LIBRARIES = ("headwise", "torch")
TICKS = (0.0, 0.01, 0.1, 0.25, 0.5, 1.0)


@dataclass(frozen=True, eq=False, kw_only=True)
class ScanReport:
    """A scan with sentences on the model and its input.

    Attributes:
        scan: the scan.
        title: the name of the model.
        about: a phrase on its class, sizes and dtype.
        read: a phrase on the input.
        chosen: sentences on the tokens that count as separators and as special.
        notes: sentences on problems, shown before those of the scan.
        name_of: a function that returns the text of a token, if there is a tokenizer.
        versions: versions of the libraries.
        same_function: the comparison of headwise's layers with the model's own, if measured.
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
            about=f"HeadScan of {describe_count(len(scan.measured), 'statistic')}",
            read=f"{describe_count(scan.sequences, 'sequence')}, "
            f"{describe_count(scan.tokens, 'token')}",
        )

    @property
    def all_notes(self) -> tuple[str, ...]:
        """The notes of the report, then those of the scan."""
        return (*self.notes, *self.scan.notes)

    @property
    def num_heads(self) -> int:
        """Number of scanned heads in all layers."""
        return sum(len(layer.heads) for layer in self.scan.layer_scans)

    @property
    def sizes(self) -> str:
        """``6 layers of 12 heads``."""
        counts = sorted({layer.num_heads for layer in self.scan.layer_scans})
        layers = describe_count(len(self.scan.layers), "layer")
        if not counts:
            return layers
        fewest = f"{counts[0]} to " if len(counts) > 1 else ""
        return f"{layers} of {fewest}{describe_count(counts[-1], 'head')}"

    @property
    def missing(self) -> dict[str, list[str]]:
        """Names of the statistics that no layer has, by the reason."""
        reasons: dict[str, list[str]] = {}
        for name in self.scan.names:
            if self.scan.layers and name not in self.scan.measured:
                reasons.setdefault(self.scan.layer_scans[0].missing[name], []).append(name)
        return reasons

    @property
    def not_measured(self) -> list[str]:
        """Sentences on missing statistics, with the reason and the number of layers."""
        layers = self.scan.layer_scans
        missing = ((reason, name) for layer in layers for name, reason in layer.missing.items())
        groups: dict[tuple[str, int], list[str]] = {}
        for (reason, name), count in Counter(missing).items():
            groups.setdefault((reason, count), []).append(name)
        return [
            f"Not measured{'' if count == len(layers) else f' in {count} of {len(layers)} layers'}"
            f": {', '.join(names)} ({reason})."
            for (reason, count), names in groups.items()
        ]

    def as_json(self) -> dict[str, Any]:
        """Return all but the pictures as JSON data; None where a head has no value."""
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
    """A head that stands out, with the reasons, and the weights to show beside them."""

    layer: int
    head: int
    reasons: list[StandoutHead]
    offsets: list[tuple[int, float]]
    received: list[tuple[str, int, float]]


def save(report: ScanReport, path: Path) -> Path:
    """Write the page as a whole, and return its absolute path."""
    return write_whole(path, render(report))


def render(report: ScanReport) -> str:
    """Return the page as HTML."""
    scan = report.scan
    environment = template_environment()
    environment.filters |= {
        "css": png_images.css,
        "ink": png_images.ink,
        "image": lambda statistic: _png_image(statistic.rows, statistic.scale.position),
    }
    return environment.get_template("scan.html").render(
        report=report,
        version=report.versions["headwise"],
        scan=scan,
        pictured=wording.statistics_with_picture(scan),
        unpictured=wording.statistics_without_picture(scan),
        columns=wording.drawn_statistics(scan),
        rule=wording.RULE,
        cards=standout_cards(report),
        maps=map_images(scan),
        with_numbers=all(layer.num_heads <= MOST_NUMBERS for layer in scan.layer_scans),
        definitions=[scan.definition(name) for name in scan.measured],
        table=scan.table(),
        gradient=Markup(png_images.gradient()),
        ticks=[(weight, 100 * png_images.weight_position(weight)) for weight in TICKS],
        describe_count=describe_count,
    )


def render_in_frame(scan: HeadScan) -> str:
    """Return the page in a frame for a notebook, so that styles do not mix."""
    page = escape(render(ScanReport.of(scan)))
    return f'<iframe srcdoc="{page}" width="100%" height="800" frameborder="0"></iframe>'


def standout_cards(report: ScanReport) -> list[HeadCard]:
    """Return a card for each head that stands out, with all of its reasons."""
    scan, by_head = report.scan, dict[tuple[int, int], list[StandoutHead]]()
    for standout in wording.standout_heads(scan):
        position = (standout.head.layer_index, standout.head.head)
        by_head.setdefault(position, []).append(standout)
    offsets = scan[OFFSETS] if OFFSETS in scan.measured else None
    received = scan[RECEIVED] if RECEIVED in scan.measured else None
    return [
        HeadCard(
            layer,
            head,
            reasons,
            [] if offsets is None else _offset_weights(offsets[layer, head]),
            [] if received is None else _most_received(received[layer, head], report.name_of),
        )
        for (layer, head), reasons in list(by_head.items())[:MOST_CARDS]
    ]


def map_images(scan: HeadScan) -> dict[tuple[int, int], str]:
    """Return the map of each head as a ``data:`` address, by (layer, head)."""
    return {
        (index, head): _png_image(values.tolist(), png_images.weight_position)
        for index, layer in enumerate(scan.layer_scans)
        if MAP in layer.summaries
        for head, values in zip(layer.heads, _finest_map(layer.summaries[MAP]), strict=True)
    }


def _finest_map(summary: Summary) -> Tensor:
    """Return (heads, size, size): the finest map without gaps, which a short text leaves."""
    levels = map_pyramid(summary)
    complete = [size for size, values in levels.items() if bool(values.isfinite().all())]
    return levels[max(complete, default=max(levels))]


def _png_image(rows: list[list[float]], position: Callable[[float], float]) -> str:
    """Return an image with a pixel for each value; NaN is transparent."""
    return png_images.positions_png(
        [[None if value != value else position(value) for value in row] for row in rows]
    )


def _offset_weights(profile: Tensor) -> list[tuple[int, float]]:
    """Return (offset, weight) of each offset with a weight."""
    reach = len(profile) // 2
    return [(index - reach, x) for index, x in enumerate(profile.tolist()) if x == x]


def _most_received(
    rows: Tensor, name_of: Callable[[int], str] | None
) -> list[tuple[str, int, float]]:
    """Return (text, position, received weight) of the keys that receive most."""
    received = []
    for key, token, weight in rows.tolist()[:4]:
        if weight > 0:
            text = name_of(int(token)) if name_of is not None and token >= 0 else ""
            received.append((wording.escape_unprintable(text), int(key), weight))
    return received
