"""Position encodings of attention: rotary embedding, ALiBi and T5's relative position bias.

Each is an option of a layer: `Rotary` rotates queries and keys; a `PositionBias` (`Alibi`,
`T5Bias`) makes a module that returns a `ScoreBias`.
"""

from headwise.layers.positions.distance_bias import Alibi, PositionBias, T5Bias, alibi_slopes
from headwise.layers.positions.rotary_scaling import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    Scaling,
    YarnScaling,
)

__all__ = [
    "Alibi",
    "LinearScaling",
    "Llama3Scaling",
    "NTKScaling",
    "PositionBias",
    "Scaling",
    "T5Bias",
    "YarnScaling",
    "alibi_slopes",
]
