"""Rotaries of every kind, drawn by hypothesis, and what rounding does to a rotated vector."""

from collections.abc import Iterator

import torch
from hypothesis import strategies as st
from torch import Tensor

from headwise import Rotary
from headwise.function.scaling import LinearScaling, Llama3Scaling, NTKScaling, Scaling, YarnScaling

SCALINGS: dict[str, Scaling | None] = {
    "none": None,
    "linear": LinearScaling(4.0),
    "NTK": NTKScaling(4.0),
    "YaRN": YarnScaling(8.0, 256),
    "YaRN at fractions of a pair": YarnScaling(8.0, 256, truncate=False),
    "Llama 3": Llama3Scaling(8.0, 1.0, 4.0, 256),
}
# A product, a sum of two, and cos and sin good to 2 units in the last place.
ROUNDINGS = 2 * 2 + 3


@st.composite
def rotaries(draw: st.DrawFn) -> tuple[Rotary, int]:
    """A rotary, and a head_dim that it fits."""
    width = 2 * draw(st.integers(2, 8))
    beside = draw(st.sampled_from((0, 3)))
    rotary = Rotary(
        theta=draw(st.sampled_from((10_000.0, 500.0))),
        width=width if beside or draw(st.booleans()) else None,
        pairing=draw(st.sampled_from(("half-split", "interleaved"))),
        scaling=SCALINGS[draw(st.sampled_from(tuple(SCALINGS)))],
    )
    return rotary, width + beside


def pairs(rotary: Rotary, width: int) -> Iterator[tuple[int, int]]:
    """The two channels of each pair among ``width``, by the definition."""
    for i in range(width // 2):
        yield (i, i + width // 2) if rotary.pairing == "half-split" else (2 * i, 2 * i + 1)


def rounding(rotary: Rotary, x: Tensor, positions: Tensor) -> Tensor:
    """How far the length of each rotated vector may be off: (batch, heads, length)."""
    eps = torch.finfo(x.dtype).eps / 2
    angle = float(rotary.frequencies(x.shape[-1]).max()) * positions.abs().double()
    largest = max(1.0, rotary.amplitude)
    return eps * (angle + ROUNDINGS) * x.double().norm(dim=-1) * largest
