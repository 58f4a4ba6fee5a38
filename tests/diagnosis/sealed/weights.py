"""Random weights and biases of a layer."""

import torch

from headwise import Attention


def draw_weights(layer: Attention, seed: int) -> None:
    """Give each parameter random numbers of usual size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            scale = 0.3 if parameter.ndim == 1 else parameter.shape[1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
