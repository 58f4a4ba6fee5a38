"""The picture of the question `packing`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.studies.experiments.packing_forms import Form, forms
from headwise.studies.pictures.canvas import block, heading, note, sheet
from headwise.studies.pictures.style import SERIES
from headwise.studies.question import Numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {
    "per_head": ("a matrix a head", "the paper"),
    "separate": ("q, k, v", "headwise.Attention"),
    "q_kv": ("q; k with v", "cross-attention"),
    "packed": ("all in one", "PyTorch"),
    "transposed": ("all in one, transposed", "GPT-2"),
}
GAP, STRIP = 0.14, 0.03  # in units: between matrices, and between those that are small

UNIT = 0.66  # inches: embed_dim
CENTRES = (0.72, 1.98, 3.27, 4.42, 6.2)  # inches: of the forms
TOP = 0.62  # inches


def draw(figure: Figure, n: Numbers) -> None:
    """The stored matrices of each form to scale, one head in a strong colour."""
    axes = sheet(figure, height=3.3)
    for centre, (name, form) in zip(CENTRES, forms(n["heads"]).items(), strict=True):
        blocks = _blocks(form, n["heads"])
        left = centre - UNIT * max(x + wide for x, _, wide, _ in blocks) / 2
        bottom = TOP + UNIT * max(y + high for _, y, _, high in blocks)
        for count, (x, y, wide, high) in enumerate(blocks):
            part, head = divmod(count, n["heads"])
            place = (left + UNIT * x, TOP + UNIT * y, UNIT * wide, UNIT * high)
            strong = head == n["shown_head"]
            block(axes, *place, colour=SERIES[part], alpha=1.0 if strong else 0.3)
        title, where = TITLES[name]
        heading(axes, centre, 0.18, title, align="center")
        note(axes, centre, 0.38, where, align="center")
        for line, run in enumerate(n["stored"][name]):
            note(axes, centre, bottom + 0.15 + 0.18 * line, _described(**run), align="center")
    _draw_legend(axes, n, centre=CENTRES[-1], top=TOP + 2.2 * UNIT)


def _draw_legend(axes: Axes, n: Numbers, *, centre: float, top: float) -> None:
    """Which colour is what."""
    for part, word in enumerate(("queries", "keys", "values")):
        place = centre + UNIT * (part - 1)
        axes.text(place, top, word, color=SERIES[part], fontsize=9, ha="center", va="center")
    words = (f"strong colour: head {n['shown_head']},", f"pale: the others of {n['heads']} heads")
    for line, word in enumerate(words):
        note(axes, centre, top + 0.24 + 0.18 * line, word, align="center")


def _blocks(form: Form, heads: int) -> list[tuple[float, float, float, float]]:
    """Left, top, width and height of each small matrix in the stored ones."""
    wide = 1 / heads
    if max(form.sizes) == 1:
        places = [divmod(count, heads) for count in range(len(form.sizes))]
        return [(head * (wide + STRIP), part * (1 + GAP), wide, 1.0) for part, head in places]
    if not form.by_rows:
        return [(count * wide, 0.0, wide, 1.0) for count in range(sum(form.sizes))]
    gaps = [GAP * matrix for matrix, size in enumerate(form.sizes) for _ in range(size)]
    return [(0.0, count * wide + gap, 1.0, wide) for count, gap in enumerate(gaps)]


def _described(*, count: int, shape: list[int]) -> str:
    """How many matrices of which shape."""
    size = f"{shape[0]} × {shape[1]}"
    return f"{count} of {size}" if count > 1 else size
