"""Figure of matplotlib for a paper: text that stays text, and no state of pyplot."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

# TrueType fonts are embedded in PDF, and text is text in SVG, so that a journal can set it.
STYLE: dict[Any, Any] = {
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.fonttype": "none",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "image.interpolation": "none",  # a cell is a value
    "savefig.dpi": 300,
}


def paper_style() -> Any:
    return mpl.rc_context(STYLE)


class PaperFigure(Figure):
    """Figure that keeps the settings of a paper when it is saved or shown."""

    def savefig(self, *given: Any, **named: Any) -> None:
        """Save the figure as matplotlib does, with the settings of a paper."""
        with paper_style():
            super().savefig(*given, **named)

    def _repr_png_(self) -> bytes:
        # Without pyplot, IPython has no other picture of a figure.
        picture = BytesIO()
        self.savefig(picture, format="png", dpi=150)
        return picture.getvalue()
