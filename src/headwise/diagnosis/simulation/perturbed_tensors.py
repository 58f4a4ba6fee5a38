"""Tensors whose entries are moved at random by a small share, the same for equal arguments."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

MOST_KEPT = 1 << 22  # entries of a tensor whose moved copies are kept


class PerturbedTensors:
    """Moved copies of tensors, kept as long as the tensor itself is.

    The causes of a search mostly share the weights and stages of one model.
    """

    def __init__(self) -> None:
        self._kept = WeakTensorKeyDictionary()

    def perturb(self, x: Tensor, name: str, draw: int, share: float) -> Tensor:
        """Return x in float64, each entry times 1 + s, with s uniform from -share to share.

        The draws of a name and a number are the same in every call.
        """
        if x.numel() > MOST_KEPT:
            return _perturb_tensor(x, name, draw, share)
        copies = self._kept.setdefault(x, {})
        key = (name, draw, share)
        if key not in copies:
            copies[key] = _perturb_tensor(x, name, draw, share)
        moved: Tensor = copies[key]
        return moved


def _perturb_tensor(x: Tensor, name: str, draw: int, share: float) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {draw}".encode()))
    shares = torch.rand(x.shape, generator=generator).mul_(2).sub_(1).double()
    return x.double() * shares.mul_(share).add_(1)
