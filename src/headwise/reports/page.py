"""HTML page of scans: the viewer with its data, and the static form without script."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jinja2
import numpy as np
import torch
from markupsafe import Markup, escape

from headwise.errors import OptionError
from headwise.reports import blobs, changed, images
from headwise.reports import report as view
from headwise.reports.templates import secure_page, template_environment
from headwise.scanning.diff import APART, HeadChange, ScanDiff
from headwise.scanning.layer import LayerScan, StandoutHead
from headwise.scanning.links import find_strongest_link
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.maps import RANKS
from headwise.support.files import write_whole
from headwise.support.text import describe_count, describe_value, escape_unprintable

VERSION = 1  # of the data; viewer/src/contract.ts has the same
FIRST = ("previous_token", "induction", "one_key", "effective_keys", "separator")

Maps = Sequence[blobs.Array | None]
DATA = "<!-- data -->"  # where the page leaves room for the data of the viewer
QUICK_LEVEL, QUICK_FROM = 6, 2**20  # zlib's level for blobs from so many bytes on; else 9


def save_scan_page(path: Path, *reports: view.ScanReport) -> Path:
    """Write the page of one report or several as a whole, and return its absolute path."""
    return write_whole(path, render_scan_page(*reports))


def render_scan_page(*reports: view.ScanReport) -> str:
    """Return the page as HTML: the viewer, its data, and the static form without script."""
    metas, data = zip(*map(viewer_data, reports), strict=True)
    several = len(reports) > 1
    named = {
        f"{number}:{name}" if several else name: blob
        for number, each in enumerate(data)
        for name, blob in each.items()
    }
    environment = static_template_environment()
    static = environment.get_template("scan_static.html")
    page = environment.get_template("viewer.html").render(
        reports=reports,
        version=reports[0].versions["headwise"],
        statics=[Markup(static.render(_template_context(report))) for report in reports],
        viewer_css=Markup(read_viewer_asset("viewer.css")),
    )
    words = {"reports": list(metas)} if several else metas[0]
    meta = json.dumps(words, separators=(",", ":"), allow_nan=False)
    for character in "<>&":  # so that no text ends an element or begins another
        meta = meta.replace(character, f"\\u{ord(character):04x}")
    elements = [f'<script type="application/json" id="headwise-meta">{meta}</script>']
    elements += [
        f'<script type="text/plain" data-blob="{name}">{images.encode_base85(blob)}</script>'
        for name, blob in named.items()
    ]
    page = secure_page(page, script=read_viewer_asset("viewer.js"))
    return page.replace(DATA, "\n".join(elements), 1)


def render_scan(
    scan: HeadScan,
    *,
    title: str | None = None,
    name_of: Callable[[int], str] | None = None,
    top_keys: Literal["all", "standouts"] = "standouts",
) -> str:
    if top_keys not in ("all", "standouts"):
        saw = f"top_keys={describe_value(top_keys)}"
        raise OptionError(saw=saw, needed='"all" or "standouts"', do='top_keys="all"')
    report = view.ScanReport.of(scan, title=title, name_of=name_of)
    return render_scan_page(replace(report, top_keys=top_keys))


def render_diff(
    diff: ScanDiff,
    *,
    names: tuple[str, str],
    title: str | None = None,
    name_of: Callable[[int], str] | None = None,
) -> str:
    """Return the page of two scans: A is the one before, B the one after."""
    before, after = diff.before, diff.after
    assert isinstance(before, HeadScan)
    assert isinstance(after, HeadScan)
    is_matched = diff.assignment != tuple(layer.heads for layer in before.layer_scans)
    report = view.ScanReport.of(before, title=title, name_of=name_of)
    return render_scan_page(replace(report, second=after, match=is_matched, names=names))


def viewer_data(report: view.ScanReport) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the words and the deflated blobs of a report, for the viewer."""
    scans = [report.scan] if report.second is None else [report.scan, report.second]
    maps = [
        [blobs.head_map_arrays(scan, layer, most=most) for layer in scan.layer_scans]
        for scan, most in zip(scans, map(blobs.most_blocks_of_page, scans), strict=True)
    ]
    top_keys = []
    for scan in scans:
        heads = [standout.head for standout in view.standout_heads(scan)]
        heads += [x.before if scan is report.scan else x.after for x in _changed_heads(report)]
        chosen = {(head.layer_index, head.head) for head in heads}
        counted = blobs.count_top_keys(scan, None if report.top_keys == "all" else chosen)
        top_keys.append(counted)
    names_of = [report.name_of, report.second_name_of or report.name_of]
    # zlib releases the lock of the interpreter.
    with ThreadPoolExecutor() as pool:
        deflated = {
            name: pool.submit(_deflate_bytes, blob)
            for number, scan in enumerate(scans)
            for name, blob in blobs.scan_blobs(
                scan, maps[number], top_keys[number], name_of=names_of[number], prefix=str(number)
            )
        }
        meta = report_meta(report, maps, top_keys)
    return meta, {name: blob.result() for name, blob in deflated.items()}


