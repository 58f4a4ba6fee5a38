"""Where a token stands: rotary angles, and score biases by distance.

Each is a small value that a layer is given: `Rotary` rotates queries and keys, a `PositionBias`
makes a module that gives a `ScoreBias`.
"""

from headwise.layers.positions.distance_bias import Alibi, PositionBias, T5Bias, alibi_slopes
from headwise.layers.positions.rotary import Rotary
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
    "Rotary",
    "Scaling",
    "T5Bias",
    "YarnScaling",
    "alibi_slopes",
]
