"""Results in a notebook: HTML of a mask, a matrix, a layout and a difference; and a widget.

The widget is the viewer: the page's script, with a kernel behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from markupsafe import escape
from torch import nn

from headwise.checkpoints.transformers import StoredTokenizer, find_tokenizer
from headwise.errors import OptionError
from headwise.layouts._layout import Layout
from headwise.masks.mask import Mask
from headwise.matrix.operator import AttentionMatrix
from headwise.reports import images, report
from headwise.reports.page import read_viewer_asset, viewer_data
from headwise.scanning._scan import ExactRows
from headwise.scanning.diff import ScanDiff
from headwise.scanning.layer import ScannedText
from headwise.scanning.result import HeadScan
from headwise.scanning.written import WrittenText
from headwise.support.lazy import require_package
from headwise.support.text import describe_value

UNKNOWN = 16  # queries of a mask that does not know how many there are
MOST_PAIRS = 2**22  # queries x keys of a mask that is drawn
MOST_WORK = 2**30  # queries x keys x heads x head_dim of a matrix that is computed to be drawn
MOST_CELLS = 96  # of the picture of a mask, on each side
CELLS = 32  # of a thumbnail on each side
MOST_HEADS = 8
PIXELS = 96  # of a picture on its longer side
LEAST_PIXELS = 12  # on its shorter side
MOST_KEYS = 64  # of an exact row that is sent
Reply = dict[str, Any]


def mask_html(mask: Mask) -> str:
    """Return the drawing of the first sequence and head: yellow where a query may attend."""
    known = mask.known_sizes()
    queries = known["queries"] if known["queries"] > 1 else None
    size = queries or UNKNOWN
    if size * max(size, known["keys"]) > MOST_PAIRS:
        return _caption_html(f"{mask!r}")
    allowed = mask.dense(size).double()
    rows, columns = allowed.shape
    if not rows * columns:
        return _caption_html(f"{mask!r}")
    drawn = f"first sequence and head, {rows} queries by {columns} keys, bright where allowed"
    blocks = (min(rows, MOST_CELLS), min(columns, MOST_CELLS))
    shares = nn.functional.adaptive_avg_pool2d(allowed[None], blocks)[0]
    picture = _image_html(shares.tolist(), f"mask of the {drawn}", shape=(rows, columns))
    return f"<figure>{picture}{_caption_html(f'{mask!r}: {drawn}')}</figure>"


def matrix_html(matrix: AttentionMatrix) -> str:
    """Return the weights of the first heads in blocks; of a large matrix the repr alone."""
    batch, heads, queries, keys = matrix.shape
    work = queries * keys * heads * matrix.q.shape[-1]
    if not batch * heads * queries * keys or work > MOST_WORK:
        return _caption_html(f"{matrix!r}")
    pooled = matrix.pool(min(CELLS, queries), min(CELLS, keys))[0, :MOST_HEADS].double()
    roots = pooled.clamp(min=0).sqrt().tolist()
    pictures = "".join(
        _image_html(rows, f"map of head {head}", shape=(queries, keys))
        for head, rows in enumerate(roots)
    )
    shown = f"heads 0 to {len(pooled) - 1} of the first sequence, in blocks"
    return f"<figure>{pictures}{_caption_html(f'{matrix!r}: {shown}')}</figure>"


def layout_html(layout: Layout) -> str:
    """Return a table of the stored tensors with their patterns, and the source."""
    left = "style='text-align:left'"
    rows = "".join(
        f"<tr><td {left}><code>{escape(name)}</code></td>"
        f"<td {left}><code>{escape(pattern)}</code></td></tr>"
        for name, pattern in layout.tensors.items()
    )
    head = f"<tr><th {left}>tensor</th><th {left}>pattern</th></tr>"
    title = f"<b>{escape(layout.name)}</b>, {escape(layout.source)}"
    return f"<div>{title}<table><thead>{head}</thead><tbody>{rows}</tbody></table></div>"


def diff_html(diff: ScanDiff) -> str:
    """Return a grid of the statistic that changed most, and the largest changes."""
    name = report.most_changed_statistic(diff)
    if name is None:
        return f"<div>{_caption_html(repr(diff))}{report.NO_CHANGE}</div>"
    change, end = diff[name], report.change_scale_end(diff, name)
    rows = "".join(
        f"<tr><th>{index}</th>{''.join(_table_cell_html(value, end) for value in row)}</tr>"
        for index, row in enumerate(change.tolist())
    )
    heads = "".join(f"<th>{head}</th>" for head in range(change.shape[1]))
    title = f"Change of {escape(diff.before.definition(name).label)}. A row is a layer, a column "
    title += f"a head. Colours: −{end:.3g} to {end:.3g}."
    grid = f"<div>{title}</div><table><tr><th></th>{heads}</tr>{rows}</table>"
    items = "".join(f"<li>{escape(change.sentence)}</li>" for change in diff.changes())
    largest = f"<div>{report.CHANGE_RULE}</div><ul>{items}</ul>" if items else report.NO_CHANGE
    return f"<div>{_caption_html(repr(diff))}{grid}{largest}</div>"


def _table_cell_html(value: float, end: float) -> str:
    if value != value:
        return "<td>·</td>"
    colour = report.diverging_colour(value / end)
    style = f"background:{images.css_colour(colour)};color:{images.text_colour_on(colour)}"
    words = f"{value:+.2g}".replace("-", "−") if value else "0"
    return f'<td style="{style}">{words}</td>'


def _image_html(rows: list[list[float]], words: str, *, shape: tuple[int, int]) -> str:
    image = images.viridis_grid_data_uri(rows) if rows and rows[0] else ""
    height, width = (max(LEAST_PIXELS, round(PIXELS * size / max(*shape, 1))) for size in shape)
    size = f"width:{width}px;height:{height}px;image-rendering:pixelated;margin-right:4px"
    return f'<img src="{image}" alt="{escape(words)}" style="{size}">'


def _caption_html(words: str) -> str:
    return f"<figcaption><code>{escape(words)}</code></figcaption>"


# ---- the widget ---------------------------------------------------------------------------------


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
    tokenizer = find_tokenizer(model) if name_of is None else None
    if tokenizer is not None:
        name_of = tokenizer.token_text
        scan = replace(scan, texts=tuple(_as_written(text, tokenizer) for text in scan.texts))
    shown_report = replace(report.ScanReport.of(scan, title=title, name_of=name_of), second=other)
    meta, blobs = viewer_data(shown_report)
    rows = None if model is None else ExactRows(model, inputs)
    widget = _widget_class()(meta=meta, blobs=blobs, computes_rows=rows is not None, height=height)
    opening, first = next(iter(meta["changes"]), meta["opening"]), report.first_head(scan)
    shown = first if opening is None else (opening["layer"], opening["head"])
    widget.selected_head = None if shown is None else list(shown)
    if rows is not None:

        def answer(widget: Any, message: Any, _buffers: Any) -> None:
            widget.send(answer_row_request(scan, rows, message))

        widget.on_msg(answer)
    return widget


def _as_written(text: ScannedText, tokenizer: StoredTokenizer) -> ScannedText:
    """Return a text with its characters where the scan did not get them, by the tokenizer."""
    sequences = []
    for ids, written in text.split():
        made = None if written is not None else tokenizer.write(ids.tolist())
        sequences.append(written if made is None else WrittenText(made[0], torch.tensor(made[1])))
    return text._replace(written=tuple(sequences))


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
