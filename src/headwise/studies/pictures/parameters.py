"""The picture of the question `parameters`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headwise.studies.pictures.style import LINE, SERIES
from headwise.studies.question import Numbers
from headwise.studies.words import say

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(figure: Figure, n: Numbers) -> None:
    """Parameters over the number of heads: shared width, free head_dim, shared keys and values."""
    axes = figure.subplots()
    shown = n["shown"]
    shared, own = (
        [n[key][str(heads)] / 1e6 for heads in shown]
        for key in ("width_shared", "width_of_a_head_fixed")
    )
    grouped = [count / 1e6 for count in n["grouped"].values()]
    axes.plot(shown, own, "o-", color=SERIES[1], markersize=9, markerfacecolor="none")
    axes.plot(shown, shared, "o-", color=SERIES[0], markersize=5)
    # Without the first: as many kv heads as heads share nothing.
    axes.plot([n["heads"]] * (len(grouped) - 1), grouped[1:], "D", color=SERIES[2])
    beside: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
    few = ", ".join(list(n["grouped"])[1:-1])
    labels = (
        (
            (shown[-1], shared[-1]),
            (0, 14),
            "right",
            say("PyTorch: head_dim = {embed_dim} / heads", n),
        ),
        ((shown[-1], own[-1]), (-14, 0), "right", say("you choose head_dim = {head_dim}", n)),
        (
            (n["heads"], grouped[2]),
            (10, 0),
            "left",
            f"{n['heads']} query heads, {few} or {list(n['grouped'])[-1]} kv heads",
        ),
    )
    for (place, offset, side, words), colour in zip(
        labels, (SERIES[0], SERIES[1], SERIES[2]), strict=True
    ):
        axes.annotate(words, place, offset, ha=side, color=colour, **beside)
    axes.set_xticks(shown, [str(heads) for heads in shown])
    axes.set_ylim(0, 1.1 * own[-1])
    axes.set_xlabel("number of heads")
    axes.set_ylabel("parameters, millions")
    axes.grid(axis="y", color=LINE)
