"""Modules of a layer whose heads are divided over ranks.

A module keeps its object, hooks and names, and gets one of these classes. Parameters are DTensors;
each forward pass computes with what this rank holds of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.layers.linear import apply_linear
from headwise.layers.norm import Norm
from headwise.sharding.heads.part import RankHeads, local_part
from headwise.sharding.heads.sums import sum_forward, sum_forward_and_backward


class HeadsProjection(nn.Linear):
    """Projection to the channels of this rank's heads.

    Attributes:
        channels: those of its heads, where each rank holds the weights of all; else None.
    """

    channels: slice | None

    @property
    def computed_widths(self) -> tuple[int, int]:
        """The input width, and the number of channels that this rank computes."""
        rows = local_part(self.weight, heads_of_this_rank=True)[self.channels or slice(None)]
        return self.in_features, len(rows)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name for it)
        """Project (..., in_features) to this rank's share of out_features."""
        weight, bias = _take_part_of_rank(self.weight), _take_part_of_rank(self.bias)
        assert weight is not None
        if self.channels is not None:
            weight = weight[self.channels]
            bias = None if bias is None else bias[self.channels]
        return apply_linear(input, weight, bias)


class RankSummedOutputProjection(nn.Linear):
    """Output projection: the sum over ranks of the products of their heads, then the bias."""

    part: RankHeads

    @property
    def computed_widths(self) -> tuple[int, int]:
        """The number of channels of this rank's heads, and the output width."""
        return local_part(self.weight, heads_of_this_rank=True).shape[1], self.out_features

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name for it)
        """Project this rank's share of in_features to the output of all heads."""
        weight = _take_part_of_rank(self.weight)
        assert weight is not None
        output = sum_forward(apply_linear(input, weight, None), group=self.part.group)
        if self.bias is None:
            return output
        bias = local_part(self.bias, heads_of_this_rank=False)
        return (output + bias).to(output.dtype)


class HeadsNorm(Norm):
    """Norm of what this rank holds: of each head, or of a width that every rank computes.

    Attributes:
        channels: those of this rank's heads, where the norm is of all heads together; else None.
    """

    channels: slice | None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis; return the channels of this rank's heads."""
        weight = _take_part_of_rank(self.weight)
        assert weight is not None
        normed = self.options.normalise(x, weight, _take_part_of_rank(self.bias))
        return normed if self.channels is None else normed[..., self.channels]


class WidthNormOverRanks(Norm):
    """Norm of the width of all heads, of which each rank has its own channels.

    The sums over channels are sums over ranks: one all-reduce in each direction, two for a norm
    with a mean.
    """

    part: RankHeads
    width: int

    def forward(self, x: Tensor) -> Tensor:
        """Normalise this rank's channels by the statistics of all."""
        exact = torch.promote_types(x.dtype, torch.float32)
        weight, bias = _take_part_of_rank(self.weight), _take_part_of_rank(self.bias)
        assert weight is not None
        wide, weight = x.to(exact), weight.to(exact)
        if self.options.one_plus:
            weight = 1.0 + weight
        if bias is not None:
            wide = wide - self._mean_over_ranks(wide)
        normed = (
            wide * torch.rsqrt(self._mean_over_ranks(wide.square()) + self.options.eps) * weight
        )
        return (normed if bias is None else normed + bias.to(exact)).to(x.dtype)

    def _mean_over_ranks(self, x: Tensor) -> Tensor:
        return sum_forward_and_backward(x.sum(-1, keepdim=True), group=self.part.group) / self.width


class ReplicatedEmbedding(nn.Embedding):
    """Table that every rank holds, and reads for all heads."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name for it)
        """Return the rows of these indices."""
        return F.embedding(input, local_part(self.weight, heads_of_this_rank=False))


def _take_part_of_rank(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else local_part(parameter, heads_of_this_rank=True)
