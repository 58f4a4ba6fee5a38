"""Weights that have the statistics of an initialisation.

The largest distance of the distribution function from that of an initialisation
(Kolmogorov-Smirnov) is compared with 1.95 / sqrt(n), which chance passes once in 1,000.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.diagnosis.moves.rows import Rows

CRITICAL = 1.95
MOST_ENTRIES = 100_000
LEAST_ENTRIES = 64


@dataclass(frozen=True)
class Initialisation:
    """A distribution around 0.

    Attributes:
        text: its name and parameters.
        width: the bound of a uniform one, or the standard deviation of a normal one.
    """

    text: str
    width: float
    is_uniform: bool

    @property
    def standard_deviation(self) -> float:
        """The standard deviation."""
        return self.width / math.sqrt(3) if self.is_uniform else self.width

    def cumulative_share(self, x: Tensor) -> Tensor:
        """Return the share of values below each x."""
        if self.is_uniform:
            return (x / self.width).clamp(-1, 1) / 2 + 0.5
        normal: Tensor = torch.special.ndtr(x / self.width)
        return normal


def list_initialisations(role: str, shapes: Mapping[str, tuple[int, int]]) -> list[Initialisation]:
    """Return usual initialisations of the matrix of a role.

    Args:
        role: the projection.
        shapes: role -> (rows, columns); the matrix of o has its inputs as rows.
    """
    rows, columns = shapes[role]
    inputs = rows if role == "o" else columns
    fused = sum(shapes[r][0] for r in "qkv" if r in shapes and shapes[r][1] == columns)
    spread = {"one matrix": rows + columns}
    if role != "o" and fused > rows:
        spread["q, k and v fused"] = fused + columns
    return [
        Initialisation("uniform within 1/sqrt(inputs)", 1 / math.sqrt(inputs), True),
        *(
            Initialisation(f"Xavier uniform of {name}", math.sqrt(6 / size), True)
            for name, size in spread.items()
        ),
        Initialisation("normal with standard deviation 0.02", 0.02, False),
        Initialisation(
            "normal with standard deviation 1/sqrt(inputs)", 1 / math.sqrt(inputs), False
        ),
        *(
            Initialisation(f"Xavier normal of {name}", math.sqrt(2 / size), False)
            for name, size in spread.items()
        ),
    ]


def recognise_initialisation(role: str, rows: Rows) -> Initialisation | None:
    """Return the initialisation whose statistics the weights of a role have, or None."""
    shapes = {
        r: (rows.matrix_of_role(r).shape[0], rows.matrix_of_role(r).shape[1]) for r in rows.roles
    }
    values = rows.matrix_of_role(role).flatten().to(torch.float64)
    if values.numel() < LEAST_ENTRIES:
        return None
    fitting = [
        (apart, place, each)
        for place, each in enumerate(list_initialisations(role, shapes))
        if (apart := kolmogorov_smirnov_statistic(values, each)) < CRITICAL
    ]
    return min(fitting)[2] if fitting else None


def kolmogorov_smirnov_statistic(values: Tensor, kind: Initialisation) -> float:
    """Return the largest distance of the distribution functions, times the root of the count."""
    values = values[:: math.ceil(values.numel() / MOST_ENTRIES)].sort().values
    count = len(values)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    share = kind.cumulative_share(values)
    apart = max(float((share - steps[:-1]).max()), float((steps[1:] - share).max()))
    return apart * math.sqrt(count)


def is_drawn_from_initialisation(values: Tensor, kind: Initialisation) -> bool:
    """True if values may be drawn from an initialisation."""
    return kolmogorov_smirnov_statistic(values, kind) < CRITICAL
