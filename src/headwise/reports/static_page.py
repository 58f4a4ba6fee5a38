"""A scan as a static page: heads that stand out, one grid, maps, a table. It runs no script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup, escape
from torch import Tensor

from headwise.reports import blobs
from headwise.reports.images import css_colour, css_gradient, text_colour_on, viridis_grid_data_uri
from headwise.reports.report import (
    RULE,
    WEIGHTS,
    ScanReport,
    clearest_statistic,
    drawn_statistics,
    standout_heads,
)
from headwise.reports.templates import secure_page, template_environment
from headwise.scanning.layer import StandoutHead
from headwise.scanning.result import HeadScan
from headwise.support.text import describe_count, escape_unprintable

MOST_NUMBERS = 16  # heads of a layer up to which the grid has numbers
MOST_CARDS = 8
MOST_MAPS = 144  # heads up to which each has a map
CELLS = 64  # of a map on each side
MAP_COLOURS = 63  # of a map: a page of 144 heads is 0.2 MB smaller than with 255


@dataclass(frozen=True)
class HeadCard:
    """A head that stands out, with the reasons, and the weights to show beside them."""

    layer: int
    head: int
    reasons: list[StandoutHead]
    offsets: list[tuple[int, float]]
    outside: float  # the weight outside these offsets
    received: list[tuple[str, int, float]]


def render_static(report: ScanReport) -> str:
    """Return the static form as a page of its own, without script."""
    environment = static_template_environment()
    page = environment.get_template("scan.html").render(_template_context(report))
    return secure_page(page)


def render_in_frame(scan: HeadScan) -> str:
    """Return the static form in a frame for a notebook, so that styles do not mix."""
    page = escape(render_static(ScanReport.of(scan)))
    return f'<iframe srcdoc="{page}" width="100%" height="800" frameborder="0"></iframe>'


def static_template_environment() -> jinja2.Environment:
    """Return the environment of the pages of scans, with its filters."""
    environment = template_environment()
    environment.filters |= {
        "css": css_colour,
        "ink": text_colour_on,
        "image": lambda statistic: viridis_grid_data_uri(
            [[statistic.scale.position(value) for value in row] for row in statistic.rows]
        ),
    }
    return environment


def render_static_body(environment: jinja2.Environment, report: ScanReport) -> str:
    """Return the static form as a part of another page."""
    return environment.get_template("scan_static.html").render(_template_context(report))


def _template_context(report: ScanReport) -> dict[str, Any]:
    scan, cards = report.scan, standout_cards(report)
    maps = map_images(scan, cards)
    return {
        "report": report,
        "version": report.versions["headwise"],
        "scan": scan,
        "columns": drawn_statistics(scan),
        "grid": clearest_statistic(scan),
        "rule": RULE,
        "weights": WEIGHTS,
        "cards": cards,
        "maps": maps,
        "shown_heads": [
            [head for head in layer.heads if (index, head) in maps]
            for index, layer in enumerate(scan.layer_scans)
        ],
        "reach": blobs.OFFSET_REACH,
        "with_numbers": all(layer.num_heads <= MOST_NUMBERS for layer in scan.layer_scans),
        "definitions": [scan.definition(name) for name in scan.measured],
        "table": scan.table(),
        "gradient": Markup(css_gradient()),
        "describe_count": describe_count,
    }


def standout_cards(report: ScanReport) -> list[HeadCard]:
    """Return a card for each head that stands out, with all of its reasons."""
    scan, by_head = report.scan, dict[tuple[int, int], list[StandoutHead]]()
    for standout in standout_heads(scan):
        position = (standout.head.layer_index, standout.head.head)
        by_head.setdefault(position, []).append(standout)
    received = scan[blobs.RECEIVED] if blobs.RECEIVED in scan.measured else None
    cards = []
    for (layer, head), reasons in list(by_head.items())[:MOST_CARDS]:
        record = scan.layer_scans[layer]
        has_offsets = blobs.OFFSETS in record.summaries
        offsets, outside = blobs.offset_weights(record, head) if has_offsets else ([], 0.0)
        keys = (
            [] if received is None else _most_received_keys(received[layer, head], report.name_of)
        )
        cards.append(HeadCard(layer, head, reasons, offsets, outside, keys))
    return cards


def map_images(scan: HeadScan, cards: list[HeadCard]) -> dict[tuple[int, int], str]:
    """Return the map of each head as a ``data:`` address, by (layer, head).

    Of a model with more than `MOST_MAPS` heads, only those that stand out have one.
    """
    heads = {(index, head) for _, index, head in scan.heads}
    if len(heads) > MOST_MAPS:
        heads = {(card.layer, card.head) for card in cards}
    images = {}
    for index, layer in enumerate(scan.layer_scans):
        shown = [head for head in layer.heads if (index, head) in heads]
        maps = blobs.head_map_arrays(scan, layer, most=CELLS) if shown else None
        if maps is None:
            continue
        positions = np.sqrt(np.maximum(maps, 0))
        for head in shown:
            images[index, head] = viridis_grid_data_uri(
                positions[layer.heads.index(head)], colours=MAP_COLOURS
            )
    return images


def _most_received_keys(
    rows: Tensor, name_of: Callable[[int], str] | None
) -> list[tuple[str, int, float]]:
    """Return (text, position, received weight) of the keys that receive most."""
    return [
        (escape_unprintable(text), key, weight)
        for key, text, weight in blobs.most_received_tokens(rows, name_of)
    ]
