"""HTML of single results for a notebook: a mask, an attention matrix, a layout, a difference."""

from __future__ import annotations

from markupsafe import escape
from torch import nn

from headwise.layouts._layout import Layout
from headwise.masks.mask import Mask
from headwise.matrix.operator import AttentionMatrix
from headwise.reports import images, report
from headwise.scanning.diff import ScanDiff

UNKNOWN = 16  # queries of a mask that does not know how many there are
MOST_PAIRS = 2**22  # queries x keys of a mask that is drawn
MOST_WORK = 2**30  # queries x keys x heads x head_dim of a matrix that is computed to be drawn
MOST_CELLS = 96  # of the picture of a mask, on each side
CELLS = 32  # of a thumbnail on each side
MOST_HEADS = 8
PIXELS = 96  # of a picture on its longer side
LEAST_PIXELS = 12  # on its shorter side


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
