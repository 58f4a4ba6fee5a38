"""How alike the heads of a layer are: in where they look, and in what they write."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.kernels.problem import accumulation_dtype
from headwise.scanning.captured_call import CapturedCall, known
from headwise.scanning.statistics.statistic import (
    HEADS,
    Definition,
    Summary,
    TileStatistic,
    mean_over,
)
from headwise.scanning.statistics.tile import WeightTile

PAIRS = mean_over(HEADS)
AT_ONCE = 2**20  # numbers that are looked at together
FEWEST = 4  # rows of which an unbiased CKA can be had


class TotalVariation(TileStatistic):
    """How alike two heads look."""

    definition = Definition(
        name="total_variation",
        formula="1 − ½ · mean over queries i of Σⱼ |A[i, j] − B[i, j]| for two heads A and B; a "
        "sink counts as one more key. At most 64 queries of each sequence, evenly spaced",
        unit="similarity, 0 (no key in common) to 1 (the same weights)",
        excluded="padded queries, and those for which either head may attend to nothing",
        source="Bhojanapalli et al. 2021, arXiv:2110.06821",
        axes=("other_head",),
    )
    parts = PAIRS

    def update(self, gathered: Summary, tile: WeightTile) -> None:  # noqa: ARG002
        tile.keep_samples()

    def finish(self, gathered: Summary, call: CapturedCall) -> Summary:
        """Sums of similarities over rows, and the number of rows."""
        samples = call.samples
        heads, keys = samples.weights.shape[1], samples.weights.shape[3]
        step = max(1, AT_ONCE // max(1, heads * keys))
        for weights, sink, counted in zip(
            samples.weights, samples.sink, samples.counted, strict=True
        ):
            both = counted[:, None] & counted[None]
            gathered["count"] += both.sum(-1)
            parts = (weights.split(step, 1), sink.split(step, 1), both.split(step, -1))
            for some, share, real in zip(*parts, strict=True):
                rows = torch.cat([some, share[..., None]], -1).transpose(0, 1).double()
                alike = (1 - torch.cdist(rows, rows, p=1.0) / 2).permute(1, 2, 0)
                gathered["sum"] += alike.masked_fill(~real, 0.0).sum(-1)
        return super().finish(gathered, call)


class OutputCosine(TileStatistic):
    """How alike the directions are that two heads write."""

    definition = Definition(
        name="output_cosine",
        formula="mean over queries i of cos(zᵢ W_O of the one head, zᵢ W_O of the other)",
        unit="cosine, −1 to 1",
        excluded="padded queries, and those for which either head writes nothing; a bias of the "
        "output projection",
        source="output disagreement, with the sign turned: Li et al. 2018, arXiv:1810.10183",
        axes=("other_head",),
    )
    parts = PAIRS
    needs = ("outputs", "out_proj")

    def finish(self, gathered: Summary, call: CapturedCall) -> Summary:
        """Sums of cosines over rows, and the number of rows."""
        outputs, out_proj = known(call.outputs), known(call.out_proj)
        exact = accumulation_dtype(outputs.dtype)
        rows = outputs.transpose(1, 2)[call.real_queries]
        step = max(1, AT_ONCE // (out_proj.shape[0] * out_proj.shape[2]))
        for z in rows.split(step):
            written = torch.bmm(z.to(exact).transpose(0, 1), out_proj.to(exact)).transpose(0, 1)
            norm = torch.linalg.vector_norm(written, dim=-1, keepdim=True)
            some = (norm > 0).double().squeeze(-1)
            written = written / norm.where(norm > 0, 1.0)
            gathered["sum"] += torch.bmm(written, written.mT).double().sum(0)
            gathered["count"] += some.mT @ some
        return super().finish(gathered, call)


class CKA(TileStatistic):
    """How alike the outputs of two heads are, up to rotation and scale."""

    definition = Definition(
        name="cka",
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

    def update(self, gathered: Summary, tile: WeightTile) -> None:  # noqa: ARG002
        tile.keep_samples()

    def finish(self, gathered: Summary, call: CapturedCall) -> Summary:
        """Sums of HSIC over sequences: small whatever the heads' width, and exact to merge."""
        samples = call.samples
        for outputs, places, counted in zip(
            known(call.outputs), samples.places, samples.counted.all(1), strict=True
        ):
            rows = places[counted]
            if len(rows) >= FEWEST:
                gathered["sum"] += _hsic(outputs[:, rows].double())
                gathered["count"] += 1
        return super().finish(gathered, call)

    def result(self, summary: Summary) -> Tensor:
        """(heads, other_head); NaN where a head's outputs do not vary."""
        own = summary["sum"].diagonal()
        own = own.where(own > 0, torch.nan).sqrt()
        return summary["sum"] / (own[:, None] * own)


def _hsic(z: Tensor) -> Tensor:
    """(heads, heads): the unbiased estimate from (heads, rows, width) outputs.

    HSIC₁ of Song et al. 2012 (JMLR 13), with kernels K = Z Zᵀ whose diagonal is set to 0.
    """
    z = z - z.mean(1, keepdim=True)  # changes nothing but the rounding
    kernel = torch.bmm(z, z.mT)
    kernel.diagonal(dim1=1, dim2=2).zero_()
    n, sums = z.shape[1], kernel.sum(-1)
    flat, total = kernel.flatten(1), sums.sum(-1)
    product = flat @ flat.T + total[:, None] * total / ((n - 1) * (n - 2))
    return (product - 2 / (n - 2) * (sums @ sums.T)) / (n * (n - 3))
