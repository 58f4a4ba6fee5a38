"""Figures of a scan by matplotlib, for a paper: a grid of heads, a map, weights by offset."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.errors import OptionError
from headwise.reports import blobs, report
from headwise.scanning.diff import ScanDiff
from headwise.scanning.layer import LayerScan
from headwise.scanning.result import HeadScan
from headwise.support.lazy import require_package
from headwise.support.text import describe_value, escape_unprintable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = ("grid", "map", "profile")
ROW = 0.2  # inches of a layer in a grid
AROUND = 0.6  # inches above and below the rows of a grid
LEAST_HEIGHT = 1.5  # inches of a grid
PROFILE_HEIGHT = 1.6  # inches
LETTERS = 13  # of a label, in an inch
MOST_TICKS = 16
MOST_TOKENS = 48  # of a map with the text of each token beside it
MOST_LETTERS = 16  # of such a token

Names = Callable[[int], str]


def plot_diff(diff: ScanDiff, *, statistic: str | None, ax: Any, width: float) -> Figure:
    """Draw the change of a statistic as `ScanDiff.plot` says."""
    name = statistic or report.most_changed_statistic(diff) or next(iter(diff.scalars), None)
    if name not in diff.scalars:
        raise OptionError(
            saw=f"statistic={describe_value(statistic)}",
            needed=f"one number for each head that both scans have: {', '.join(diff.scalars)}",
            do="choose from these",
        )
    end = report.change_scale_end(diff, name)
    colours = _require_matplotlib("colors")
    steps = np.linspace(-1, 1, 255)
    scale = colours.ListedColormap(
        [np.array(report.diverging_colour(step)) / 255 for step in steps]
    )
    label, values = report.change_label(diff, name), diff[name].numpy()
    with _paper_text_style_context():
        return _draw_grid(values, label, ax, width, cmap=scale, vmin=-end, vmax=end)


def plot_scan(
    scan: HeadScan,
    *,
    kind: str,
    layer: int | str | None,
    head: int | None,
    statistic: str | None,
    name_of: Names | None,
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
    with _paper_text_style_context():
        if kind == "grid":
            return _plot_grid(scan, statistic, ax, width)
        layer, head = _choose_head(scan, layer, head)
        if kind == "map":
            return _plot_map(scan, layer, head, name_of, ax, width)
        return _plot_offset_profile(scan, layer, head, ax, width)


def _choose_head(scan: HeadScan, layer: int | str | None, head: int | None) -> tuple[int, int]:
    heads = [(index, number) for _, index, number in scan.heads]
    number = list(scan.layers).index(layer) if layer in scan.layers else layer
    first = report.first_head(scan, None if isinstance(number, str) else number) or (0, 0)
    number, head = first[0] if number is None else number, first[1] if head is None else head
    if isinstance(number, str) or (number, head) not in heads:
        raise OptionError(
            saw=f"layer={number!r}, head={head}",
            needed=f"a head of the scan: it has {len(scan.layers)} layers and {len(heads)} heads; "
            f"the first layer is 0, or {scan.layers[0]!r}",
            do='scan.plot("map", layer=0, head=0)',
        )
    return number, head


def _plot_grid(scan: HeadScan, statistic: str | None, ax: Any, width: float) -> Figure:
    if statistic is None:
        clearest = report.clearest_statistic(scan)
        statistic = clearest.name if clearest else next(iter(scan.scalars), None)
    if statistic not in scan.scalars:
        raise OptionError(
            saw=f"statistic={describe_value(statistic)}",
            needed=f"one number for each head: {', '.join(scan.scalars)}",
            do="choose from these",
        )
    drawn = report.drawn_statistic(scan, statistic)
    low, high = drawn.scale.low, drawn.scale.high
    norm = _make_colour_norm(
        low, max(high, low + 1e-9), power=0.5 if drawn.scale.kind == "weight" else 1.0
    )
    unit = drawn.unit if drawn.scale.kind == "range" else drawn.definition.unit.split(",")[0]
    label = f"{drawn.definition.label}, {unit}"
    return _draw_grid(scan[statistic].numpy(), label, ax, width, cmap="viridis", norm=norm)


def _draw_grid(values: Any, label: str, ax: Any, width: float, **colours: Any) -> Figure:
    height = max(LEAST_HEIGHT, ROW * len(values) + AROUND)
    figure, axes = _make_axes(ax, width, height)
    image = axes.imshow(values, aspect="auto", **colours)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(_whole_number_locator())
    figure.colorbar(image, ax=axes, label=_wrap_label(label, axes, figure))
    return figure


def _wrap_label(label: str, axes: Axes, figure: Figure) -> str:
    """Return the label of a colour bar in lines that are as long as the axes are high."""
    inches = axes.get_position().height * figure.get_figheight()
    return textwrap.fill(label, max(LETTERS, int(LETTERS * inches)))


def _plot_map(
    scan: HeadScan, layer: int, head: int, name_of: Names | None, ax: Any, width: float
) -> Figure:
    record = scan.layer_scans[layer]
    maps = blobs.head_map_arrays(scan, record)
    if maps is None:
        raise _missing_statistic_error(blobs.MAP)
    values = maps[record.heads.index(head)]
    figure, axes = _make_axes(ax, width, width * 0.86)
    # Texts of several lengths may have no token in common at a place of the map.
    sides = blobs.map_axes(scan, record, values.shape)
    extent, places = (0.0, 1.0, 1.0, 0.0), " (share of the text)"
    if sides is not None:
        down, across = (side.blocks * side.size - 0.5 for side in sides)
        extent, places = (-0.5, across, down, -0.5), ""
    image = axes.imshow(values, cmap="viridis", norm=_make_colour_norm(), extent=extent)
    axes.set_xlabel(f"key{places}")
    axes.set_ylabel(f"query{places}")
    axes.set_title(f"layer {layer}, head {head}")
    label, texts = _describe_map_cells(sides), scan.sequences
    if label == "weight" and name_of is not None and texts == 1:
        _label_axes_with_tokens(axes, scan, record, name_of)
    if sides is not None:
        _mark_short_ends(axes, sides)
    label += f", mean of {texts} texts" if texts > 1 else ""
    figure.colorbar(image, ax=axes, label=_wrap_label(label, axes, figure), fraction=0.046)
    return figure


def _describe_map_cells(sides: Sequence[blobs.MapAxis] | None) -> str:
    """Return what a cell of the map is."""
    if sides is None:
        return "weight of a block"
    if all(side.size == 1 for side in sides):
        return "weight"
    queries, keys = (side.words for side in sides)
    number, *end = keys.split(",")
    if queries == keys:
        return ",".join([f"weight of a block of {number} tokens", *end])
    return f"weight of a block of {queries} queries by {keys} keys"


def _mark_short_ends(axes: Axes, sides: Sequence[blobs.MapAxis]) -> None:
    """Draw a line beside the last block of an axis, if it is shorter than the others."""
    down, across = (_ends_of_last_block(side) for side in sides)
    line: dict[str, Any] = {"color": "#c43c00", "linewidth": 2, "clip_on": False}
    if across is not None:
        axes.plot(across, (-0.015, -0.015), transform=axes.get_xaxis_transform(), **line)
    if down is not None:
        axes.plot((1.015, 1.015), down, transform=axes.get_yaxis_transform(), **line)


def _ends_of_last_block(side: blobs.MapAxis) -> tuple[float, float] | None:
    first = (side.blocks - 1) * side.size - 0.5
    return (first, first + side.size) if side.has_short_end else None


def _label_axes_with_tokens(
    axes: Axes, scan: HeadScan, record: LayerScan, name_of: Names | None
) -> None:
    """Write the word of each token beside a map of few tokens, where words are known."""
    for axis, number in ((axes.xaxis, record.key_text), (axes.yaxis, record.query_text)):
        text = None if number is None else scan.texts[number]
        length = text.lengths[0] if text is not None and len(text.lengths) == 1 else 0
        if text is not None and length <= MOST_TOKENS:
            words = [escape_unprintable(text.word(0, n, name_of)) for n in range(length)]
            # A dollar sign would begin mathematics.
            shown = [word[:MOST_LETTERS].replace("$", r"\$") for word in words]
            if any(words):
                axis.set_ticks(range(length), shown)
    axes.tick_params("x", rotation=90)
    axes.tick_params(labelsize=min(8, 160 / max(1, len(axes.get_yticks()))))


def _plot_offset_profile(scan: HeadScan, layer: int, head: int, ax: Any, width: float) -> Figure:
    record = scan.layer_scans[layer]
    if blobs.OFFSETS not in record.summaries:
        raise _missing_statistic_error(blobs.OFFSETS)
    weights, outside = blobs.offset_weights(record, head)
    figure, axes = _make_axes(ax, width, PROFILE_HEIGHT)
    # A causal head has no later keys.
    last = blobs.OFFSET_REACH if any(weight for offset, weight in weights if offset > 0) else 0
    shown, by_offset = range(-blobs.OFFSET_REACH, last + 1), dict(weights)
    axes.bar(shown, [by_offset.get(offset, 0.0) for offset in shown], color="#1b716d", width=0.8)
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(_whole_number_locator())
    axes.set_xlabel("offset of the key from the query, tokens")
    axes.set_ylabel("weight")
    words = f"{100 * outside:.0f} % of the weight lies outside"
    axes.set_title(f"layer {layer}, head {head}; {words}")
    return figure


def _require_matplotlib(module: str) -> Any:
    return require_package(f"matplotlib.{module}", purpose="which draws figures", pip="matplotlib")


def _paper_text_style_context() -> Any:
    """Return a context in which text has the size of a paper, and stays text."""
    _require_matplotlib("figure")
    from headwise.reports.style import paper_style

    return paper_style()


def _make_axes(ax: Any, width: float, height: float) -> tuple[Figure, Axes]:
    """Return the axes to draw into; a new figure keeps no state of pyplot."""
    if ax is not None:
        return ax.figure, ax
    from headwise.reports.style import PaperFigure

    figure = PaperFigure(figsize=(width, height), layout="compressed")
    return figure, figure.add_subplot()


def _whole_number_locator() -> Any:
    return _require_matplotlib("ticker").MaxNLocator(MOST_TICKS, integer=True)


def _make_colour_norm(low: float = 0.0, high: float = 1.0, *, power: float = 0.5) -> Any:
    """Return a scale of colours; that of weights follows the square root, as on the page."""
    return _require_matplotlib("colors").PowerNorm(power, low, high)


def _missing_statistic_error(name: str) -> OptionError:
    return OptionError(
        saw=f"a scan without {name}",
        needed=f"the statistic {name}",
        do=f'headwise.scan(model, inputs, statistics=["{name}"])',
    )