def read_viewer_asset(name: str) -> str:
    return files("headwise.reports").joinpath("static", name).read_text("utf-8")


def _deflate_bytes(content: bytes) -> bytes:
    return zlib.compress(content, QUICK_LEVEL if len(content) >= QUICK_FROM else 9)


# ---- the data of the viewer in words -----------------------------------------------------------


def report_meta(
    report: view.ScanReport, maps: Sequence[Maps], top_keys: Sequence[blobs.TopKeyCounts]
) -> dict[str, Any]:
    """Return the data of a report in words; `maps` are those of the layers of each of its scans."""
    second, diff = report.second, report.diff
    scans = [report.scan] if second is None else [report.scan, second]
    each = zip(scans, report.names, maps, top_keys, strict=False)
    rule = view.RULE if diff is None else changed.RULE
    link = find_strongest_link(report.scan, report.name_of) if second is None else None
    return {
        "version": VERSION,
        "headwise": report.versions["headwise"],
        "title": report.title,
        "about": f"{report.about}: {report.sizes_text}.",
        "read": report.read,
        "chosen": report.chosen,
        "same": report.same_function.summary_sentences if report.same_function else "",
        "notes": list(report.all_notes),
        "missing": report.not_measured_sentences,
        "rule": f"{rule} {view.WEIGHTS}",
        "command": report.command,
        "files": list(report.files),
        "scans": [_scan_meta(report, *its) for its in each],
        "opening": link and dict(zip(("layer", "head", "token"), link, strict=True)),
        "matched": list(map(list, diff.assignment)) if diff is not None and report.match else None,
        "changes": [_change_meta(each) for each in _changed_heads(report)],
        "headline": "" if diff is None else changed.describe_total_change(diff),
    }


def _scan_meta(
    report: view.ScanReport, scan: HeadScan, name: str, maps: Maps, top_keys: blobs.TopKeyCounts
) -> dict[str, Any]:
    similar = report.similar_heads_sentences(scan)
    summaries = [layer.summaries.get(blobs.TOP_KEYS) for layer in scan.layer_scans]
    return {
        "name": name,
        "model": scan.model,
        "sequences": scan.sequences,
        "tokens": scan.tokens,
        "texts": [
            {
                "name": f"text {number}",
                "lengths": list(text.lengths),
                "names": [f"text {nth}" for nth in range(len(text.lengths))],
            }
            for number, text in enumerate(scan.texts)
        ],
        "layers": [
            _layer_meta(scan, *its)
            for its in zip(scan.layer_scans, maps, top_keys, similar, strict=True)
        ],
        "ranks": next((x["key"].shape[-1] for x in summaries if x is not None), RANKS),
        "reach": blobs.OFFSET_REACH if blobs.OFFSETS in scan.measured else None,
        "received": blobs.RECEIVED in scan.measured,
        "statistics": [
            _statistic_meta(scan, each) for each in _drawn_statistics(scan, report.diff)
        ],
        "standouts": [
            {
                "layer": standout.head.layer_index,
                "head": standout.head.head,
                "statistic": standout.statistic,
                "sentence": standout.sentence,
                "middle": standout.middle,
            }
            for standout in view.standout_heads(scan, report.name_of)
        ],
    }


