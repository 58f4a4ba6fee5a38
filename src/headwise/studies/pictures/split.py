"""The picture of the question `split`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.studies.pictures.canvas import (
    arrow,
    block,
    heading,
    note,
    rule,
    sheet,
)
from headwise.studies.pictures.style import INK, SERIES, SOFT, WIDTH
from headwise.studies.question import Numbers
from headwise.studies.words import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEFT, FULL = 1.35, 3.35  # inches: where blocks begin, and the width of embed_dim
TOP, PITCH, THICK = 0.6, 0.55, 0.24  # of the first stage, from stage to stage, of a block
STAGES = (  # what it is, how it is drawn, what is done to get to the next
    ("x", "x", "whole", "times wq: each entry of q is made of all {asked[embed_dim]} inputs"),
    ("q", "q", "touching", "the split: a view, nothing is computed"),
    ("per_head", "per head", "apart", "softmax(q kᵀ / √{asked[head_dim]}); k is split like q"),
    ("weights", "attention weights", "square", "times v, which is split like q"),
    ("head_outputs", "head outputs", "apart", "concatenated"),
    ("merged", "concatenated", "touching", "times wo: each number is made of all heads"),
    ("output", "output", "whole", ""),
)

GAP = 0.12  # between heads
COLUMNS = {"torch": 5.42, "native": 6.85}  # middles of the two columns of shapes


def draw(figure: Figure, n: Numbers) -> None:
    """The way of the numbers through the layer, and which inputs reach which entries of q."""
    axes = sheet(figure, height=6.6)
    for layer, name, remark in (
        ("torch", "PyTorch's layer", "length first from q on"),
        ("native", "headwise.Attention", "batch first"),
    ):
        heading(axes, COLUMNS[layer], 0.17, name, align="center")
        note(axes, COLUMNS[layer], 0.36, remark, align="center")
    for row, (stage, name, form, then) in enumerate(STAGES):
        top = TOP + PITCH * row
        middle = top + THICK / 2
        axes.text(LEFT - 0.12, middle, name, color=INK, fontsize=9, ha="right", va="center")
        draw_stage(axes, n, top, form)
        for layer, x in COLUMNS.items():
            shape = say(f"{{shapes[{layer}][{stage}]:shape}}", n)
            axes.text(x, middle, shape, color=INK, fontsize=9, ha="center", va="center")
            if stage == "weights" and layer in n["fused"]:
                note(axes, x, middle + 0.19, "only in matrix(x)", align="center")
        if then:
            arrow(axes, LEFT + FULL * 0.06, top + THICK + 0.03, top + PITCH - 0.03, say(then, n))
    draw_reach(axes, n, top=4.78)


def draw_stage(axes: Axes, n: Numbers, top: float, form: str) -> None:
    """One stage: a block that is whole, or one for each head, in the colour of the head."""
    heads = n["asked"]["heads"]
    if form == "whole":
        block(axes, LEFT, top, FULL, THICK, colour=SOFT, label=say("{asked[embed_dim]}", n))
        return
    pitch = FULL / heads
    gap = 0.0 if form == "touching" else GAP
    for head in range(heads):
        wide = THICK if form == "square" else pitch - gap
        left = LEFT + pitch * (head + 0.5) - wide / 2
        label = "" if form == "square" else say(f"head {head}: {{asked[head_dim]}}", n)
        block(axes, left, top, wide, THICK, colour=SERIES[head], label=label)


def draw_reach(axes: Axes, n: Numbers, *, top: float) -> None:
    """Two squares: entries of q down, inputs across, coloured where one reaches the other."""
    rule(axes, top - 0.27, 0.2, WIDTH - 0.2)
    side = 1.3
    for left, key, name, words, weights in (
        (0.5, "attention", "Project, then split", "Attention", "weights"),
        (4.2, "split_first", "Split, then project", "Another function", "weights_split_first"),
    ):
        heading(axes, left, top + 0.03, name)
        draw_square(axes, n["reach_map"][key], left, top + 0.2, side)
        inputs = say("{asked[embed_dim]} inputs", n)
        note(axes, left + side / 2, top + side + 0.33, inputs, align="center")
        entries = say("{asked[embed_dim]} entries of q", n)
        note(axes, left - 0.13, top + 0.2 + side / 2, entries, align="center", turn=90.0)
        lines = (
            words,
            "each entry of q depends",
            f"on {{inputs[{key}]}} inputs",
            "",
            "wq, wk and wv have",
            f"{{{weights}:,}} parameters",
        )
        for line, template in enumerate(lines):
            write = heading if line == 0 else note
            write(axes, left + side + 0.14, top + 0.34 + 0.2 * line, say(template, n))


def draw_square(
    axes: Axes, shares: list[list[float]], left: float, top: float, side: float
) -> None:
    """A row for each head in its colour, as strong as the share that is reached."""
    small = side / len(shares)
    for head, row in enumerate(shares):
        for part, share in enumerate(row):
            place = (left + small * part, top + small * head, small, small)
            block(axes, *place, colour=SERIES[head], alpha=share)
    axes.plot(
        [left, left + side, left + side, left, left],
        [top, top, top + side, top + side, top],
        color=SOFT,
        linewidth=0.8,
    )
