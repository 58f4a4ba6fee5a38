"""The picture of the question `must-divide`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headwise.studies.pictures.canvas import block, heading, inset, note, rule, sheet
from headwise.studies.pictures.style import BAD, INK, SERIES, SOFT, WIDTH
from headwise.studies.question import Numbers
from headwise.studies.words import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTHS, PITCH, THICK = 4.12, 0.5, 0.22  # top of the lower half, from row to row, of a block
INPUTS, PROJECTED, SCALE = 0.98, 4.75, 0.058  # left ends; inches a number

GRID = (0.85, 0.42, 3.7, 2.75)  # inches: left, top, width and height
KEY = 4.8  # where the marks of the grid are explained
RING: dict[str, Any] = {
    "color": SERIES[1],
    "linestyle": "none",
    "marker": "o",
    "markersize": 12,
    "markerfacecolor": "none",
    "markeredgewidth": 2,
}
CHOSEN = RING | {"color": SERIES[2], "marker": "s", "markersize": 13}
DOT: dict[str, Any] = {"color": SERIES[0], "linestyle": "none", "marker": "o", "markersize": 5}
CROSS = DOT | {"color": BAD, "marker": "X"}


def draw(figure: Figure, n: Numbers) -> None:
    """Which sizes work, in both layers; and what kdim and vdim are."""
    axes = sheet(figure, height=5.6)
    title = "heads and head_dim that work with embed_dim {sizes[embed_dim]}"
    heading(axes, GRID[0], 0.2, say(title, n))
    draw_grid(inset(figure, *GRID, frame=False), n)
    draw_key(axes, n)
    rule(axes, WIDTHS - 0.4, 0.2, WIDTH - 0.2)
    draw_widths(axes, n)


def draw_grid(axes: Axes, n: Numbers) -> None:
    """A dot for each pair of sizes that was tried; ringed, where PyTorch's layer takes it too."""
    places = {head_dim: row for row, head_dim in enumerate(n["grid_head_dims"])}
    rights = [
        (heads, row, right)
        for row, found in enumerate(n["grid_right"])
        for heads, right in zip(n["grid_heads"], found, strict=True)
    ]
    for wanted, look in ((True, DOT), (False, CROSS)):
        pairs = [pair for *pair, right in rights if right is wanted]
        axes.plot([heads for heads, _ in pairs], [row for _, row in pairs], **look)
    taken = [heads for heads in n["heads_torch_takes"] if heads in n["grid_heads"]]
    rows = [places[n["sizes"]["embed_dim"] // heads] for heads in taken]
    axes.plot(taken, rows, **RING)
    axes.plot(n["sizes"]["heads"], places[n["sizes"]["head_dim"]], **CHOSEN)
    axes.set_xticks(n["grid_heads"])
    axes.set_yticks(range(len(places)), [str(head_dim) for head_dim in places])
    axes.set_xlabel("heads")
    axes.set_ylabel("head_dim")


def draw_key(axes: Axes, n: Numbers) -> None:
    """What the marks of the grid are."""
    for top, mark, colour, lines in (
        (
            0.75,
            DOT,
            SERIES[0],
            ("headwise.Attention gives the", "paper's formula: {pairs_right} of {pairs}"),
        ),
        (
            1.5,
            RING,
            SERIES[1],
            ("PyTorch's layer allows it, too:", "heads × head_dim = {sizes[embed_dim]}"),
        ),
        (
            2.25,
            CHOSEN,
            SERIES[2],
            (
                "{sizes[heads]} heads of {sizes[head_dim]}: PyTorch refuses,",
                "{sizes[embed_dim]} / {sizes[heads]} leaves {sizes[remainder]}",
            ),
        ),
    ):
        axes.plot(KEY, top, **mark)
        for line, words in enumerate(lines):
            y = top + 0.19 * line
            axes.text(KEY + 0.2, y, say(words, n), color=colour, fontsize=9, va="center")


def draw_widths(axes: Axes, n: Numbers) -> None:
    """The widths of three inputs of PyTorch's layer, and the one width of what they become."""
    heads, head_dim = n["torch_heads"], n["torch_head_dim"]
    heading(axes, INPUTS, WIDTHS - 0.17, "PyTorch's layer: widths of the inputs")
    title = "after wq, wk, wv: always {torch_heads} heads of {torch_head_dim}"
    heading(axes, PROJECTED, WIDTHS - 0.17, say(title, n))
    for row, (name, result, option, width, shape) in enumerate(
        (
            ("query", "q", "embed_dim", n["sizes"]["embed_dim"], n["q_weight_of_torch"]),
            ("key", "k", "kdim", n["key_width"], n["k_weight_of_torch"]),
            ("value", "v", "vdim", n["value_width"], n["v_weight_of_torch"]),
        )
    ):
        top = WIDTHS + PITCH * row
        middle = top + THICK / 2
        axes.text(INPUTS - 0.12, middle, name, color=INK, fontsize=9, ha="right", va="center")
        label = f"{option} {width}"
        block(axes, INPUTS, top, SCALE * width, THICK, colour=SOFT, label=label)
        words = say(f"w{result} {{shape:shape}}", {"shape": shape})
        note(axes, PROJECTED - 0.75, middle - 0.12, words, align="center")
        axes.annotate(
            "",
            (PROJECTED - 0.25, middle),
            xytext=(INPUTS + SCALE * width + 0.08, middle),
            arrowprops={"arrowstyle": "-|>", "color": SOFT, "lw": 0.9, "mutation_scale": 7},
        )
        axes.text(PROJECTED - 0.1, middle, result, color=INK, fontsize=9, ha="center", va="center")
        for head in range(heads):
            left = PROJECTED + SCALE * head_dim * head
            wide = SCALE * head_dim - 0.03
            block(axes, left, top, wide, THICK, colour=SERIES[1], label=str(head_dim))
