"""HTML of single results for a notebook: a mask, an attention matrix, a layout, a difference."""

from __future__ import annotations

from markupsafe import escape

from headwise.attention_matrix import AttentionMatrix
from headwise.layouts.layout import Layout
from headwise.masks.mask import Mask
from headwise.reports import png_images
from headwise.reports.figures import clearest_change, diverging
from headwise.scanning.scan_diff import ScanDiff

UNKNOWN = 16  # queries of a mask that does not know how many there are
MOST_PAIRS = 2**22  # queries x keys of a mask that is drawn
MOST_WORK = 2**30  # queries x keys x heads x head_dim of a matrix that is computed to be drawn
CELLS = 32  # of a thumbnail on each side
MOST_HEADS = 8
MOST_CHANGES = 8
PIXELS = 96  # of a picture on each side


def mask_html(mask: Mask) -> str:
    """Return the drawing of the first sequence and head: yellow where a query may attend."""
    known = mask.known_sizes()
    queries = known["queries"] if known["queries"] > 1 else None
    size = queries or UNKNOWN
    if size * max(size, known["keys"]) > MOST_PAIRS:
        return _caption(f"{mask!r}")
    allowed = mask.dense(size)
    drawn = f"first sequence and head, {allowed.shape[0]} queries by {allowed.shape[1]} keys"
    picture = _picture(allowed.double().tolist(), f"mask of the {drawn}")
    return f"<figure>{picture}{_caption(f'{mask!r}: {drawn}')}</figure>"


def matrix_html(matrix: AttentionMatrix) -> str:
    """Return the weights of the first heads in blocks; of a large matrix the repr alone."""
    batch, heads, queries, keys = matrix.shape
    work = queries * keys * heads * matrix.q.shape[-1]
    if not batch * heads * queries * keys or work > MOST_WORK:
        return _caption(f"{matrix!r}")
    pooled = matrix.pool(min(CELLS, queries), min(CELLS, keys))[0, :MOST_HEADS].double()
    pictures = "".join(
        _picture(values.clamp(min=0).sqrt().tolist(), f"map of head {head}")
        for head, values in enumerate(pooled)
    )
    shown = f"heads 0 to {len(pooled) - 1} of the first sequence, in blocks"
    return f"<figure>{pictures}{_caption(f'{matrix!r}: {shown}')}</figure>"


def layout_html(layout: Layout) -> str:
    """Return a table of the stored tensors with their patterns, and the source."""
    rows = "".join(
        f"<tr><td style='text-align:left'><code>{escape(name)}</code></td>"
        f"<td style='text-align:left'><code>{escape(pattern)}</code></td></tr>"
        for name, pattern in layout.tensors.items()
    )
    head = (
        "<tr><th style='text-align:left'>tensor</th><th style='text-align:left'>pattern</th></tr>"
    )
    title = f"<b>{escape(layout.name)}</b>, {escape(layout.source)}"
    return f"<div>{title}<table><thead>{head}</thead><tbody>{rows}</tbody></table></div>"


def diff_html(diff: ScanDiff) -> str:
    """Return the heads that changed most, and a grid of the statistic that changed most."""
    rows = "".join(
        f"<tr><td>{change.layer_index}.{change.head}</td><td>{change.value:.3g}</td></tr>"
        for change in diff.top(n=MOST_CHANGES)
    )
    table = (
        f"<table><thead><tr><th>head</th><th>apart</th></tr></thead><tbody>{rows}</tbody></table>"
    )
    name = clearest_change(diff)
    grid = "" if name is None else _signed_grid(diff, name)
    return f"<div>{_caption(repr(diff))}{grid}{table}</div>"


def _signed_grid(diff: ScanDiff, name: str) -> str:
    change = diff[name]
    most = float(change.abs().nan_to_num().max()) or 1.0
    rows = "".join(
        f"<tr><th>{index}</th>{''.join(_cell(value, most) for value in row)}</tr>"
        for index, row in enumerate(change.tolist())
    )
    heads = "".join(f"<th>{head}</th>" for head in range(change.shape[1]))
    title = f"{escape(name.replace('_', ' '))}: change, from −{most:.3g} to {most:.3g}"
    return f"<div>{title}</div><table><tr><th></th>{heads}</tr>{rows}</table>"


def _cell(value: float, most: float) -> str:
    if value != value:
        return "<td>·</td>"
    colour = diverging(value / most)
    style = f"background:{png_images.css(colour)};color:{png_images.ink(colour)}"
    return f'<td style="{style}">{value:+.2g}</td>'


def _picture(rows: list[list[float]], words: str) -> str:
    image = png_images.positions_png(rows) if rows and rows[0] else ""
    size = f"width:{PIXELS}px;height:{PIXELS}px;image-rendering:pixelated;margin-right:4px"
    return f'<img src="{image}" alt="{escape(words)}" style="{size}">'


def _caption(words: str) -> str:
    return f"<figcaption><code>{escape(words)}</code></figcaption>"
