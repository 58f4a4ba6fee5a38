"""Figures of a scan by matplotlib, for a paper: a grid of heads, a map, weights by offset."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headwise.errors import OptionError
from headwise.reports import viewer_blobs, wording
from headwise.reports.png_images import RGB
from headwise.scanning.head_scan import HeadScan
from headwise.scanning.scan_diff import ScanDiff
from headwise.support.message_text import describe_value
from headwise.support.optional_imports import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = ("grid", "map", "profile")
ROW = 0.2  # inches of a layer in a grid
PROFILE_HEIGHT = 1.6  # inches
# Text that stays text, so that a journal can set and search it.
STYLE = {
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.fonttype": "none",
    "font.size": 8,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
}
# The ends and the middle of the diverging scale: ColorBrewer's BrBG, by Cynthia Brewer.
_LOW, _MIDDLE, _HIGH = (1, 102, 94), (245, 245, 245), (140, 81, 10)


def diverging(position: float) -> RGB:
    """Return the colour of a position from −1 (teal) over 0 (white) to 1 (brown)."""
    share = min(1.0, abs(position))
    end = _HIGH if position > 0 else _LOW
    red, green, blue = (round(m + (e - m) * share) for m, e in zip(_MIDDLE, end, strict=True))
    return red, green, blue


def clearest_change(diff: ScanDiff) -> str | None:
    """Return the scalar with the largest change beside the span of its scale; None without any."""
    best, most = None, 0.0
    for name in diff.scalars:
        assert isinstance(diff.before, HeadScan)
        scale = wording.drawn_statistic(diff.before, name).scale
        change = float(diff[name].abs().nan_to_num().max()) / max(scale.high - scale.low, 1e-12)
        if change > most:
            best, most = name, change
    return best


def plot_scan(
    scan: HeadScan,
    *,
    kind: str,
    layer: int | None,
    head: int | None,
    statistic: str | None,
    ax: Any,
    width: float,
) -> Figure:
    """Draw a scan as `HeadScan.plot` says."""
    if kind not in KINDS:
        raise OptionError(
            saw=f"kind={describe_value(kind)}",
            needed=f"one of {', '.join(map(repr, KINDS))}",
            do='scan.plot("map", layer=1, head=0)',
        )
    with _style():
        if kind == "grid":
            return _grid(scan, statistic, ax, width)
        layer, head = _chosen_head(scan, layer, head)
        draw = _map if kind == "map" else _profile
        return draw(scan, layer, head, ax, width)


def plot_diff(diff: ScanDiff, *, statistic: str | None, ax: Any, width: float) -> Figure:
    """Draw the change of a statistic as `ScanDiff.plot` says."""
    name = statistic or clearest_change(diff)
    if name is None or name not in diff.scalars:
        raise OptionError(
            saw=f"statistic={describe_value(statistic)}",
            needed=f"one number for each head that both scans have: {', '.join(diff.scalars)}",
            do="choose from these",
        )
    change = diff[name].numpy()
    most = float(np.nanmax(np.abs(change), initial=1e-9))
    colours = _matplotlib("colors")
    steps = np.linspace(-1, 1, 255)
    scale = colours.ListedColormap([np.array(diverging(step)) / 255 for step in steps])
    with _style():
        figure, axes = _axes(ax, width, ROW * len(change) + 0.6)
        image = axes.imshow(change, cmap=scale, vmin=-most, vmax=most, aspect="auto")
        _finish_grid(figure, axes, image, f"change of {name.replace('_', ' ')}")
    return figure


def _chosen_head(scan: HeadScan, layer: int | None, head: int | None) -> tuple[int, int]:
    standouts = wording.standout_heads(scan)
    first = standouts[0].head if standouts else None
    heads = [(index, number) for _, index, number in scan.heads]
    if layer is None:
        layer = first.layer_index if first else heads[0][0] if heads else 0
    if head is None:
        is_there = first is not None and first.layer_index == layer
        of_layer = [number for index, number in heads if index == layer]
        head = first.head if first and is_there else of_layer[0] if of_layer else 0
    if (layer, head) not in heads:
        raise OptionError(
            saw=f"layer={layer}, head={head}",
            needed=f"a head of the scan: it has {len(scan.layers)} layers and {len(heads)} heads",
            do='scan.plot("map", layer=0, head=0)',
        )
    return layer, head


def _matplotlib(module: str) -> Any:
    return require(f"matplotlib.{module}", purpose="which draws figures", pip="matplotlib")


def _style() -> Any:
    """Return a context in which text has the size of a paper, and stays text."""
    _matplotlib("figure")
    return require("matplotlib", purpose="which draws figures", pip="matplotlib").rc_context(STYLE)


def _axes(ax: Any, width: float, height: float) -> tuple[Figure, Axes]:
    """Return the axes to draw into; a new figure keeps no state of pyplot."""
    if ax is not None:
        return ax.figure, ax

    class PaperFigure(_matplotlib("figure").Figure):  # type: ignore[misc]
        """A figure whose files hold its text as text."""

        def savefig(self, *given: Any, **named: Any) -> None:
            with _style():
                super().savefig(*given, **named)

        def _repr_png_(self) -> bytes:
            """Return the picture that a notebook shows, also without pyplot."""
            buffer = BytesIO()
            self.savefig(buffer, format="png", dpi=150)
            return buffer.getvalue()

    figure = PaperFigure(figsize=(width, height), layout="compressed")
    return figure, figure.add_subplot()


def _grid(scan: HeadScan, statistic: str | None, ax: Any, width: float) -> Figure:
    if statistic is not None and statistic not in scan.scalars:
        raise OptionError(
            saw=f"statistic={describe_value(statistic)}",
            needed=f"one number for each head: {', '.join(scan.scalars)}",
            do="choose from these",
        )
    clearest = wording.clearest_statistic(scan)
    name = statistic or (clearest.name if clearest else scan.scalars[0])
    drawn = wording.drawn_statistic(scan, name)
    values = scan[name].numpy()
    figure, axes = _axes(ax, width, ROW * len(values) + 0.6)
    low, high = drawn.scale.low, drawn.scale.high
    norm = _norm(low, max(high, low + 1e-9), power=0.5 if drawn.scale.kind == "weight" else 1.0)
    image = axes.imshow(values, cmap="viridis", norm=norm, aspect="auto")
    _finish_grid(figure, axes, image, drawn.definition.label)
    return figure


def _finish_grid(figure: Figure, axes: Axes, image: Any, label: str) -> None:
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    figure.colorbar(image, ax=axes, label=label)


def _norm(low: float = 0.0, high: float = 1.0, *, power: float = 0.5) -> Any:
    """Return a scale of colours; that of weights follows the square root, as on the page."""
    return _matplotlib("colors").PowerNorm(power, low, high)


def _map(scan: HeadScan, layer: int, head: int, ax: Any, width: float) -> Figure:
    record = scan.layer_scans[layer]
    maps = viewer_blobs.head_maps(scan, record)
    if maps is None:
        raise _missing_statistic(viewer_blobs.MAP)
    values = maps[record.heads.index(head)]
    figure, axes = _axes(ax, width, width * 0.86)
    lengths = [
        max(viewer_blobs.lengths_of(scan, text), default=size)
        for text, size in zip((record.query_text, record.key_text), values.shape, strict=True)
    ]
    extent = (0, lengths[1], lengths[0], 0)
    image = axes.imshow(
        values, cmap="viridis", norm=_norm(), extent=extent, interpolation="nearest"
    )
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    axes.set_title(f"layer {layer}, head {head}")
    figure.colorbar(image, ax=axes, label="weight", fraction=0.046)
    return figure


def _profile(scan: HeadScan, layer: int, head: int, ax: Any, width: float) -> Figure:
    record = scan.layer_scans[layer]
    if viewer_blobs.OFFSETS not in record.summaries:
        raise _missing_statistic(viewer_blobs.OFFSETS)
    *weights, inside = viewer_blobs.offset_profiles(record)[record.heads.index(head)].tolist()
    reach = len(weights) // 2
    figure, axes = _axes(ax, width, PROFILE_HEIGHT)
    offsets = torch.arange(-reach, reach + 1).numpy()
    axes.bar(offsets, np.nan_to_num(np.array(weights)), color="#1b716d", width=0.8)
    axes.set_ylim(0, 1)
    axes.set_xlabel("offset of the key from the query")
    axes.set_ylabel("weight")
    axes.set_title(f"layer {layer}, head {head}: {max(0, 1 - inside):.0%} outside")
    return figure


def _missing_statistic(name: str) -> OptionError:
    return OptionError(
        saw=f"a scan without {name}",
        needed=f"the statistic {name}",
        do=f'headwise.scan(model, inputs, statistics=["{name}"])',
    )
