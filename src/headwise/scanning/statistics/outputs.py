"""What a head writes: in how many directions, and whether it is what it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from headwise.budget.rounding import LAMBDA, Roundoff
from headwise.kernels.problem import accumulation_dtype
from headwise.scanning.captured_call import CapturedCall, known
from headwise.scanning.statistics.rows import EXCLUDED
from headwise.scanning.statistics.statistic import (
    COUNT,
    MEAN,
    Definition,
    Part,
    Parts,
    Summary,
    TileStatistic,
)
from headwise.scanning.statistics.tile import WeightTile

AT_ONCE = 2**20  # numbers of head outputs that are looked at together


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
        outputs = known(call.outputs)
        _, heads, _, width = outputs.shape
        rows = outputs.transpose(1, 2).flatten(0, 1)
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


class Copying(TileStatistic):
    """How far a head raises the tokens it looks at above the others that it could look at."""

    definition = Definition(
        name="copying",
        formula="l[t] = (zᵢ W_O) · U[t], the head's direct part of the logit of t, for the "
        "different tokens t of the keys with any weight; r[t] = max(0, l[t] − mean of l); mean "
        "over queries i of Σₜ w[t] r[t] / Σₜ r[t], w[t] being the weight of i on all keys "
        "that hold t. At most 64 queries of each sequence, evenly spaced",
        unit="share, 0 (raises only others) to 1 (all weight on one token, which alone is raised)",
        excluded="keys whose token is not known or has no row in the unembedding; queries that see "
        "fewer than two different tokens, or raise none; what stands behind the output projection "
        "(its bias, a norm, a factor), and the normalisation before the unembedding",
        source="Olsson et al. 2022, arXiv:2209.11895, copying score: logits centred over the "
        "tokens of the context, cut off at 0, the share of the token attended to (there rescaled "
        "to [−1, 1]); here on any text, and each token attended to counts by its weight",
        title="Copying: raises what it looks at",
        most="raises the tokens it looks at: {} of all that it raises among those it sees",
    )
    needs = ("tokens", "outputs", "out_proj", "unembedding")
    parts = MEAN

    def update(self, gathered: Summary, tile: WeightTile) -> None:  # noqa: ARG002
        tile.keep_samples()

    def finish(self, gathered: Summary, call: CapturedCall) -> Summary:
        """One sequence after the other, each with its own tokens, and one head after the other."""
        samples = call.samples
        for sequence in range(call.matrix.shape[0]):
            tokens, written = _tokens(call, sequence), _written(call, sequence)
            pairs = zip(samples.weights[sequence], written, strict=True)
            found = [tokens.shares(weights, z) for weights, z in pairs]
            share, raises = (torch.stack(part) for part in zip(*found, strict=True))
            counted = samples.counted[sequence] & samples.real[sequence] & raises
            gathered["sum"] += share.masked_fill(~counted, 0.0).sum(1)
            gathered["count"] += counted.sum(1)
        return super().finish(gathered, call)


@dataclass(frozen=True)
class _Tokens:
    """The different tokens of a sequence.

    Attributes:
        keys: those that hold them.
        kind: which of them each of these keys holds.
        directions: the row of the unembedding of each of them.
    """

    keys: Tensor
    kind: Tensor
    directions: Tensor

    def shares(self, weights: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
        """(samples,) twice: the score of each row of a head, and whether it raises anything."""
        rows = weights[:, self.keys].double()
        on_token = rows.new_zeros(len(rows), len(self.directions)).index_add_(1, self.kind, rows)
        unseen = on_token <= 0
        raised = torch.matmul(written, self.directions.mT).double().masked_fill_(unseen, 0.0)
        mean = raised.sum(-1) / (~unseen).sum(-1).clamp(min=1)
        raised = raised.sub_(mean[:, None]).clamp_(min=0.0).masked_fill_(unseen, 0.0)
        total = raised.sum(-1)
        share = torch.linalg.vecdot(on_token, raised) / total.where(total > 0, 1.0)
        # A token alone is not above the mean: total is 0 there too.
        return share, total > 0


def _tokens(call: CapturedCall, sequence: int) -> _Tokens:
    """Those that are known, and that the unembedding has a row for."""
    unembedding, own = known(call.unembedding), known(call.tokens)[sequence]
    has_row = (own >= 0) & (own < len(unembedding))
    keys = (call.real_keys[sequence] & has_row).nonzero().squeeze(1)
    kinds, kind = torch.unique(own[keys], return_inverse=True)
    exact = accumulation_dtype(known(call.outputs).dtype)
    return _Tokens(keys, kind, unembedding[kinds].to(exact))


def _written(call: CapturedCall, sequence: int) -> Tensor:
    """(heads, samples, embed_dim): what each head adds to the residual at the sampled queries."""
    outputs, out_proj = known(call.outputs), known(call.out_proj)
    exact = accumulation_dtype(outputs.dtype)
    z = outputs[sequence][:, call.samples.places[sequence]].to(exact)
    return torch.bmm(z, out_proj.to(exact))
