"""Figures of a scan by matplotlib, for a paper: a grid, a map, a token, weights by offset."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headwise.errors import OptionError
from headwise.reports import blobs, report
from headwise.scanning.diff import APART, ScanDiff
from headwise.scanning.layer import LayerScan
from headwise.scanning.links import Direction, TokenWeights, find_answer
from headwise.scanning.result import HeadScan
from headwise.support.lazy import require_package
from headwise.support.text import describe_value, escape_unprintable, in_quotes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = ("grid", "map", "profile", "token")
ROW = 0.2  # inches of a layer in a grid
AROUND = 0.6  # inches above and below the rows of a grid
LEAST_HEIGHT = 1.5  # inches of a grid
PROFILE_HEIGHT = 1.8  # inches
LETTERS = 13  # of a label, in an inch
TITLE_SIZE, TITLE_LETTERS = 8, 15  # points, and letters in an inch
MOST_TICKS = 16
MOST_TOKENS = 48  # of a map with the text of each token beside it
MOST_LETTERS = 16  # of such a token
POINTS = 48  # of all its tokens together, in an inch of the figure
WEIGHT_TICKS = (0, 0.01, 0.1, 0.25, 0.5, 1)  # of the scale of weights, as on the page
# The bars of a token: the largest weights from the least on, or a few where none reaches it.
MOST_BARS, FEW_BARS, LEAST_BAR = 16, 4, 0.01
BAR_ROW, AROUND_BARS = 0.18, 0.95  # inches
BAR_COLOUR = "#1b716d"


class _Canvas(NamedTuple):
    """Axes of the caller to draw into, or a new figure of a width in inches."""

    ax: Any
    width: float

    def make_axes(self, height: float) -> tuple[Figure, Axes]:
        """Return the axes to draw into; a new figure keeps no state of pyplot."""
        if self.ax is not None:
            return self.ax.figure, self.ax
        from headwise.reports.style import PaperFigure

        figure = PaperFigure(figsize=(self.width, height), layout="compressed")
        return figure, figure.add_subplot()

    def set_title(self, title: str, axes: Axes) -> None:
        wrapped = textwrap.fill(title, max(TITLE_LETTERS, int(TITLE_LETTERS * self.width)))
        if self.ax is None:
            axes.figure.suptitle(wrapped, fontsize=TITLE_SIZE)
        else:
            axes.set_title(wrapped)


def plot_diff(diff: ScanDiff, *, statistic: str | None, ax: Any, width: float) -> Figure:
    """Draw the change of a statistic as `ScanDiff.plot` says."""
    name = statistic or report.most_changed_statistic(diff) or next(iter(diff.scalars), None)
    models, canvas = (
        " to ".join(dict.fromkeys((diff.before.model, diff.after.model))),
        _Canvas(ax, width),
    )
    if name == APART:
        with _paper_text_style_context():
            return _draw_statistic(report.total_change(diff), models, canvas)
    if name not in diff.scalars:
        known = ", ".join((*diff.scalars, APART))
        raise OptionError(
            saw=f"statistic={describe_value(statistic)}",
            needed=f"one number for each head that both scans have: {known}",
            do="choose from these",
        )
    end = report.change_scale_end(diff, name)
    colours = _require_matplotlib("colors")
    steps = np.linspace(-1, 1, 255)
    scale = colours.ListedColormap(
        [np.array(report.diverging_colour(step)) / 255 for step in steps]
    )
    label, values = f"change of {diff.before.definition(name).label}", diff[name].numpy()
    with _paper_text_style_context():
        title = f"{models}: {label}"
        return _draw_grid(values, title, label, canvas, cmap=scale, vmin=-end, vmax=end)


def plot_scan(
    scan: HeadScan,
    *,
    kind: str,
    layer: int | str | None,
    head: int | None,
    statistic: str | None,
    ax: Any,
    width: float,
    **asked: Any,
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
            return _plot_grid(scan, statistic, _Canvas(ax, width))
        subject = _Head(scan, *_choose_head(scan, layer, head), _Canvas(ax, width), **asked)
        draw = {"map": subject.plot_map, "token": subject.plot_token}
        return draw.get(kind, subject.plot_offset_profile)()


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


def _plot_grid(scan: HeadScan, statistic: str | None, canvas: _Canvas) -> Figure:
    if statistic is None:
        clearest = report.clearest_statistic(scan)
        statistic = clearest.name if clearest else next(iter(scan.scalars), None)
    if statistic not in scan.scalars:
        raise OptionError(
            saw=f"statistic={describe_value(statistic)}",
            needed=f"one number for each head: {', '.join(scan.scalars)}",
            do="choose from these",
        )
    return _draw_statistic(report.drawn_statistic(scan, statistic), scan.model, canvas)


def _draw_statistic(drawn: report.DrawnStatistic, model: str, canvas: _Canvas) -> Figure:
    low, high, kind = drawn.scale.low, drawn.scale.high, drawn.scale.kind
    power = 0.5 if kind == "weight" else 1.0
    norm = _make_colour_norm(low, max(high, low + 1e-9), power=power)
    label = f"{drawn.definition.label}, {drawn.unit}"
    scale = {
        "ticks": [each for each in WEIGHT_TICKS if each != 0.01] if kind == "weight" else None,
        "format": _percent_format() if kind != "range" else None,
    }
    title, values = f"{model}: {drawn.definition.heading}", np.array(drawn.rows)
    return _draw_grid(values, title, label, canvas, scale, cmap="viridis", norm=norm)


def _draw_grid(
    values: Any,
    title: str,
    label: str,
    canvas: _Canvas,
    scale: Mapping[str, Any] = MappingProxyType({}),
    **colours: Any,
) -> Figure:
    figure, axes = canvas.make_axes(max(LEAST_HEIGHT, ROW * len(values) + AROUND))
    image = axes.imshow(values, aspect="auto", **colours)
    canvas.set_title(title, axes)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(_whole_number_locator())
    figure.colorbar(image, ax=axes, label=_wrap_label(label, axes, figure), **scale)
    return figure


def _wrap_label(label: str, axes: Axes, figure: Figure) -> str:
    inches = axes.get_position().height * figure.get_figheight()
    return textwrap.fill(label, max(LETTERS, int(LETTERS * inches)))


# ---- a map --------------------------------------------------------------------------------------


class _SideInSight(NamedTuple):
    """The blocks of one side of a map that are in sight; the axis is None without tokens."""

    axis: blobs.MapAxis | None
    blocks: int  # of the whole side
    first: int
    last: int

    @property
    def shown(self) -> slice:
        return slice(self.first, self.last + 1)

    @property
    def edges(self) -> tuple[float, float]:
        """Edges of the blocks in sight, in tokens or as a share."""
        ends = (self.first, self.last + 1)
        if self.axis is None:
            return ends[0] / self.blocks, ends[1] / self.blocks
        return self.axis.size * ends[0] - 0.5, self.axis.size * ends[1] - 0.5

    @property
    def tokens(self) -> range:
        if self.axis is None:
            return range(0)
        first, end = (math.ceil(n * self.axis.size) for n in (self.first, self.last + 1))
        return range(first, min(end, self.axis.length))

    @property
    def short_end(self) -> tuple[float, float] | None:
        """The edges of the last block, if it is in sight and shorter than the others."""
        if self.axis is None or not self.axis.has_short_end or self.last < self.blocks - 1:
            return None
        return self.edges[1] - self.axis.size, self.edges[1]


def _make_side(
    name: str, tokens: range | None, blocks: int, axis: blobs.MapAxis | None
) -> _SideInSight:
    if tokens is None:
        return _SideInSight(axis, blocks, 0, blocks - 1)
    if axis is None:
        raise OptionError(
            saw=f"{name}={describe_value(tokens)}",
            needed="a map by tokens: blocks of this one are shares of texts of several lengths",
            do=f"leave {name} out",
        )
    whole = range(axis.length)
    is_range = isinstance(tokens, range) and tokens.step == 1 and len(tokens) > 0
    if not is_range or tokens[0] not in whole or tokens[-1] not in whole:
        raise OptionError(
            saw=f"{name}={describe_value(tokens)}",
            needed=f"a range of the {axis.length:,} tokens",
            do=f"{name}={whole!r}",
        )
    first, last = (min(int(each / axis.size), blocks - 1) for each in (tokens[0], tokens[-1]))
    return _SideInSight(axis, blocks, first, last)


def _few(side: _SideInSight) -> range:
    return side.tokens if len(side.tokens) <= MOST_TOKENS else range(0)


def _describe_map_cells(queries: blobs.MapAxis | None, keys: blobs.MapAxis | None) -> str:
    if queries is None or keys is None:
        return "weight of a block"
    if queries.size == keys.size == 1:
        return "weight"
    number, *end = keys.words.split(",")
    if queries.words == keys.words:
        return ",".join([f"weight of a block of {number} tokens", *end])
    return f"weight of a block of {queries.words} queries by {keys.words} keys"


def _mark_short_ends(axes: Axes, rows: _SideInSight, columns: _SideInSight) -> None:
    line: dict[str, Any] = {"color": "#c43c00", "linewidth": 2, "clip_on": False}
    if (across := columns.short_end) is not None:
        axes.plot(across, (-0.015, -0.015), transform=axes.get_xaxis_transform(), **line)
    if (down := rows.short_end) is not None:
        axes.plot((1.015, 1.015), down, transform=axes.get_yaxis_transform(), **line)


# ---- a head -------------------------------------------------------------------------------------


class _Head(NamedTuple):
    """A head, and what is asked of it, as `HeadScan.plot` says."""

    scan: HeadScan
    layer: int
    head: int
    canvas: _Canvas
    token: int | None
    direction: Direction
    sequence: int
    queries: range | None
    keys: range | None
    name_of: Callable[[int], str] | None

    @property
    def title(self) -> str:
        return f"{self.scan.model}: layer {self.layer}, head {self.head}"

    @property
    def record(self) -> LayerScan:
        return self.scan.layer_scans[self.layer]

    def find_word(self, text: int | None, token: int) -> str:
        if text is None:
            return ""
        word = self.scan.texts[text].word(self.sequence, token, self.name_of)
        # A dollar sign would begin mathematics.
        return escape_unprintable(word).strip().replace("$", r"\$")

    def name_token(self, text: int | None, token: int) -> str:
        word = self.find_word(text, token)[:MOST_LETTERS]
        return f"{in_quotes(word)} at {token:,}" if word else f"token {token:,}"

    def plot_map(self) -> Figure:
        maps, width = blobs.head_map_arrays(self.scan, self.record), self.canvas.width
        if maps is None:
            raise _missing_statistic_error(blobs.MAP)
        values = maps[self.record.heads.index(self.head)]
        # Texts of several lengths may have no token in common at a place of the map.
        axes_of_map = blobs.map_axes(self.scan, self.record, values.shape) or (None, None)
        tokens = (self.queries, self.keys)
        rows, columns = map(_make_side, ("queries", "keys"), tokens, values.shape, axes_of_map)
        figure, axes = self.canvas.make_axes(width * 0.83)
        (top, bottom), (left, right) = rows.edges, columns.edges
        image = axes.imshow(
            values[rows.shown, columns.shown],
            cmap="viridis",
            norm=_make_colour_norm(),
            extent=(left, right, bottom, top),
        )
        places = "" if rows.axis else " (share of the text)"
        axes.set_xlabel(f"key{places}")
        axes.set_ylabel(f"query{places}")
        self.canvas.set_title(self.title, axes)
        if self.scan.sequences == 1:
            size = min(8, width * POINTS / max(1, len(rows.tokens), len(columns.tokens)))
            texts = (self.record.query_text, self.record.key_text)
            sides = zip((axes.yaxis, axes.xaxis), (rows, columns), texts, strict=True)
            for axis, side, text in sides:
                words = [self._replace(sequence=0).find_word(text, n) for n in _few(side)]
                if any(words):
                    axis.set_ticks(list(_few(side)), [word[:MOST_LETTERS] for word in words])
                    turn = 90 if axis is axes.xaxis else 0
                    axis.set_tick_params(labelsize=size, rotation=turn)
        _mark_short_ends(axes, rows, columns)
        label = _describe_map_cells(rows.axis, columns.axis)
        label += f", mean of {self.scan.sequences} texts" if self.scan.sequences > 1 else ""
        scale = {"ticks": WEIGHT_TICKS, "format": _percent_format(), "fraction": 0.046}
        figure.colorbar(image, ax=axes, label=_wrap_label(label, axes, figure), **scale)
        return figure

    def plot_token(self) -> Figure:
        if (token := self.token) is None:
            needed = "the token whose answer is drawn"
            do = f'scan.plot("token", layer={self.layer}, head={self.head}, token=17)'
            raise OptionError(saw="token=None", needed=needed, do=do)
        options: Any = {"direction": self.direction, "sequence": self.sequence}
        answer = find_answer(self.scan, self.layer, self.head, token, **options)
        marked = [pair for pair in answer.pairs if pair[1] >= LEAST_BAR]
        bars = marked[:MOST_BARS] or answer.pairs[:FEW_BARS]
        texts = (self.record.query_text, self.record.key_text)
        asked, others = texts if self.direction == "keys" else texts[::-1]
        subject = self.name_token(asked, token)
        looks = f"what looks at {subject}"
        looks = f"what {subject} looks at" if self.direction == "keys" else looks
        figure, axes = self.canvas.make_axes(BAR_ROW * max(1, len(bars)) + AROUND_BARS)
        weights = [weight for _, weight in bars]
        drawn = axes.barh(range(len(bars)), weights, color=BAR_COLOUR, height=0.7)
        axes.bar_label(drawn, [_format_percent(weight) for weight in weights], padding=2)
        axes.set_yticks(range(len(bars)), [self.name_token(others, other) for other, _ in bars])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.2 * max(weights, default=1.0))
        axes.xaxis.set_major_locator(_require_matplotlib("ticker").MaxNLocator(4))
        axes.xaxis.set_major_formatter(_percent_format())
        axes.set_xlabel("weight")
        extent = _describe_answer(answer, marked, self.direction)
        self.canvas.set_title(f"{self.title}: {looks}; {extent}", axes)
        return figure

    def plot_offset_profile(self) -> Figure:
        if blobs.OFFSETS not in self.record.summaries:
            raise _missing_statistic_error(blobs.OFFSETS)
        weights, outside = blobs.offset_weights(self.record, self.head)
        figure, axes = self.canvas.make_axes(PROFILE_HEIGHT)
        # A causal head has no later keys.
        last = blobs.OFFSET_REACH if any(weight for offset, weight in weights if offset > 0) else 0
        shown, by_offset = range(-blobs.OFFSET_REACH, last + 1), dict(weights)
        heights = [by_offset.get(offset, 0.0) for offset in shown]
        axes.bar(shown, heights, color=BAR_COLOUR, width=0.8)
        axes.set_ylim(0, 1)
        axes.xaxis.set_major_locator(_whole_number_locator())
        axes.set_xlabel("offset of the key from the query, tokens")
        axes.set_ylabel("weight")
        words = f"{100 * outside:.0f} % of the weight lies outside"
        self.canvas.set_title(f"{self.title}; {words}", axes)
        return figure


def _describe_answer(
    answer: TokenWeights, marked: Sequence[tuple[int, float]], direction: Direction
) -> str:
    ranks, total = answer.ranks, sum(weight for _, weight in answer.pairs)
    if not answer.pairs:
        return "none" if ranks is None else f"none among the top {ranks}"
    if ranks is not None and direction == "queries":
        of = f"among their top {ranks}" if ranks > 1 else "as their first key"
        return f"the queries that have it {of}"
    if ranks == 1:
        return f"its first key, {_format_percent(total)} of all"
    shown = answer.pairs if ranks is not None else marked
    if not shown:
        return f"none of its weights reaches {_format_percent(LEAST_BAR)}"
    part = sum(weight for _, weight in shown)
    largest = "largest weight" if len(shown) == 1 else f"{len(shown)} largest weights"
    if ranks is not None:
        return f"its {largest} among its top {ranks}, {_format_percent(part)} of all"
    if direction == "keys":
        return f"its {largest}, {_format_percent(part)} of all"
    return f"its {largest}, {_format_percent(part / total)} of all that it receives"


def _format_percent(share: float) -> str:
    """Format a share as the page does: 87 %, 3.4 %, 0.12 %."""
    value = 100 * share
    if 0 < value < 0.01:
        return "under 0.01 %"
    digits = 0 if value >= 9.95 or value == 0 else 1 if value >= 0.995 else 2
    return f"{value:.{digits}f} %"


def _percent_format() -> Any:
    return _require_matplotlib("ticker").FuncFormatter(lambda value, _: f"{100 * value:.3g} %")


def _require_matplotlib(module: str) -> Any:
    return require_package(f"matplotlib.{module}", purpose="which draws figures", pip="matplotlib")


def _paper_text_style_context() -> Any:
    """Return a context in which text has the size of a paper, and stays text."""
    _require_matplotlib("figure")
    from headwise.reports.style import paper_style

    return paper_style()


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
