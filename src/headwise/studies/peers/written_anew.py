"""Implementations that are written anew after their source.

Paper           Attention Is All You Need (arXiv:1706.03762), section 3.2.2. It has no biases,
and says of masks only that what is hidden is set to minus infinity.
Tensor2Tensor   the paper's original code: tensorflow/tensor2tensor (Apache-2.0),
tensor2tensor/layers/common_attention.py, multihead_attention.
Annotated       the Annotated Transformer: harvardnlp/annotated-transformer (MIT),
MultiHeadedAttention.
EinopsPage      einops' page of PyTorch examples: arogozhnikov/einops (MIT),
docs/pytorch-examples.html, "Transformer's attention needs more attention".
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.studies.peers.peer import PURPOSE, Peer, Weights
from headwise.support.extras import require

HIDDEN = -1e9


class Paper(Peer):
    """A head's own are ``wq[h]``, ``wk[h]``, ``wv[h]``; ``wo`` takes all heads, side by side."""

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


class Tensor2Tensor(Peer):
    """The queries are scaled, not the scores; a mask is a large negative number that is added.

    Its models draw each kernel uniformly, with variance 1 / fan_avg.
    """

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


class Annotated(Peer):
    """Hidden scores become a large negative number; the weights are dropped out and kept.

    Its four linear layers are copies of one; its model draws them anew.
    """

    name = "Annotated Transformer"
    real = False

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


class EinopsPage(Peer):
    """Heads come first, products are einsum, True in a mask hides; residual and norm are inside.

    The names of its parameters are the page's.
    """

    name = "einops' example"
    real = False

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
