"""The Annotated Transformer's multi-head attention.

harvardnlp/annotated-transformer (MIT), MultiHeadedAttention: four linear layers, of which three
project and the last puts the heads together; hidden scores become a large negative number; the
weights are dropped out and kept. Written anew.
"""

from __future__ import annotations

import copy
import math
from typing import Any

from torch import Tensor, nn

from headwise.studies.peers.peer import Peer
from headwise.studies.peers.weights import Weights

HIDDEN = -1e9


class Annotated(Peer):
    """Its four linear layers are copies of one; its model draws them anew."""

    name = "Annotated Transformer"
    real = False
    biased = True

    def __init__(self, embed_dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__(embed_dim, num_heads, dropout=dropout)
        one = nn.Linear(embed_dim, embed_dim)
        self.linears: Any = nn.ModuleList(copy.deepcopy(one) for _ in range(4))
        self.dropout = nn.Dropout(dropout)
        self.attn: Tensor | None = None

    def start(self) -> None:
        """Xavier uniform for everything that has more than one axis."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def held(self) -> Weights:
        """Those of the linear layers, in their order."""
        return Weights.of_linears(*self.linears)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The weights stay behind as ``attn``."""
        *projections, last = self.linears
        shape = (self.num_heads, self.head_dim)
        q, k, v = (linear(x).unflatten(-1, shape).transpose(1, 2) for linear in projections)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None] == 0, HIDDEN)
        self.attn = self.dropout(scores.softmax(dim=-1))
        out: Tensor = last((self.attn @ v).transpose(1, 2).flatten(2))
        return out

    def spell(self, may_attend: Tensor) -> Tensor:
        """True, or anything but 0, may be attended."""
        return may_attend

    def attention_weights(self, x: Tensor) -> Tensor | None:
        """What the last call left behind."""
        self(x)
        return self.attn