def _drawn_statistics(scan: HeadScan, diff: ScanDiff | None) -> list[view.DrawnStatistic]:
    drawn = view.drawn_statistics(scan)
    if diff is None:
        return drawn
    both = [
        replace(each, scale=view.joint_scale(diff, each.name))
        if each.name in diff.scalars
        else each
        for each in drawn
    ]
    return [*both, *([view.total_change(diff)] if scan is diff.before else [])]


def _layer_meta(
    scan: HeadScan,
    layer: LayerScan,
    maps: blobs.Array | None,
    top_keys: Sequence[int],
    similar: str,
) -> dict[str, Any]:
    length = layer.summaries.get(blobs.MAP, {}).get("length")
    is_blank = [] if maps is None else [bool(math.isnan(values.sum())) for values in maps]
    return {
        "name": layer.name,
        "kind": layer.kind,
        "num_heads": layer.num_heads,
        "heads": list(layer.heads),
        "query_text": layer.query_text,
        "key_text": layer.key_text,
        "map": None if maps is None else list(maps.shape[1:]),
        "map_length": length.tolist() if length is not None else None,
        "blank": [position for position, blank in enumerate(is_blank) if blank],
        "top": list(top_keys),
        "similar": similar,
        "chunk": blobs.queries_of_chunk(
            sum(blobs.sequence_lengths_of_text(scan, layer.query_text))
        ),
    }


def _statistic_meta(scan: HeadScan, statistic: view.DrawnStatistic) -> dict[str, Any]:
    definition = statistic.definition
    rows = [
        [_round_number(statistic.rows[index][head]) for head in layer.heads]
        for index, layer in enumerate(scan.layer_scans)
    ]
    return {
        "name": statistic.name,
        "label": view.TOTAL if statistic.name == APART else definition.label,
        "heading": definition.heading,
        "unit": definition.unit,
        "formula": definition.formula,
        "excluded": definition.excluded,
        "source": definition.source,
        "kind": statistic.scale.kind,
        "low": statistic.scale.low,
        "high": statistic.scale.high,
        "least_change": _round_number(statistic.least_change_scale_end),
        "first": statistic.name in FIRST,
        "is_change": statistic.name == APART,
        "rows": rows,
    }


def _round_number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _changed_heads(report: view.ScanReport) -> list[HeadChange]:
    if report.diff is None:
        return []
    return changed.changed_heads(report.diff, n=changed.MOST_HEADS, names=report.names)


def _change_meta(change: HeadChange) -> dict[str, Any]:
    return {
        "layer": change.before.layer_index,
        "head": change.before.head,
        "statistic": change.statistic,
        "sentence": change.sentence,
    }


MOST_NUMBERS = 16  # heads of a layer up to which the grid has numbers
MOST_CARDS = 8
MOST_MAPS = 144  # heads up to which each has a map
CELLS = 64  # of a map on each side
MAP_COLOURS = 63  # of a map: a page of 144 heads is 0.2 MB smaller than with 255


class HeadCard(NamedTuple):
    """A head that stands out, with the reasons, and the weights to show beside them."""

    layer: int
    head: int
    reasons: list[StandoutHead]
    offsets: list[tuple[int, float]]
    outside: float  # the weight outside these offsets
    received: list[tuple[str, int, float]]


def render_static(report: view.ScanReport) -> str:
    """Return the static form as a page of its own, without script."""
    environment = static_template_environment()
    page = environment.get_template("scan.html").render(_template_context(report))
    return secure_page(page)


def render_in_frame(scan: HeadScan) -> str:
    """Return the static form in a frame for a notebook, so that styles do not mix."""
    page = escape(render_static(view.ScanReport.of(scan)))
    return f'<iframe srcdoc="{page}" width="100%" height="800" frameborder="0"></iframe>'


