"""HTML page of scans: the viewer with its data, and the static form without script."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from headwise.reports import blobs as viewer_blobs
from headwise.reports import meta as viewer_meta
from headwise.reports.images import encode_base85
from headwise.reports.report import ScanReport
from headwise.reports.static_page import render_static_body, static_template_environment
from headwise.reports.templates import secure_page
from headwise.scanning.diff import ScanDiff
from headwise.scanning.result import HeadScan
from headwise.support.files import write_whole

DATA = "<!-- data -->"  # where the page leaves room for the data of the viewer
QUICK_LEVEL, QUICK_FROM = 6, 2**20  # zlib's level for blobs from so many bytes on; else 9


def save_scan_page(path: Path, *reports: ScanReport) -> Path:
    """Write the page of one report or several as a whole, and return its absolute path."""
    return write_whole(path, render_scan_page(*reports))


def render_scan_page(*reports: ScanReport) -> str:
    """Return the page as HTML: the viewer, its data, and the static form without script."""
    metas, blobs = zip(*map(viewer_data, reports), strict=True)
    several = len(reports) > 1
    named = {
        f"{number}:{name}" if several else name: blob
        for number, each in enumerate(blobs)
        for name, blob in each.items()
    }
    environment = static_template_environment()
    page = environment.get_template("viewer.html").render(
        reports=reports,
        version=reports[0].versions["headwise"],
        statics=[Markup(render_static_body(environment, report)) for report in reports],
        viewer_css=Markup(read_viewer_asset("viewer.css")),
    )
    data = _viewer_data_elements({"reports": list(metas)} if several else metas[0], named)
    return secure_page(page, script=read_viewer_asset("viewer.js")).replace(DATA, data, 1)


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
    maps = [
        [viewer_blobs.head_map_arrays(scan, layer) for layer in scan.layer_scans] for scan in scans
    ]
    # zlib releases the lock of the interpreter.
    with ThreadPoolExecutor() as pool:
        deflated = {
            name: pool.submit(_deflate_bytes, blob)
            for number, scan in enumerate(scans)
            for name, blob in viewer_blobs.scan_blobs(
                scan, maps[number], name_of=report.name_of, prefix=str(number)
            )
        }
        meta = viewer_meta.report_meta(report, maps)
    return meta, {name: blob.result() for name, blob in deflated.items()}


def read_viewer_asset(name: str) -> str:
    """Return the built script or style of the viewer."""
    return files("headwise.reports").joinpath("static", name).read_text("utf-8")


def _deflate_bytes(content: bytes) -> bytes:
    return zlib.compress(content, QUICK_LEVEL if len(content) >= QUICK_FROM else 9)


def _viewer_data_elements(meta: dict[str, Any], blobs: Mapping[str, bytes]) -> str:
    """Return elements with the data. No text in them can end an element or begin another."""
    words = json.dumps(meta, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        words = words.replace(character, f"\\u{ord(character):04x}")
    elements = [f'<script type="application/json" id="headwise-meta">{words}</script>']
    elements += [
        f'<script type="text/plain" data-blob="{name}">{encode_base85(blob)}</script>'
        for name, blob in blobs.items()
    ]
    return "\n".join(elements)
