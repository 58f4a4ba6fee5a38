"""Statistics of head outputs: norm, effective rank, copying, and similarity of two heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from headwise.function.rounding import LAMBDA, Roundoff
from headwise.layers.linear import apply_linear
from headwise.matrix.kernels import tiles
from headwise.matrix.kernels.kernel import accumulation_dtype
from headwise.scanning.call import CapturedCall, require_not_none
from headwise.scanning.statistics import statistic
from headwise.scanning.statistics.rows import EXCLUDED, EntrySum, RowStatistic

AT_ONCE = 2**20  # numbers that are processed at once
FEWEST = 4  # rows that the unbiased CKA needs
PAIRS = statistic.parts_of_mean(statistic.HEADS)
# These cannot be attributed to one head: a norm acts on the sum of all heads.
BEHIND = (
    "; what stands between the output projection and the residual: its bias, a norm (as in OLMo 2) "
    "and a factor (as in Granite)"
)


# ---- contributions ------------------------------------------------------------------------------


def _contribution_norms(tile: statistic.WeightTile) -> Tensor:
    return tile.call.contribution_norms[tile.batches, tile.heads, tile.rows]


def _residual_norms(tile: statistic.WeightTile) -> Tensor:
    """Return (batches, 1, rows): the norm of the residual that the layer's output is added to."""
    return tile.call.residual_norms[tile.batches, None, tile.rows]


CONTRIBUTED = (
    RowStatistic(
        _contribution_norms,
        id="contribution_norm-1",
        formula="mean over queries i of ‖zᵢ W_O‖, for the head's output zᵢ and its part of the "
        "output projection",
        unit="of the residual, before any norm or factor",
        excluded=EXCLUDED + BEHIND,
        source="Kobayashi et al. 2021, arXiv:2109.07152, of one head",
        title="Norm of the contribution",
        most="has the largest contribution: norm {}",
        needs=("outputs", "out_proj"),
    ),
    RowStatistic(
        lambda tile: _contribution_norms(tile) / (x := _residual_norms(tile)).where(x > 0, 1.0),
        id="relative_contribution-1",
        formula="mean over queries i of ‖zᵢ W_O‖ / ‖xᵢ‖, for the residual xᵢ that the layer's "
        "output is added to",
        unit="ratio, from 0",
        excluded=EXCLUDED + "; queries with a residual of 0" + BEHIND,
        source="mixing against preserving: Kobayashi et al. 2021, arXiv:2109.07152, of one head",
        title="Relative contribution",
        most="has the largest contribution: {} times the norm of the residual",
        counts=lambda tile: tile.is_counted_query & (_residual_norms(tile) > 0),
        needs=("outputs", "out_proj", "residual"),
    ),
    EntrySum(
        lambda tile: (tile.cut_to_tile(tile.call.projected_value_norms),),
        id="value_weighted-1",
        formula="mean over queries i of Σⱼ A[i, j] ‖vⱼ W_O‖",
        unit="of the residual; at least contribution_norm",
        excluded=EXCLUDED + "; biases of the projections; a sink, which has no value",
        source="Kobayashi et al. 2020, arXiv:2004.10102, summed over the keys",
        title="Value-weighted norm, before values cancel",
        most="has the largest value-weighted norm: {}",
        needs=("values", "out_proj"),
    ),
)


class EffectiveRank(statistic.TileStatistic):
    """The number of directions in which a head's outputs vary."""

    definition = statistic.Definition(
        name="effective_rank",
        id="effective_rank-1",
        formula="exp(−Σₖ p[k] ln p[k]), p[k] = σ[k] / Σ σ, for the singular values σ of the head's "
        "outputs z less their mean over all queries; those that rounding cannot tell from 0 are 0",
        unit="directions, from 1 to the width of the head's values",
        excluded=EXCLUDED + "; no value where all outputs are equal",
        source="Roy and Vetterli 2007, The effective rank, EUSIPCO; from centred second moments",
        title="Effective rank of the outputs",
        most="has outputs in most directions: {}",
    )
    needs = ("outputs",)
    parts: ClassVar[statistic.Parts] = {
        "count": statistic.COUNT,
        "sum": statistic.SummaryPart(axes=("value_dim",)),
        "outer": statistic.SummaryPart(axes=("value_dim", "value_dim")),
    }

    def start(self, call: CapturedCall) -> Tensor:
        return call.matrix.q.new_zeros(call.matrix.shape[:3], dtype=torch.bool)

    def update(self, gathered: Tensor, tile: statistic.WeightTile) -> None:
        gathered[tile.batches, tile.heads, tile.rows] = tile.is_counted_query

    def make_summary(self, gathered: Tensor, call: CapturedCall) -> statistic.Summary:
        """Return count, sum and sum of outer products, in float64."""
        outputs = require_not_none(call.outputs)
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

    def result(self, summary: statistic.Summary) -> Tensor:
        """(heads,)."""
        outer, count = summary["outer"], summary["count"].clamp(min=1)
        mean = summary["sum"] / count[:, None]
        centred = outer - count[:, None, None] * mean[:, :, None] * mean[:, None, :]
        finite = centred.isfinite().all(-1).all(-1)  # eigvalsh fails at NaN
        squares = torch.linalg.eigvalsh(centred.where(finite[:, None, None], 0.0))
        # Rounding of an eigenvalue that is 0: sums of n terms for the outer product and each mean
        # (`headwise.function.rounding.sum_error_bound`), and the eigenvalues.
        terms = torch.minimum(count, LAMBDA * count.sqrt())
        size = outer.diagonal(dim1=1, dim2=2).sum(-1)
        bound = Roundoff.of(torch.float64).u * (3 * terms + outer.shape[-1]) * size
        sigma = squares.where(squares > bound[:, None], 0.0).sqrt()
        p = sigma / sigma.sum(-1, keepdim=True)  # NaN where nothing is left
        rank: Tensor = torch.special.entr(p).sum(-1).exp()
        return rank


