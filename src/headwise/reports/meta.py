"""Data of the viewer in words: layers, statistics with their scales, heads that stand out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from headwise.errors import MissingExtraError
from headwise.reports import blobs, statistics
from headwise.reports.report import ScanReport
from headwise.scanning.layer import LayerScan
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.maps import RANKS

VERSION = 1  # of the data; viewer/src/contract.ts has the same
FIRST = ("previous_token", "induction", "first_token", "effective_keys", "separator")

Maps = Sequence[blobs.Array | None]


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
        "rule": f"{statistics.RULE} {statistics.WEIGHTS}",
        "command": report.command,
        "scans": [_scan_meta(scan, name, its_maps) for scan, name, its_maps in each],
        "matched": None if second is None else _matched_heads(report.scan, second),
    }


def _scan_meta(scan: HeadScan, name: str, maps: Maps) -> dict[str, Any]:
    drawn = statistics.drawn_statistics(scan)
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
            for standout in statistics.standout_heads(scan)
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


def _statistic_meta(scan: HeadScan, statistic: statistics.DrawnStatistic) -> dict[str, Any]:
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
