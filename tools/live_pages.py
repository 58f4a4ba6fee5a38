"""Live pages of the viewer in the documentation; ``tools.site`` puts them into the site."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from headwise import scan
from headwise.cli.scan import ScanOptions, run_scan_with_progress
from headwise.errors import MissingExtraError
from headwise.models import minilm, tiny
from headwise.reports.page import render_scan_page
from headwise.reports.report import ScanReport
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.maps import TopKeysOfEveryQuery
from headwise.scanning.statistics.statistic import TileStatistic

HEADS, TWO_MODELS = "live/heads.html", "live/two-models.html"
CHANGED = (2, 0)  # the layer and the head that attends evenly in the second model
CODE = """def attend(q, k, v):
    scores = q @ k.transpose(-2, -1)
    weights = scores.softmax(-1)
    return weights @ v

def attend_causal(q, k, v, mask):
    scores = q @ k.transpose(-2, -1)
    weights = scores.masked_fill(mask, -inf).softmax(-1)
    return weights @ v
"""


def render_heads() -> str:
    """Return the page of the trained encoder and of the small model; of the latter if alone."""
    with TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        reports = [run_scan_with_progress(ScanOptions(demo=True, page=page))]
        try:
            options = ScanOptions(model_dir=minilm.model_folder(), page=page)
            encoder = replace(run_scan_with_progress(options), title="all-MiniLM-L6-v2")
            reports.insert(0, encoder)
        except MissingExtraError:
            pass
    return render_scan_page(*(replace(report, command=None) for report in reports))


def scan_code(*, changed: bool) -> HeadScan:
    """Scan the small model on code; with ``changed``, one head attends evenly."""
    model: Any = tiny.load()
    layer, head = CHANGED
    if changed:
        attention = model.blocks[layer].attention
        width = attention.head_dim
        with torch.no_grad():
            attention.q_proj.weight[head * width : (head + 1) * width] = 0
    wanted: list[str | TileStatistic] = ["standard", TopKeysOfEveryQuery()]
    return scan(model, tiny.encode(CODE)[None], statistics=wanted)


def render_two_models() -> str:
    """Return the page of the small model beside a copy of which one head attends evenly."""
    before, after = (scan_code(changed=changed) for changed in (False, True))
    report = ScanReport.of(before, title="The small model", name_of=tiny.name_of)
    return render_scan_page(replace(report, second=after, names=("trained", "changed")))