class _OfSampledRows(statistic.TileStatistic):
    """A statistic of the rows that `CapturedCall.sampled_rows` holds."""

    def update(self, gathered: statistic.Summary, tile: statistic.WeightTile) -> None:  # noqa: ARG002
        tile.copy_sampled_rows_to_call()


class Copying(_OfSampledRows):
    """The share of the raised logits that belongs to the tokens a head attends to."""

    definition = statistic.Definition(
        name="copying",
        id="copying-1",
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
        title="Copying: raises the tokens it attends to",
        most="raises the logits of tokens it attends to: {} of all that it raises",
    )
    needs = ("tokens", "outputs", "out_proj", "unembedding")
    parts = statistic.MEAN

    def make_summary(self, gathered: statistic.Summary, call: CapturedCall) -> statistic.Summary:
        """Return the sums over sequences, each with its tokens, one head after the other."""
        samples, out_proj = call.sampled_rows, require_not_none(call.out_proj)
        exact = accumulation_dtype(require_not_none(call.outputs).dtype)
        for sequence, outputs in enumerate(require_not_none(call.outputs)):
            kinds = _token_kinds_of_sequence(call, sequence, exact)
            z = outputs[:, samples.queries[sequence]].to(exact)
            written = torch.bmm(z, out_proj.to(exact))  # (heads, samples, embed_dim)
            scores = _copying_scores(*kinds, samples.weights[sequence], written)
            share, raises = (torch.stack(part) for part in zip(*scores, strict=True))
            counted = samples.counted[sequence] & samples.real[sequence] & raises
            gathered["sum"] += share.masked_fill(~counted, 0.0).sum(1)
            gathered["count"] += counted.sum(1)
        return super().make_summary(gathered, call)


