"""The paper's original code: the arithmetic of tensor2tensor's multihead_attention.

tensorflow/tensor2tensor, tensor2tensor/layers/common_attention.py (Apache-2.0): dense projections
without biases; the queries are scaled, not the scores; a mask is a large negative number that is
added; the weights are dropped out. Written anew for torch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.studies.peers.peer import Peer
from headwise.studies.peers.weights import Weights

HIDDEN = -1e9


class Tensor2Tensor(Peer):
    """Its models draw each kernel uniformly, with variance 1 / fan_avg."""

    name = "tensor2tensor"
    real = False
    biased = False

    def __init__(self, embed_dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__(embed_dim, num_heads, dropout=dropout)
        # TensorFlow's kernels are (in, out), the transpose of torch's.
        self.q, self.k, self.v, self.output_transform = (
            nn.Parameter(torch.empty(embed_dim, embed_dim)) for _ in range(4)
        )
        for kernel in self.parameters():
            nn.init.xavier_uniform_(kernel)

    def held(self) -> Weights:
        """The kernels, transposed."""
        return Weights(self.q.mT, self.k.mT, self.v.mT, self.output_transform.mT)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Project, split the heads, attend, combine the heads, project."""
        weights = F.dropout(self._weights(x, mask), self.p, self.training)
        combined: Tensor = (weights @ self._split_heads(x @ self.v)).transpose(1, 2).flatten(2)
        return combined @ self.output_transform

    def _weights(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k = (self._split_heads(x @ kernel) for kernel in (self.q, self.k))
        logits = (q * self.head_dim**-0.5) @ k.mT
        if mask is not None:
            logits = logits + mask[:, None].to(logits.dtype)
        weights: Tensor = logits.softmax(dim=-1)
        return weights

    def _split_heads(self, x: Tensor) -> Tensor:
        split: Tensor = x.unflatten(-1, (self.num_heads, self.head_dim))
        return split.transpose(1, 2)

    def spell(self, may_attend: Tensor) -> Tensor:
        """0, and a large negative number where hidden, to be added."""
        return (~may_attend).float() * HIDDEN

    def attention_weights(self, x: Tensor) -> Tensor | None:
        """What it stores in ``save_weights_to``, before they are dropped out."""
        return self._weights(x, None)
