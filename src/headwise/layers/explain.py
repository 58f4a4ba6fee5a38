"""Report on one forward pass of a layer: tokens, projections, and the kernels of its matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from headwise.matrix.kernels.dispatch import Explanation


@dataclass(frozen=True)
class LayerExplanation:
    """Printable report that ``layer.explain(...)`` returns.

    Attributes:
        tokens: the number of tokens that are computed.
        projections: one line for each projection: name, kind, GFLOP, widths.
        matrix: the kernels of the attention matrix.
        weights: the computation of the returned weights; None for layers that return none.
    """

    tokens: str
    projections: tuple[str, ...]
    matrix: Explanation
    weights: str | None = None

    def __str__(self) -> str:
        weights = [] if self.weights is None else [f"weights: {self.weights}"]
        tokens = f"tokens: {self.tokens}"
        return "\n".join([tokens, *weights, *self.projections, str(self.matrix)])

    __repr__ = __str__


def projection_lines(layer: nn.Module, tokens: Mapping[str, int]) -> tuple[str, ...]:
    """Return one line for each projection; ``tokens`` maps its name in the layer to its tokens."""
    return tuple(projection_line(name, layer.get_submodule(name), n) for name, n in tokens.items())


def linear_product_line(name: str, kind: str, *, tokens: int, widths: tuple[int, int]) -> str:
    """Return the line of a matrix product over ``tokens``, from one width to another."""
    cost = f"{2 * tokens * widths[0] * widths[1] / 1e9:.2g} GFLOP"
    return f"{name:<22} {kind:<10} {cost:<12} {widths[0]} to {widths[1]}"


def projection_line(name: str, projection: nn.Module, tokens: int) -> str:
    """Return the line of one projection over ``tokens``."""
    kind = type(projection).__name__
    inner, outer = (getattr(projection, f"{end}_features", None) for end in ("in", "out"))
    if inner is None or outer is None:
        return f"{name:<22} {kind}"
    # A module that computes a part of its widths has these in an attribute.
    widths = getattr(projection, "computed_widths", (inner, outer))
    return linear_product_line(name, kind, tokens=tokens, widths=widths)
