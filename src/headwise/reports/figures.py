"""Figures of a scan by matplotlib, for a paper: a grid, a map, a token, weights by offset."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headwise.errors import OptionError
from headwise.reports import blobs, report
from headwise.scanning.diff import APART, ScanDiff
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

Names = Callable[[int], str]


def plot_diff(diff: ScanDiff, *, statistic: str | None, ax: Any, width: float) -> Figure:
    """Draw the change of a statistic as `ScanDiff.plot` says."""
    name = statistic or report.most_changed_statistic(diff) or next(iter(diff.scalars), None)
    if name == APART:
        with _paper_text_style_context():
            return _draw_statistic(report.total_change(diff), _models(diff), ax, width)
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
        title = f"{_models(diff)}: {label}"
        return _draw_grid(values, title, label, ax, width, cmap=scale, vmin=-end, vmax=end)


def _models(diff: ScanDiff) -> str:
    return " to ".join(dict.fromkeys((diff.before.model, diff.after.model)))


def plot_scan(
    scan: HeadScan,
    *,
    kind: str,
    layer: int | str | None,
    head: int | None,
    statistic: str | None,
    token: int | None,
    direction: Direction,
    sequence: int,
    queries: range | None,
    keys: range | None,
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
            return _plot_map(scan, layer, head, (queries, keys), name_of, ax, width)
        if kind == "token":
            asked = _Asked(token, direction, sequence)
            return _plot_token(scan, layer, head, asked, name_of, ax, width)
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
    return _draw_statistic(report.drawn_statistic(scan, statistic), scan.model, ax, width)


def _draw_statistic(drawn: report.DrawnStatistic, model: str, ax: Any, width: float) -> Figure:
    low, high, kind = drawn.scale.low, drawn.scale.high, drawn.scale.kind
    power = 0.5 if kind == "weight" else 1.0
    norm = _make_colour_norm(low, max(high, low + 1e-9), power=power)
    label = f"{drawn.definition.label}, {drawn.unit}"
    ticks = [each for each in WEIGHT_TICKS if each != 0.01] if kind == "weight" else None
    title = f"{model}: {drawn.definition.heading}"
    colours = {"cmap": "viridis", "norm": norm, "ticks": ticks, "is_share": kind != "range"}
    return _draw_grid(np.array(drawn.rows), title, label, ax, width, **colours)


def _draw_grid(
    values: Any,
    title: str,
    label: str,
    ax: Any,
    width: float,
    *,
    ticks: Sequence[float] | None = None,
    is_share: bool = False,
    **colours: Any,
) -> Figure:
    height = max(LEAST_HEIGHT, ROW * len(values) + AROUND)
    figure, axes = _make_axes(ax, width, height)
    image = axes.imshow(values, aspect="auto", **colours)
    _set_title(title, axes, ax, width)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(_whole_number_locator())
    form = _percent_format() if is_share else None
    wrapped = _wrap_label(label, axes, figure)
    figure.colorbar(image, ax=axes, label=wrapped, ticks=ticks, format=form)
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


def _plot_map(
    scan: HeadScan,
    layer: int,
    head: int,
    tokens: tuple[range | None, range | None],
    name_of: Names | None,
    ax: Any,
    width: float,
) -> Figure:
    record = scan.layer_scans[layer]
    maps = blobs.head_map_arrays(scan, record)
    if maps is None:
        raise _missing_statistic_error(blobs.MAP)
    values = maps[record.heads.index(head)]
    # Texts of several lengths may have no token in common at a place of the map.
    axes_of_map = blobs.map_axes(scan, record, values.shape) or (None, None)
    names = ("queries", "keys")
    rows, columns = map(_make_side, names, tokens, values.shape, axes_of_map)
    figure, axes = _make_axes(ax, width, width * 0.83)
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
    _set_title(_name_head(scan, layer, head), axes, ax, width)
    if scan.sequences == 1:
        texts = (record.query_text, record.key_text)
        pairs = list(zip(texts, (rows, columns), strict=True))
        words = [[_word_of(scan, text, 0, n, name_of) for n in _few(side)] for text, side in pairs]
        _label_axes_with_tokens(axes, (rows, columns), words, width)
    _mark_short_ends(axes, rows.short_end, columns.short_end)
    label = _describe_map_cells(rows.axis, columns.axis)
    label += f", mean of {scan.sequences} texts" if scan.sequences > 1 else ""
    scale = {"ticks": WEIGHT_TICKS, "format": _percent_format(), "fraction": 0.046}
    figure.colorbar(image, ax=axes, label=_wrap_label(label, axes, figure), **scale)
    return figure


def _describe_map_cells(queries: blobs.MapAxis | None, keys: blobs.MapAxis | None) -> str:
    if queries is None or keys is None:
        return "weight of a block"
    if queries.size == keys.size == 1:
        return "weight"
    number, *end = keys.words.split(",")
    if queries.words == keys.words:
        return ",".join([f"weight of a block of {number} tokens", *end])
    return f"weight of a block of {queries.words} queries by {keys.words} keys"


def _mark_short_ends(
    axes: Axes, down: tuple[float, float] | None, across: tuple[float, float] | None
) -> None:
    line: dict[str, Any] = {"color": "#c43c00", "linewidth": 2, "clip_on": False}
    if across is not None:
        axes.plot(across, (-0.015, -0.015), transform=axes.get_xaxis_transform(), **line)
    if down is not None:
        axes.plot((1.015, 1.015), down, transform=axes.get_yaxis_transform(), **line)


def _few(side: _SideInSight) -> range:
    return side.tokens if len(side.tokens) <= MOST_TOKENS else range(0)


def _label_axes_with_tokens(
    axes: Axes, sides: Sequence[_SideInSight], words: Sequence[Sequence[str]], width: float
) -> None:
    size = min(8, width * POINTS / max(1, *(len(side.tokens) for side in sides)))
    for axis, side, labels in zip((axes.yaxis, axes.xaxis), sides, words, strict=True):
        if any(labels):
            axis.set_ticks(list(_few(side)), [label[:MOST_LETTERS] for label in labels])
            axis.set_tick_params(labelsize=size, rotation=90 if axis is axes.xaxis else 0)


def _word_of(
    scan: HeadScan, text: int | None, sequence: int, token: int, name_of: Names | None
) -> str:
    if text is None:
        return ""
    word = escape_unprintable(scan.texts[text].word(sequence, token, name_of))
    # A dollar sign would begin mathematics.
    return word.strip().replace("$", r"\$")


# ---- a token ------------------------------------------------------------------------------------


class _Asked(NamedTuple):
    """The token whose answer is drawn."""

    token: int | None
    direction: Direction
    sequence: int


def _plot_token(
    scan: HeadScan,
    layer: int,
    head: int,
    asked: _Asked,
    name_of: Names | None,
    ax: Any,
    width: float,
) -> Figure:
    token, direction, sequence = asked
    if token is None:
        needed = "the token whose answer is drawn"
        do = f'scan.plot("token", layer={layer}, head={head}, token=17)'
        raise OptionError(saw="token=None", needed=needed, do=do)
    options = {"direction": direction, "sequence": sequence}
    answer = find_answer(scan, layer, head, token, **options)  # type: ignore[arg-type]
    marked = [pair for pair in answer.pairs if pair[1] >= LEAST_BAR]
    bars = marked[:MOST_BARS] or answer.pairs[:FEW_BARS]
    record = scan.layer_scans[layer]
    texts = (record.query_text, record.key_text)
    asked_text, others = texts if direction == "keys" else texts[::-1]
    subject = _name_token(scan, asked_text, sequence, token, name_of)
    looks = f"what {subject} looks at" if direction == "keys" else f"what looks at {subject}"
    figure, axes = _make_axes(ax, width, BAR_ROW * max(1, len(bars)) + AROUND_BARS)
    weights = [weight for _, weight in bars]
    drawn = axes.barh(range(len(bars)), weights, color=BAR_COLOUR, height=0.7)
    axes.bar_label(drawn, [_format_percent(weight) for weight in weights], padding=2)
    names = [_name_token(scan, others, sequence, other, name_of) for other, _ in bars]
    axes.set_yticks(range(len(bars)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2 * max(weights, default=1.0))
    axes.xaxis.set_major_locator(_require_matplotlib("ticker").MaxNLocator(4))
    axes.xaxis.set_major_formatter(_percent_format())
    axes.set_xlabel("weight")
    extent = _describe_answer(answer, marked, direction)
    _set_title(f"{_name_head(scan, layer, head)}: {looks}; {extent}", axes, ax, width)
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


def _name_token(
    scan: HeadScan, text: int | None, sequence: int, token: int, name_of: Names | None
) -> str:
    word = _word_of(scan, text, sequence, token, name_of)[:MOST_LETTERS]
    return f"{in_quotes(word)} at {token:,}" if word else f"token {token:,}"


def _name_head(scan: HeadScan, layer: int, head: int) -> str:
    return f"{scan.model}: layer {layer}, head {head}"


def _set_title(title: str, axes: Axes, ax: Any, width: float) -> None:
    wrapped = textwrap.fill(title, max(TITLE_LETTERS, int(TITLE_LETTERS * width)))
    if ax is None:
        axes.figure.suptitle(wrapped, fontsize=TITLE_SIZE)
    else:
        axes.set_title(wrapped)


def _format_percent(share: float) -> str:
    """Format a share as the page does: 87 %, 3.4 %, 0.12 %."""
    value = 100 * share
    if 0 < value < 0.01:
        return "under 0.01 %"
    digits = 0 if value >= 9.95 or value == 0 else 1 if value >= 0.995 else 2
    return f"{value:.{digits}f} %"


def _percent_format() -> Any:
    return _require_matplotlib("ticker").FuncFormatter(lambda value, _: f"{100 * value:.3g} %")


# ---- weights by offset --------------------------------------------------------------------------


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
    _set_title(f"{_name_head(scan, layer, head)}; {words}", axes, ax, width)
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
