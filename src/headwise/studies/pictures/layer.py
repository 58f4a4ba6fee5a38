"""One attention layer from the embeddings to the output, drawn from the numbers of a real pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.studies.pictures.canvas import WIDTH, arrow, heading, inset, note, rule, sheet, tinted
from headwise.studies.pictures.style import INK, SERIES, SOFT, weight_map
from headwise.studies.question import Numbers
from headwise.studies.words import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

HEIGHT = 8.95  # inches, like everything here
LEFT, FULL = 1.14, 6.3  # where the blocks begin, and how wide embed_dim is
GAP = 0.06  # between heads
LINE = 0.096  # a token's row where it has a name
THIN = 0.4  # a block without names

X, CUT, MAPS, READ, MERGED, OUTPUT, CLOSE = 0.34, 2.06, 3.82, 4.69, 5.4, 6.14, 7.16  # tops


def draw(figure: Figure, n: Numbers) -> None:
    """From the embeddings at the top to the output at the bottom, and three heads enlarged."""
    axes = sheet(figure, height=HEIGHT)
    tall = LINE * n["length"]
    heading(axes, LEFT, X - 0.15, say("x: {length} tokens of {embed_dim} numbers", n))
    note(axes, LEFT + FULL, X - 0.15, say("{shapes[x]:shape}", n), align="right")
    words = "green: positive, orange: negative; one in {every} is drawn"
    note(axes, LEFT + 2.35, X - 0.15, say(words, n))
    whole(figure, n, "x", X, tall)
    names(axes, n["tokens"], LEFT - 0.06, X, LINE)
    fan(axes, n, X + tall, CUT)
    draw_heads(figure, axes, n)
    label(axes, MERGED, "side by side", say("{shapes[merged]:shape}", n))
    whole(figure, n, "merged", MERGED, THIN)
    words = "times wo {shapes[wo]:shape}, plus its bias: every number is made of all heads"
    arrow(axes, LEFT + FULL / n["heads"] / 2, MERGED + THIN + 0.04, OUTPUT - 0.04, say(words, n))
    label(axes, OUTPUT, "output", say("{shapes[output]:shape}", n))
    whole(figure, n, "output", OUTPUT, THIN)
    draw_close_ups(figure, axes, n)


def draw_heads(figure: Figure, axes: Axes, n: Numbers) -> None:
    """Everything that each head has for itself: q, k, v, a map, and what it reads."""
    pitch = FULL / n["heads"]
    for head in range(n["heads"]):
        note(axes, LEFT + pitch * (head + 0.5), CUT - 0.08, str(head + 1), align="center")
    for row, name in enumerate(("q", "k", "v")):
        top = CUT + (THIN + 0.06) * row
        label(axes, top, name, say("{shapes[q]:shape}", n))
        parted(figure, n, name, top)
    bottom = CUT + 3 * THIN + 2 * 0.06
    words = "q times k, divided by the root of {head_dim}; softmax: each row sums to one"
    arrow(axes, LEFT + pitch / 2, bottom + 0.04, MAPS - 0.04, say(words, n))
    side = pitch - GAP
    for head, weights in enumerate(n["maps"]):
        image = inset(figure, LEFT + pitch * head + GAP / 2, MAPS, side, side, frame=False)
        show_weights(image, weights, n["top_weight"])
    label(axes, MAPS, "weights", say("{shapes[weights]:shape}", n))
    words = "times v: each token gets a mean of the values, by the weights of its row"
    arrow(axes, LEFT + pitch / 2, MAPS + side + 0.04, READ - 0.04, words)
    label(axes, READ, "head outputs", say("{shapes[head_outputs]:shape}", n))
    parted(figure, n, "merged", READ)
    arrow(axes, LEFT + pitch / 2, READ + THIN + 0.04, MERGED - 0.04, "put side by side, in order")


def draw_close_ups(figure: Figure, axes: Axes, n: Numbers) -> None:
    """Three heads enlarged, with the names of the tokens, and what they stand out for."""
    rule(axes, OUTPUT + THIN + 0.17, 0.2, WIDTH - 0.2)
    side = 1.45
    for column, (key, where) in enumerate(
        (("before", "the token before"), ("after", "the token after"), ("first", "{tokens[0]}"))
    ):
        left = 0.78 + 2.38 * column
        head = n["stand_out"][key]["head"]
        heading(axes, left, CLOSE - 0.27, say(f"head {{stand_out[{key}][head]}}", n))
        words = f"{{stand_out[{key}][weight]:percent}} of its weight on {where}"
        note(axes, left, CLOSE - 0.1, say(words, n))
        image = inset(figure, left, CLOSE + 0.03, side, side, frame=False)
        show_weights(image, n["maps"][head - 1], n["top_weight"])
        names(axes, n["tokens"], left - 0.06, CLOSE + 0.03, side / n["length"])
    below = CLOSE + side + 0.17
    note(axes, 0.78, below, "rows: queries; columns: keys, in the same order")
    scale = [[n["top_weight"] * cell / 100 for cell in range(101)]]
    bar = inset(figure, WIDTH - 1.5, below - 0.04, 0.8, 0.09, frame=False)
    show_weights(bar, scale, n["top_weight"]).axes.set_aspect("auto")
    note(axes, WIDTH - 1.57, below, "weight: none", align="right")
    note(axes, WIDTH - 0.63, below, say("{top_weight:percent}", n))


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


def show_weights(image: Axes, weights: list[list[float]], top: float) -> AxesImage:
    """A map whose cells stay sharp at any size."""
    shown = weight_map(image, weights, top=top)
    shown.set_interpolation("none")
    return shown


def fan(axes: Axes, n: Numbers, top: float, bottom: float) -> None:
    """From all of x to every head: nobody gets a part of x alone."""
    pitch = FULL / n["heads"]
    for head in range(n["heads"]):
        middle = LEFT + pitch * (head + 0.5)
        axes.fill(
            (LEFT, LEFT + FULL, middle + pitch / 2 - GAP / 2, middle - pitch / 2 + GAP / 2),
            (top + 0.02, top + 0.02, bottom - 0.16, bottom - 0.16),
            color=SOFT,
            alpha=0.05,
            linewidth=0,
        )
    words = "times wq, wk, wv {shapes[w]:shape}: {heads} heads of {shapes[w_of_a_head]:shape}, "
    axes.text(
        LEFT + FULL / 2,
        top + 0.16,
        say(words + "each of which reads all of x", n),
        color=INK,
        fontsize=8,
        ha="center",
        va="center",
    )


def label(axes: Axes, top: float, name: str, shape: str) -> None:
    """What a block is, and its shape, left of it."""
    heading(axes, LEFT - 0.08, top + 0.13, name, align="right")
    axes.text(LEFT - 0.08, top + 0.29, shape, color=SOFT, fontsize=7.5, ha="right", va="center")


def names(axes: Axes, tokens: list[str], right: float, top: float, pitch: float) -> None:
    """The tokens beside their rows."""
    for row, token in enumerate(tokens):
        y = top + pitch * (row + 0.5)
        axes.text(right, y, token, color=SOFT, fontsize=6.5, ha="right", va="center")