def static_template_environment() -> jinja2.Environment:
    environment = template_environment()
    environment.filters |= {
        "css": images.css_colour,
        "ink": images.text_colour_on,
        "image": lambda statistic: images.viridis_grid_data_uri(
            [[statistic.scale.position(value) for value in row] for row in statistic.rows]
        ),
    }
    return environment


def _template_context(report: view.ScanReport) -> dict[str, Any]:
    scan, cards = report.scan, standout_cards(report)
    maps = map_images(scan, cards)
    return {
        "report": report,
        "version": report.versions["headwise"],
        "scan": scan,
        "columns": view.drawn_statistics(scan),
        "grid": view.clearest_statistic(scan),
        "rule": view.RULE,
        "weights": view.WEIGHTS,
        "cards": cards,
        "changes": report.changes,
        "change_rule": view.CHANGE_RULE,
        "no_change": view.NO_CHANGE,
        "maps": maps,
        "num_maps": sum(len(each.pictures) for each in maps),
        "reach": blobs.OFFSET_REACH,
        "with_numbers": all(layer.num_heads <= MOST_NUMBERS for layer in scan.layer_scans),
        "definitions": [scan.definition(name) for name in scan.measured],
        "table": scan.table(),
        "gradient": Markup(images.css_gradient()),
        "describe_count": describe_count,
    }


def standout_cards(report: view.ScanReport) -> list[HeadCard]:
    scan, by_head = report.scan, dict[tuple[int, int], list[StandoutHead]]()
    for standout in report.standouts:
        position = (standout.head.layer_index, standout.head.head)
        by_head.setdefault(position, []).append(standout)
    received = scan[blobs.RECEIVED] if blobs.RECEIVED in scan.measured else None
    cards = []
    for (layer, head), reasons in list(by_head.items())[:MOST_CARDS]:
        record = scan.layer_scans[layer]
        has_offsets = blobs.OFFSETS in record.summaries
        offsets, outside = blobs.offset_weights(record, head) if has_offsets else ([], 0.0)
        rows = torch.zeros(0, 3) if received is None else received[layer, head]
        keys = [
            (escape_unprintable(text), key, weight)
            for key, text, weight in blobs.most_received_tokens(scan, layer, rows, report.name_of)
        ]
        cards.append(HeadCard(layer, head, reasons, offsets, outside, keys))
    return cards


class LayerMaps(NamedTuple):
    """The maps of a layer: pictures by head, and the tokens of a block in words."""

    pictures: dict[int, str]  # ``data:`` addresses
    blocks: str  # empty if the tokens are not known


def map_images(scan: HeadScan, cards: list[HeadCard]) -> list[LayerMaps]:
    """Return the maps of each layer; above `MOST_MAPS` heads, only of those that stand out."""
    shown = {(index, head) for _, index, head in scan.heads}
    if len(shown) > MOST_MAPS:
        shown = {(card.layer, card.head) for card in cards}
    layers = []
    for index, layer in enumerate(scan.layer_scans):
        heads = [head for head in layer.heads if (index, head) in shown]
        maps = blobs.head_map_arrays(scan, layer, most=CELLS) if heads else None
        if maps is None:
            layers.append(LayerMaps({}, ""))
            continue
        positions = np.sqrt(np.maximum(maps, 0))
        pictures = {
            head: images.viridis_grid_data_uri(
                positions[layer.heads.index(head)], colours=MAP_COLOURS
            )
            for head in heads
        }
        blocks = ""
        if (axes := blobs.map_axes(scan, layer, maps.shape[1:])) is not None:
            queries, keys = axes
            blocks = f"Queries of a block: {queries.words}. Keys of a block: {keys.words}."
            if queries.words == keys.words:
                blocks = f"Tokens of a block: {keys.words}."
            if queries.size == keys.size == 1:
                blocks = "One token a cell."
        layers.append(LayerMaps(pictures, blocks))
    return layers
