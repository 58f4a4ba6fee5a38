"""A linear projection: `torch.nn.Linear`, by the faster product where there is one."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.kernels.linear import project


class Projection(torch.nn.Linear):
    """`torch.nn.Linear` with its parameters, shapes, errors and gradients."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name for it)
        """(..., in_features) to (..., out_features)."""
        return project(input, self.weight, self.bias)
