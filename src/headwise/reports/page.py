"""HTML page of scans: the viewer with its data, and the static form without script."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from headwise.errors import MissingExtraError
from headwise.reports import blobs
from headwise.reports.images import encode_base85
from headwise.reports.report import (
    RULE,
    WEIGHTS,
    DrawnStatistic,
    ScanReport,
    drawn_statistics,
    standout_heads,
)
from headwise.reports.static_page import render_static_body, static_template_environment
from headwise.reports.templates import secure_page
from headwise.scanning.diff import ScanDiff
from headwise.scanning.layer import LayerScan
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.maps import RANKS
from headwise.support.files import write_whole

VERSION = 1  # of the data; viewer/src/contract.ts has the same
FIRST = ("previous_token", "induction", "first_token", "effective_keys", "separator")

Maps = Sequence[blobs.Array | None]
DATA = "<!-- data -->"  # where the page leaves room for the data of the viewer
QUICK_LEVEL, QUICK_FROM = 6, 2**20  # zlib's level for blobs from so many bytes on; else 9


def save_scan_page(path: Path, *reports: ScanReport) -> Path:
    """Write the page of one report or several as a whole, and return its absolute path."""
    return write_whole(path, render_scan_page(*reports))


def render_scan_page(*reports: ScanReport) -> str:
    """Return the page as HTML: the viewer, its data, and the static form without script."""
    metas, data = zip(*map(viewer_data, reports), strict=True)
    several = len(reports) > 1
    named = {
        f"{number}:{name}" if several else name: blob
        for number, each in enumerate(data)
        for name, blob in each.items()
    }
    environment = static_template_environment()
    page = environment.get_template("viewer.html").render(
        reports=reports,
        version=reports[0].versions["headwise"],
        statics=[Markup(render_static_body(environment, report)) for report in reports],
        viewer_css=Markup(read_viewer_asset("viewer.css")),
    )
    elements = _viewer_data_elements({"reports": list(metas)} if several else metas[0], named)
    return secure_page(page, script=read_viewer_asset("viewer.js")).replace(DATA, elements, 1)


def render_scan(
    scan: HeadScan, *, title: str | None = None, name_of: Callable[[int], str] | None = None
) -> str:
    """Return the page of a scan alone."""
    return render_scan_page(ScanReport.of(scan, title=title, name_of=name_of))


def render_diff(
    diff: ScanDiff,
    *,
    names: tuple[str, str],
    title: str | None = None,
    name_of: Callable[[int], str] | None = None,
) -> str:
    """Return the page of two scans: A is the later one, so that A − B is the difference."""
    before, after = diff.before, diff.after
    assert isinstance(before, HeadScan)
    assert isinstance(after, HeadScan)
    report = ScanReport.of(after, title=title, name_of=name_of)
    return render_scan_page(replace(report, second=before, names=(names[1], names[0])))


def viewer_data(report: ScanReport) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the words and the deflated blobs of a report, for the viewer."""
    scans = [report.scan] if report.second is None else [report.scan, report.second]
    maps = [[blobs.head_map_arrays(scan, layer) for layer in scan.layer_scans] for scan in scans]
    # zlib releases the lock of the interpreter.
    with ThreadPoolExecutor() as pool:
        deflated = {
            name: pool.submit(_deflate_bytes, blob)
            for number, scan in enumerate(scans)
            for name, blob in blobs.scan_blobs(
                scan, maps[number], name_of=report.name_of, prefix=str(number)
            )
        }
        meta = report_meta(report, maps)
    return meta, {name: blob.result() for name, blob in deflated.items()}


def read_viewer_asset(name: str) -> str:
    """Return the built script or style of the viewer."""
    return files("headwise.reports").joinpath("static", name).read_text("utf-8")


def _deflate_bytes(content: bytes) -> bytes:
    return zlib.compress(content, QUICK_LEVEL if len(content) >= QUICK_FROM else 9)


def _viewer_data_elements(meta: dict[str, Any], stored: Mapping[str, bytes]) -> str:
    """Return elements with the data. No text in them can end an element or begin another."""
    words = json.dumps(meta, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        words = words.replace(character, f"\\u{ord(character):04x}")
    elements = [f'<script type="application/json" id="headwise-meta">{words}</script>']
    elements += [
        f'<script type="text/plain" data-blob="{name}">{encode_base85(blob)}</script>'
        for name, blob in stored.items()
    ]
    return "\n".join(elements)


# ---- the data of the viewer in words -----------------------------------------------------------


def report_meta(report: ScanReport, maps: Sequence[Maps]) -> dict[str, Any]:
    """Return the data of a report in words; `maps` are those of the layers of each of its scans."""
    second = report.second
    scans = [report.scan] if second is None else [report.scan, second]
    each = zip(scans, report.names, maps, strict=False)
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
        "rule": f"{RULE} {WEIGHTS}",
        "command": report.command,
        "scans": [_scan_meta(scan, name, its_maps) for scan, name, its_maps in each],
        "matched": None if second is None else _matched_heads(report.scan, second),
    }


def _scan_meta(scan: HeadScan, name: str, maps: Maps) -> dict[str, Any]:
    drawn = drawn_statistics(scan)
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
            _layer_meta(scan, layer, its_maps)
            for layer, its_maps in zip(scan.layer_scans, maps, strict=True)
        ],
        "ranks": _count_stored_top_keys(scan),
        "reach": blobs.OFFSET_REACH if blobs.OFFSETS in scan.measured else None,
        "received": blobs.RECEIVED in scan.measured,
        "statistics": [_statistic_meta(scan, statistic) for statistic in drawn],
        "standouts": [
            {
                "layer": standout.head.layer_index,
                "head": standout.head.head,
                "statistic": standout.statistic,
                "sentence": standout.sentence,
                "middle": standout.middle,
            }
            for standout in standout_heads(scan)
        ],
    }


def _layer_meta(scan: HeadScan, layer: LayerScan, maps: blobs.Array | None) -> dict[str, Any]:
    is_blank = [] if maps is None else [bool(math.isnan(values.sum())) for values in maps]
    return {
        "name": layer.name,
        "kind": layer.kind,
        "num_heads": layer.num_heads,
        "heads": list(layer.heads),
        "query_text": layer.query_text,
        "key_text": layer.key_text,
        "map": None if maps is None else list(maps.shape[1:]),
        "blank": [position for position, blank in enumerate(is_blank) if blank],
        "top": blobs.heads_with_top_keys(scan, layer),
    }


def _count_stored_top_keys(scan: HeadScan) -> int:
    for layer in scan.layer_scans:
        if (summary := layer.summaries.get(blobs.TOP_KEYS)) is not None:
            return int(summary["key"].shape[-1])
    return RANKS


def _statistic_meta(scan: HeadScan, statistic: DrawnStatistic) -> dict[str, Any]:
    definition = statistic.definition
    rows = [
        [_round_number(statistic.rows[index][head]) for head in layer.heads]
        for index, layer in enumerate(scan.layer_scans)
    ]
    return {
        "name": statistic.name,
        "label": definition.label,
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
        "rows": rows,
    }


def _round_number(value: float) -> float | None:
    """Return six digits of a value, None where there is none."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _matched_heads(first: HeadScan, second: HeadScan) -> list[list[int]] | None:
    """Return for each head the head of the other scan that it is matched with, by layer.

    Without scipy, which assigns them, each head is compared with the same head.
    """
    try:
        diff = first.diff(second, match=True)
    except MissingExtraError:
        return None
    return [list(heads) for heads in diff.assignment]
