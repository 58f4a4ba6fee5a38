"""The paper's form: one matrix per head, one head after the other.

Attention Is All You Need (arXiv:1706.03762), section 3.2.2. It has no biases, and says of masks
only that what is hidden is set to minus infinity before the softmax.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from headwise.studies.peers.peer import Peer
from headwise.studies.peers.weights import Weights


class Paper(Peer):
    """``wq[h]``, ``wk[h]``, ``wv[h]`` are a head's own; ``wo`` takes all heads, side by side."""

    name = "the paper's form"
    real = False
    biased = False

    def __init__(self, embed_dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__(embed_dim, num_heads, dropout=dropout)
        self.wq, self.wk, self.wv = (
            nn.Parameter(torch.zeros(num_heads, self.head_dim, embed_dim)) for _ in range(3)
        )
        self.wo = nn.Parameter(torch.zeros(num_heads * self.head_dim, embed_dim))

    def held(self) -> Weights:
        """Each head's rows, one head under the other."""
        q, k, v = (w.flatten(0, 1) for w in (self.wq, self.wk, self.wv))
        return Weights(q, k, v, self.wo.mT)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Concat(head_1, ..., head_h) W^O."""
        heads = []
        for wq, wk, wv in zip(self.wq, self.wk, self.wv, strict=True):
            scores = (x @ wq.mT) @ (x @ wk.mT).mT / math.sqrt(self.head_dim)
            if mask is not None:
                scores = scores + mask
            heads.append(scores.softmax(dim=-1) @ (x @ wv.mT))
        return torch.cat(heads, dim=-1) @ self.wo

    def spell(self, may_attend: Tensor) -> Tensor:
        """0, and minus infinity where hidden, to be added."""
        return torch.zeros(may_attend.shape).masked_fill(~may_attend, -torch.inf)
