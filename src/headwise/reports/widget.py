"""The viewer as a widget of a notebook: the page's script, with a kernel behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from headwise.errors import OptionError
from headwise.reports.page import read_viewer_asset, viewer_data
from headwise.reports.report import ScanReport, first_head
from headwise.scanning._scan import ExactRows
from headwise.scanning.result import HeadScan
from headwise.support.lazy import require_package
from headwise.support.text import describe_value

MOST_KEYS = 64  # of an exact row that is sent
Reply = dict[str, Any]


def view_scan(
    scan: HeadScan,
    *,
    model: Any,
    inputs: Any,
    other: HeadScan | None,
    title: str | None,
    name_of: Callable[[int], str] | None,
    height: int,
) -> Any:
    """Return the widget as `HeadScan.view` says."""
    if (model is None) != (inputs is None):
        raise OptionError(
            saw="model without inputs" if inputs is None else "inputs without model",
            needed="both, so that the kernel can compute rows; or neither",
            do="scan.view(model=model, inputs=ids)",
        )
    report = replace(ScanReport.of(scan, title=title, name_of=name_of), second=other)
    meta, blobs = viewer_data(report)
    rows = None if model is None else ExactRows(model, inputs)
    widget = _widget_class()(meta=meta, blobs=blobs, computes_rows=rows is not None, height=height)
    opening, first = next(iter(meta["changes"]), meta["opening"]), first_head(scan)
    shown = first if opening is None else (opening["layer"], opening["head"])
    widget.selected_head = None if shown is None else list(shown)
    if rows is not None:

        def answer(widget: Any, message: Any, _buffers: Any) -> None:
            widget.send(answer_row_request(scan, rows, message))

        widget.on_msg(answer)
    return widget


def answer_row_request(scan: HeadScan, rows: ExactRows, message: Any) -> Reply:
    number, layer, head, sequence, query = message["row"]
    if number:
        return {"id": message["id"], "refused": "the model is that of the first scan"}
    try:
        weights = rows.row(scan.layers[layer], head, sequence=sequence, query=query)
    except OptionError as error:
        return {"id": message["id"], "refused": error.saw}
    largest, keys = weights.topk(min(MOST_KEYS, len(weights)))
    some = largest > 0
    return {
        "id": message["id"],
        "keys": keys[some].tolist(),
        "weights": largest[some].double().tolist(),
    }


@cache
def _widget_class() -> type[Any]:
    reason = {"purpose": "which shows a widget", "pip": "'headwise[notebook]'"}
    anywidget, traitlets = (require_package(x, **reason) for x in ("anywidget", "traitlets"))
    base: Any = anywidget.AnyWidget

    class HeadViewer(base):  # type: ignore[misc]
        """The viewer. ``selected_head`` is [layer, head], and follows and moves the page."""

        _esm = read_viewer_asset("viewer.js")
        _css = read_viewer_asset("viewer.css")
        meta = traitlets.Dict().tag(sync=True)
        blobs = traitlets.Dict().tag(sync=True)
        computes_rows = traitlets.Bool(False).tag(sync=True)
        height = traitlets.Int(800).tag(sync=True)
        selected_head = traitlets.List(allow_none=True, default_value=None).tag(sync=True)

        @traitlets.validate("selected_head")  # type: ignore[untyped-decorator]
        def _require_head(self, proposal: Any) -> Any:
            head = proposal["value"]
            layers = self.meta["scans"][0]["layers"]
            heads = [(at, number) for at, layer in enumerate(layers) for number in layer["heads"]]
            if head is None or tuple(head) in heads:
                return head
            raise OptionError(
                saw=f"selected_head={describe_value(head)}",
                needed=f"[layer, head]: the scan has {len(layers)} layers and {len(heads)} heads",
                do="widget.selected_head = [0, 0]",
            )

    return HeadViewer
