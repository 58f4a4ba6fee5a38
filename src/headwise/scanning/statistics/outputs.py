"""What a head writes: how much, how much of what it reads, and in how many directions."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from headwise.budget.rounding import LAMBDA, Roundoff
from headwise.scanning.captured_call import CapturedCall
from headwise.scanning.statistics.parts import COUNT, Part, Parts
from headwise.scanning.statistics.spread import EXCLUDED
from headwise.scanning.statistics.statistic import Definition, RowMean, Summary, TileStatistic
from headwise.scanning.statistics.tile import WeightTile

# None of it is one head's own: a norm acts on the sum of all heads.
BEHIND = (
    "; what stands between the output projection and the residual: its bias, a norm (as in OLMo 2) "
    "and a factor (as in Granite)"
)
AT_ONCE = 2**20  # numbers of head outputs that are looked at together


class ContributionNorm(RowMean):
    """How much a head adds to the residual."""

    definition = Definition(
        name="contribution_norm",
        formula="mean over queries i of ‖zᵢ W_O‖, for the head's output zᵢ and its part of the "
        "output projection",
        unit="of the residual, before any norm or factor",
        excluded=EXCLUDED + BEHIND,
        source="Kobayashi et al. 2021, arXiv:2109.07152, of one head",
        title="Length of what it adds",
        most="adds most: {}",
    )
    needs = ("outputs", "out_proj")

    def of_rows(self, tile: WeightTile) -> Tensor:
        return tile.contribution_norms


class RelativeContribution(RowMean):
    """How much a head adds, as a share of what is there already."""

    definition = Definition(
        name="relative_contribution",
        formula="mean over queries i of ‖zᵢ W_O‖ / ‖xᵢ‖, for the residual xᵢ that the layer's "
        "output is added to",
        unit="ratio, from 0",
        excluded=EXCLUDED + "; queries with a residual of 0" + BEHIND,
        source="mixing against preserving: Kobayashi et al. 2021, arXiv:2109.07152, of one head",
        title="How much it adds",
        most="adds most: {} times the length of what was there",
    )
    needs = ("outputs", "out_proj", "residual")

    def of_rows(self, tile: WeightTile) -> Tensor:
        norms = self._residual(tile)
        return tile.contribution_norms / norms.where(norms > 0, 1.0)

    def counts(self, tile: WeightTile) -> Tensor:
        return tile.counted & (self._residual(tile) > 0)

    def _residual(self, tile: WeightTile) -> Tensor:
        residual = tile.call.residual
        assert residual is not None
        cut = residual[tile.batches, tile.rows].to(tile.weights.dtype)
        norms: Tensor = torch.linalg.vector_norm(cut, dim=-1)
        return norms[:, None]


class ValueWeighted(RowMean):
    """How much a head moves, counted before what it moves cancels."""

    definition = Definition(
        name="value_weighted",
        formula="mean over queries i of Σⱼ A[i, j] ‖vⱼ W_O‖",
        unit="of the residual; at least contribution_norm",
        excluded=EXCLUDED + "; biases of the projections; a sink, which has no value",
        source="Kobayashi et al. 2020, arXiv:2004.10102, summed over the keys",
        title="Length of what it moves, before it cancels",
        most="moves most: {}",
    )
    needs = ("values", "out_proj")

    def of_rows(self, tile: WeightTile) -> Tensor:
        return tile.on(tile.call.value_norms)


class EffectiveRank(TileStatistic):
    """In how many directions a head's outputs spread."""

    definition = Definition(
        name="effective_rank",
        formula="exp(−Σₖ p[k] ln p[k]), p[k] = σ[k] / Σ σ, for the singular values σ of the head's "
        "outputs z less their mean over all queries; those that rounding cannot tell from 0 are 0",
        unit="directions, from 1 to the width of the head's values",
        excluded=EXCLUDED + "; no value where all outputs are equal",
        source="Roy and Vetterli 2007, The effective rank, EUSIPCO; from centred second moments",
        title="Directions it writes in",
        most="writes in most directions: {}",
    )
    needs = ("outputs",)
    parts: ClassVar[Parts] = {
        "count": COUNT,
        "sum": Part(axes=("value_dim",)),
        "outer": Part(axes=("value_dim", "value_dim")),
    }

    def start(self, call: CapturedCall) -> Tensor:
        """Which queries count."""
        shape, device = call.matrix.shape[:3], call.matrix.q.device
        return torch.zeros(shape, dtype=torch.bool, device=device)

    def update(self, gathered: Tensor, tile: WeightTile) -> None:
        gathered[tile.batches, tile.heads, tile.rows] = tile.counted

    def finish(self, gathered: Tensor, call: CapturedCall) -> Summary:
        """Count, sum, and sum of outer products, in float64: singular values are their roots."""
        assert call.outputs is not None
        _, heads, _, width = call.outputs.shape
        rows = call.outputs.transpose(1, 2).flatten(0, 1)
        counted = gathered.transpose(1, 2).flatten(0, 1)
        total = rows.new_zeros(heads, width, dtype=torch.float64)
        outer = rows.new_zeros(heads, width, width, dtype=torch.float64)
        step = max(1, AT_ONCE // (heads * width))
        for z, real in zip(rows.split(step), counted.split(step), strict=True):
            part = z.double().masked_fill(~real[..., None], 0.0).transpose(0, 1)
            total += part.sum(1)
            outer.baddbmm_(part.mT, part)
        count = gathered.sum((0, 2)).double()
        return {"count": count.cpu(), "sum": total.cpu(), "outer": outer.cpu()}

    def result(self, summary: Summary) -> Tensor:
        """(heads,)."""
        outer, count = summary["outer"], summary["count"].clamp(min=1)
        mean = summary["sum"] / count[:, None]
        centred = outer - count[:, None, None] * mean[:, :, None] * mean[:, None, :]
        squares = torch.linalg.eigvalsh(centred)
        sigma = squares.where(squares > _noise(outer, count)[:, None], 0.0).sqrt()
        p = sigma / sigma.sum(-1, keepdim=True)  # NaN where nothing is left
        rank: Tensor = torch.special.entr(p).sum(-1).exp()
        return rank


def _noise(outer: Tensor, count: Tensor) -> Tensor:
    """(heads,): what rounding may leave of a square that is 0, from the raw second moments.

    Sums of n terms for the outer product and for each mean, and the eigenvalues of its width.
    """
    terms = torch.minimum(count, LAMBDA * count.sqrt())  # headwise.budget.rounding.growth
    u = Roundoff.of(torch.float64).u
    size: Tensor = outer.diagonal(dim1=1, dim2=2).sum(-1)
    return u * (3 * terms + outer.shape[-1]) * size
