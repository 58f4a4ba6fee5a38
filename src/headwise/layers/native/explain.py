"""What one forward pass of a layer computes: tokens, projections, and the kernels of its matrix."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from headwise.kernels.explain import Explanation
from headwise.layers.native.frames import Call, Packed, Whole
from headwise.layers.native.parts import Parts


@dataclass(frozen=True)
class LayerExplanation:
    """The answer of ``layer.explain(x)``; print it."""

    tokens: str
    projections: tuple[str, ...]
    matrix: Explanation

    def __str__(self) -> str:
        return "\n".join([f"tokens: {self.tokens}", *self.projections, str(self.matrix)])

    __repr__ = __str__


def explain(layer: Parts, call: Call, frame: Whole, matrix: Explanation) -> LayerExplanation:
    """The report of one call, laid out as ``frame`` has it."""
    given = call.x.shape[0] * call.x.shape[1]
    real = frame.x.shape[0] * frame.x.shape[1]
    tokens = f"{given:,}, as they were given"
    if isinstance(frame, Packed):
        tokens = f"{real:,} of {given:,} are real, and packed into one row: only they cost"
    if layer.drops:
        tokens += "; while training, dropout writes the weights of A @ v down"
    keys = frame.source.shape[0] * frame.source.shape[1]
    counts = {"q_proj": real, "k_proj": keys, "v_proj": keys, "out_proj": real}
    return LayerExplanation(
        tokens,
        tuple(_line(name, layer.get_submodule(name), n) for name, n in counts.items()),
        matrix,
    )


def _line(name: str, projection: nn.Module, tokens: int) -> str:
    inner, outer = (getattr(projection, f"{end}_features", None) for end in ("in", "out"))
    if inner is None or outer is None:
        return f"{name:<22} {type(projection).__name__}"
    cost = f"{2 * tokens * inner * outer / 1e9:.2g} GFLOP"
    return f"{name:<22} {type(projection).__name__:<10} {cost:<12} {inner} to {outer}"