def _token_kinds_of_sequence(
    call: CapturedCall, sequence: int, exact: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys whose token has a row in the unembedding, their tokens, and these rows."""
    unembedding = require_not_none(call.unembedding)
    tokens = require_not_none(call.tokens)[sequence]
    has_row = (tokens >= 0) & (tokens < len(unembedding))
    keys = (call.real_keys[sequence] & has_row).nonzero().squeeze(1)
    kinds, kind = torch.unique(tokens[keys], return_inverse=True)
    return keys, kind, unembedding[kinds].to(exact)


def _copying_scores(
    keys: Tensor, kind: Tensor, directions: Tensor, weights: Tensor, written: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (samples,) scores of the rows of each head, and True where a row raises a token."""
    # As many heads at once as make their logits no larger than the directions.
    step = max(1, written.shape[2] // max(1, written.shape[1]))
    for some, rows in zip(written.split(step), weights.split(step), strict=True):
        for logits, row in zip(apply_linear(some, directions, None), rows, strict=True):
            yield _copying_of_head(row[:, keys].double(), kind, logits.double())


def _copying_of_head(rows: Tensor, kind: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    on_token = rows.new_zeros(logits.shape).index_add_(1, kind, rows)
    unseen = on_token <= 0
    raised = logits.masked_fill_(unseen, 0.0)
    mean = raised.sum(-1) / (~unseen).sum(-1).clamp(min=1)
    raised = raised.sub_(mean[:, None]).clamp_(min=0.0).masked_fill_(unseen, 0.0)
    total = raised.sum(-1)
    share = torch.linalg.vecdot(on_token, raised) / total.where(total > 0, 1.0)
    # A token alone is not above the mean: total is 0 there too.
    return share, total > 0


# ---- similarity of two heads --------------------------------------------------------------------


class TotalVariation(_OfSampledRows):
    """Similarity of the weights of two heads."""

    definition = statistic.Definition(
        name="total_variation",
        id="total_variation-1",
        formula="1 − ½ · mean over queries i of Σⱼ |A[i, j] − B[i, j]| for two heads A and B; a "
        "sink counts as one more key. At most 64 queries of each sequence, evenly spaced",
        unit="similarity, 0 (no key in common) to 1 (the same weights)",
        excluded="padded queries, and those for which either head may attend to nothing",
        source="Bhojanapalli et al. 2021, arXiv:2110.06821",
        axes=("other_head",),
    )
    parts = PAIRS

    def make_summary(self, gathered: statistic.Summary, call: CapturedCall) -> statistic.Summary:
        """Return sums of similarities over rows, and the number of rows."""
        samples = call.sampled_rows
        heads, keys = samples.weights.shape[1], samples.weights.shape[3]
        step = max(1, AT_ONCE // max(1, heads * keys))
        sequences = zip(samples.weights, samples.sink, samples.counted, strict=True)
        for weights, sink, counted in sequences:
            both = counted[:, None] & counted[None]
            gathered["count"] += both.sum(-1)
            parts = (weights.split(step, 1), sink.split(step, 1), both.split(step, -1))
            for some, share, real in zip(*parts, strict=True):
                rows = torch.cat([some, share[..., None]], -1).transpose(0, 1).double()
                alike = (1 - torch.cdist(rows, rows, p=1.0) / 2).permute(1, 2, 0)
                gathered["sum"] += alike.masked_fill(~real, 0.0).sum(-1)
        return super().make_summary(gathered, call)


class OutputCosine(statistic.TileStatistic):
    """Cosine of the contributions of two heads."""

    definition = statistic.Definition(
        name="output_cosine",
        id="output_cosine-1",
        formula="mean over queries i of cos(zᵢ W_O of the one head, zᵢ W_O of the other)",
        unit="cosine, −1 to 1",
        excluded="padded queries, and those for which either head writes nothing; a bias of the "
        "output projection",
        source="output disagreement, with the sign turned: Li et al. 2018, arXiv:1810.10183",
        axes=("other_head",),
    )
    parts = PAIRS
    needs = ("outputs", "out_proj")

    def make_summary(self, gathered: statistic.Summary, call: CapturedCall) -> statistic.Summary:
        """Return sums of cosines over rows, and the number of rows."""
        outputs, out_proj = require_not_none(call.outputs), require_not_none(call.out_proj)
        exact = accumulation_dtype(outputs.dtype)
        rows = outputs.transpose(1, 2)[call.real_queries]
        step = max(1, AT_ONCE // (out_proj.shape[0] * out_proj.shape[2]))
        for z in rows.split(step):
            written = tiles.multiply(z.to(exact).transpose(0, 1), out_proj.to(exact))
            norm = torch.linalg.vector_norm(written, dim=-1, keepdim=True)
            some = (norm > 0).double().squeeze(-1)
            unit = written.div_(norm.where(norm > 0, 1.0)).transpose(0, 1)
            gathered["sum"] += torch.bmm(unit, unit.mT).double().sum(0)
            gathered["count"] += some @ some.mT
        return super().make_summary(gathered, call)


class CKA(_OfSampledRows):
    """Similarity of the outputs of two heads, up to rotation and scale."""

    definition = statistic.Definition(
        name="cka",
        id="cka-1",
        formula="Σ HSIC(Z, Y) / √(Σ HSIC(Z, Z) · Σ HSIC(Y, Y)), the sums over sequences, for the "
        "outputs Z and Y of two heads at the same queries; HSIC is the unbiased linear one, which "
        "centres within the sequence. At most 64 queries of each, evenly spaced",
        unit="similarity: 1 for the same up to rotation and scale, about 0 for unrelated ones "
        "(noise may take it below 0)",
        excluded="padded queries, those for which any head may attend to nothing, and sequences "
        "with fewer than 4 queries that count",
        source="Kornblith et al. 2019, arXiv:1905.00414; over minibatches, unbiased: Nguyen et al. "
        "2021, arXiv:2010.15327, section 3",
        axes=("other_head",),
    )
    parts = PAIRS
    needs = ("outputs",)

    def make_summary(self, gathered: statistic.Summary, call: CapturedCall) -> statistic.Summary:
        """Return sums of HSIC over sequences, which are small and can be merged exactly."""
        samples, outputs = call.sampled_rows, require_not_none(call.outputs)
        sequences = zip(outputs, samples.queries, samples.counted.all(1), strict=True)
        for z, sampled, counted in sequences:
            rows = sampled[counted]
            if len(rows) >= FEWEST:
                gathered["sum"] += _estimate_hsic(z[:, rows].double())
                gathered["count"] += 1
        return super().make_summary(gathered, call)

    def result(self, summary: statistic.Summary) -> Tensor:
        """Return (heads, other_head); NaN where a head's outputs do not vary."""
        norms = summary["sum"].diagonal()
        norms = norms.where(norms > 0, torch.nan).sqrt()
        return summary["sum"] / (norms[:, None] * norms)


def _estimate_hsic(z: Tensor) -> Tensor:
    """Return (heads, heads): the unbiased estimate from outputs (heads, rows, width).

    HSIC₁ of Song et al. 2012 (JMLR 13), with kernels K = Z Zᵀ whose diagonal is set to 0.
    """
    z = z - z.mean(1, keepdim=True)  # changes nothing but the rounding
    kernel = torch.bmm(z, z.mT)
    kernel.diagonal(dim1=1, dim2=2).zero_()
    n, sums = z.shape[1], kernel.sum(-1)
    flat, total = kernel.flatten(1), sums.sum(-1)
    product = flat @ flat.T + total[:, None] * total / ((n - 1) * (n - 2))
    return (product - 2 / (n - 2) * (sums @ sums.T)) / (n * (n - 3))
