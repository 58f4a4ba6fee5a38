"""One attention layer from the embeddings to the output, drawn from the numbers of a real pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.studies.pictures.canvas import arrow, heading, inset, note, rule, sheet, tinted
from headwise.studies.pictures.style import SERIES, WIDTH, weight_map
from headwise.studies.question import Numbers
from headwise.studies.words import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT = 9.78  # inches, like everything here
LEFT, FULL = 1.14, 6.3  # where the blocks begin, and how wide embed_dim is
GAP = 0.06  # between heads
LINE = 0.138  # a token's row where it has a name
THIN = 0.4  # a block without names
CLOSE_UP = 1.54  # a side of a map that is enlarged

X, CUT, MAPS, READ, MERGED, OUTPUT, CLOSE = 0.36, 2.52, 4.29, 5.17, 5.97, 6.77, 7.79  # tops
TICKS = (0.0, 0.01, 0.1, 0.5, 1.0)  # of the colour bar


def draw(figure: Figure, n: Numbers) -> None:
    """From the embeddings at the top to the output at the bottom, and three heads enlarged."""
    axes = sheet(figure, height=HEIGHT)
    tall = LINE * n["length"]
    heading(axes, LEFT, X - 0.17, say("x {shapes[x]:shape}: the embeddings of {length} tokens", n))
    note(axes, LEFT + FULL, X - 0.17, "green: positive, orange: negative", align="right")
    whole(figure, n, "x", X, tall)
    names(axes, n["tokens"], LEFT - 0.06, X, LINE)
    words = (
        "times wq, wk and wv {shapes[w]:shape}: every head reads all of x with its "
        "{shapes[w_of_a_head]:shape} part of each"
    )
    middle = LEFT + FULL / n["heads"] / 2
    arrow(axes, middle, X + tall + 0.05, CUT - 0.24, say(words, n))
    draw_heads(figure, axes, n)
    label(axes, MERGED, "concatenated", say("{shapes[merged]:shape}", n))
    whole(figure, n, "merged", MERGED, THIN)
    words = "times wo {shapes[wo]:shape}, plus its bias: every number mixes all {heads} heads"
    arrow(axes, middle, MERGED + THIN + 0.05, OUTPUT - 0.05, say(words, n))
    label(axes, OUTPUT, "output", say("{shapes[output]:shape}", n))
    whole(figure, n, "output", OUTPUT, THIN)
    draw_close_ups(figure, axes, n)


def draw_heads(figure: Figure, axes: Axes, n: Numbers) -> None:
    """Everything that each head has for itself: q, k, v, a map, and what it reads."""
    pitch = FULL / n["heads"]
    note(axes, LEFT - 0.08, CUT - 0.12, "head", align="right")
    for head in range(n["heads"]):
        note(axes, LEFT + pitch * (head + 0.5), CUT - 0.12, str(head), align="center")
    for row, name in enumerate(("q", "k", "v")):
        top = CUT + (THIN + 0.06) * row
        label(axes, top, name, say("{shapes[q]:shape}", n))
        parted(figure, n, name, top)
    bottom = CUT + 3 * THIN + 2 * 0.06
    words = "softmax(q kᵀ / √{head_dim}): the attention weights; in every map, each row sums to one"
    arrow(axes, LEFT + pitch / 2, bottom + 0.05, MAPS - 0.05, say(words, n))
    side = pitch - GAP
    for head, weights in enumerate(n["maps"]):
        image = inset(figure, LEFT + pitch * head + GAP / 2, MAPS, side, side, frame=False)
        weight_map(image, weights)
    label(axes, MAPS, "weights", say("{shapes[weights]:shape}", n))
    words = "times v: each token gets the mean of the values, weighted by its row of the map"
    arrow(axes, LEFT + pitch / 2, MAPS + side + 0.05, READ - 0.05, words)
    label(axes, READ, "head outputs", say("{shapes[head_outputs]:shape}", n))
    parted(figure, n, "merged", READ)
    words = "concatenated, in the order of the heads: the same numbers"
    arrow(axes, LEFT + pitch / 2, READ + THIN + 0.05, MERGED - 0.05, words)


def draw_close_ups(figure: Figure, axes: Axes, n: Numbers) -> None:
    """A few heads enlarged, with the names of the tokens, and where their weight goes."""
    rule(axes, OUTPUT + THIN + 0.19, 0.2, WIDTH - 0.2)
    for column, found in enumerate(n["stand_out"]):
        left = 0.84 + 2.46 * column
        heading(axes, left, CLOSE - 0.29, say("head {head}", found))
        note(axes, left, CLOSE - 0.11, say("{share:percent} on {place}", found))
        image = inset(figure, left, CLOSE, CLOSE_UP, CLOSE_UP, frame=False)
        weight_map(image, n["maps"][found["head"]])
        names(axes, n["tokens"], left - 0.06, CLOSE, CLOSE_UP / n["length"])
    below = CLOSE + CLOSE_UP + 0.16
    note(axes, 0.84, below, "rows: queries, columns: keys")
    draw_scale(figure, axes, left=5.08, top=below - 0.06, width=2.2)


def draw_scale(figure: Figure, axes: Axes, *, left: float, top: float, width: float) -> None:
    """The colours of the maps, which go by the root of the weight."""
    bar = inset(figure, left, top, width, 0.11, frame=False)
    weight_map(bar, [[(cell / 200) ** 2 for cell in range(201)]])
    bar.set_aspect("auto")
    note(axes, left - 0.1, top + 0.055, "attention weight", align="right")
    for tick in TICKS:
        words = f"{100 * tick:.0f} %" if tick else "0"
        note(axes, left + width * tick**0.5, top + 0.21, words, align="center")


def whole(figure: Figure, n: Numbers, name: str, top: float, height: float) -> None:
    """A block that is one piece."""
    show(inset(figure, LEFT, top, FULL, height), n["strips"][name])


def parted(figure: Figure, n: Numbers, name: str, top: float) -> None:
    """A block in as many pieces as there are heads."""
    pitch, rows = FULL / n["heads"], n["strips"][name]
    wide = len(rows[0]) // n["heads"]
    for head in range(n["heads"]):
        image = inset(figure, LEFT + pitch * head + GAP / 2, top, pitch - GAP, THIN)
        show(image, [row[wide * head : wide * (head + 1)] for row in rows])


def show(image: Axes, rows: list[list[int]]) -> None:
    """Numbers in percent, in one colour for each sign."""
    colours = tinted(rows, positive=SERIES[0], negative=SERIES[1], top=100.0)
    image.imshow(colours, aspect="auto", interpolation="none")


def label(axes: Axes, top: float, name: str, shape: str) -> None:
    """What a block is, and its shape, left of it."""
    heading(axes, LEFT - 0.08, top + 0.12, name, align="right")
    note(axes, LEFT - 0.08, top + 0.29, shape, align="right")


def names(axes: Axes, tokens: list[str], right: float, top: float, pitch: float) -> None:
    """The tokens beside their rows."""
    for row, token in enumerate(tokens):
        note(axes, right, top + pitch * (row + 0.5), token, align="right")
