"""Input of every kernel: queries, keys, and everything that shapes the scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.masks.bound import BoundMask
from headwise.masks.score_bias import BoundBias

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class KernelInput:
    """One attention matrix at known sizes; shapes as in `headwise.AttentionMatrix`."""

    q: Tensor
    k: Tensor
    mask: BoundMask
    bias: BoundBias
    scale: float
    softcap: float | None
    sink: Tensor | None

    @property
    def group(self) -> int:
        """Number of query heads for each kv head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """Dtype of scores and sums: float32 for half types, else that of ``q``."""
        return torch.float32 if self.q.dtype in HALF else self.q.dtype

    @property
    def has_positive_scale(self) -> bool:
        """True if the scale is above 0, also when rounded to the dtype of the scores."""
        return bool(self.scale >= torch.finfo(self.accumulation_dtype).tiny)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for bfloat16 and float16, else the dtype itself."""
    return torch.float32 if dtype in HALF else dtype
