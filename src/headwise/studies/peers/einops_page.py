"""The rewritten attention of einops' page of PyTorch examples.

arogozhnikov/einops (MIT), docs/pytorch-examples.html, "Transformer's attention needs more
attention": heads come first, products are einsum, the output is dropped out, the residual of the
queries and a layer norm are inside, and True in a mask hides. Written anew.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from headwise.studies.peers.peer import PURPOSE, Peer
from headwise.studies.peers.weights import Weights
from headwise.support.extras import require


class EinopsPage(Peer):
    """The names of its parameters are the page's."""

    name = "einops' example"
    real = False
    biased = True

    def __init__(self, embed_dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__(embed_dim, num_heads, dropout=dropout)
        self.rearrange = require("einops", purpose=PURPOSE).rearrange
        self.w_qs, self.w_ks, self.w_vs, self.fc = (
            nn.Linear(embed_dim, embed_dim) for _ in range(4)
        )
        for linear in (self.w_qs, self.w_ks, self.w_vs):
            nn.init.normal_(linear.weight, std=math.sqrt(2 / (embed_dim + self.head_dim)))
        nn.init.xavier_normal_(self.fc.weight)
        self.dropout = nn.Dropout(dropout)
        self.layer_norm = nn.LayerNorm(embed_dim)

    def held(self) -> Weights:
        """Those of the linear layers."""
        return Weights.of_linears(self.w_qs, self.w_ks, self.w_vs, self.fc)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Dropped out, before the residual."""
        return self._attend(x, mask)[0]

    def block(self, x: Tensor) -> Tensor:
        """The norm of the input and what is attended to."""
        normed: Tensor = self.layer_norm(self(x) + x)
        return normed

    def attention_weights(self, x: Tensor) -> Tensor | None:
        """Its second result."""
        return self._attend(x, None)[1]

    def _attend(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        split = "batch length (head width) -> head batch length width"
        q, k, v = (
            self.rearrange(linear(x), split, head=self.num_heads)
            for linear in (self.w_qs, self.w_ks, self.w_vs)
        )
        scores = torch.einsum("hbqd,hbkd->hbqk", q, k) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(mask[None], -torch.inf)
        weights = scores.softmax(dim=-1)
        heads = torch.einsum("hbqk,hbkd->hbqd", weights, v)
        joined = self.rearrange(heads, "head batch length width -> batch length (head width)")
        return self.dropout(self.fc(joined)), weights

    def spell(self, may_attend: Tensor) -> Tensor:
        """True is hidden."""
        return ~may_attend
