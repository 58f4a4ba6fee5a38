"""How widely a head looks: entropy and its kin, and how far its scores lie apart."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.scanning.statistics.statistic import Definition, RowMean
from headwise.scanning.statistics.tile import WeightTile

EXCLUDED = "padded queries, and those that may attend to nothing"


class Entropy(RowMean):
    """How widely a head looks, in nats."""

    definition = Definition(
        name="entropy",
        formula="mean over queries i of −Σⱼ A[i, j] · ln A[i, j]; a sink counts as one more key",
        unit="nats, from 0 (all weight on one key) to ln of the number of keys (even weight)",
        excluded=EXCLUDED,
        source="Clark et al. 2019, arXiv:1906.04341, section 3.3",
        title="Entropy",
        most="has the highest entropy: {}",
    )

    def of_rows(self, tile: WeightTile) -> Tensor:
        return tile.entropy


class RelativeEntropy(RowMean):
    """The entropy as a share of what even weights would have."""

    definition = Definition(
        name="relative_entropy",
        formula="mean over queries i of H[i] / ln n[i], for the n[i] keys that i may attend to; "
        "a sink counts as one of them",
        unit="share of the entropy of even weights, 0 to 1",
        excluded="padded queries, and those with one key or none, which have no choice",
        source="Zhai et al. 2023, arXiv:2303.06296, whose entropy is divided by its largest value",
        title="How even its weights are",
        most="has the most even weights: {} of the largest entropy that it could have",
    )

    def of_rows(self, tile: WeightTile) -> Tensor:
        return tile.entropy / self._choices(tile).clamp(min=2).to(tile.entropy.dtype).log()

    def counts(self, tile: WeightTile) -> Tensor:
        return tile.counted & (self._choices(tile) > 1)

    def _choices(self, tile: WeightTile) -> Tensor:
        return tile.allowed if tile.sink is None else tile.allowed + 1


class Maximum(RowMean):
    """How sure a head is of one key."""

    definition = Definition(
        name="maximum",
        formula="mean over queries i of maxⱼ A[i, j]",
        unit="share of the weight, 0 to 1",
        excluded=EXCLUDED,
        source="confidence: Voita et al. 2019, arXiv:1905.09418, section 4 (which leaves out the "
        "end of sentence; here it counts)",
        title="Its largest weight",
        most="is surest of one token: {} of its weight",
    )

    def of_rows(self, tile: WeightTile) -> Tensor:
        return tile.maximum


class EffectiveKeys(RowMean):
    """How many keys of even weight would have the entropy of the row."""

    definition = Definition(
        name="effective_keys",
        formula="mean over queries i of exp(H[i])",
        unit="keys, from 1",
        excluded=EXCLUDED,
        source="the perplexity of the row: exp of the entropy, Clark et al. 2019, arXiv:1906.04341",
        title="How many tokens it looks at",
        most="looks most widely: at {}",
        least="looks most narrowly: at {}",
    )

    def of_rows(self, tile: WeightTile) -> Tensor:
        return tile.entropy.exp()


class Participation(RowMean):
    """How many keys of even weight would have the sum of squares of the row."""

    definition = Definition(
        name="participation",
        formula="mean over queries i of (Σⱼ A[i, j])² / Σⱼ A[i, j]²",
        unit="keys, from 1",
        excluded=EXCLUDED + "; where a sink takes all of the weight, the row counts as 0",
        source="the inverse participation ratio: Bell and Dean 1970, doi:10.1039/DF9705000055",
        title="Tokens it looks at, by squares",
        most="looks at most tokens: {}",
    )

    def of_rows(self, tile: WeightTile) -> Tensor:
        if tile.sink is None:
            squares = torch.linalg.vecdot(tile.weights, tile.weights)
            return torch.where(squares > 0, 1 / squares, 0.0)
        # 1 less a large share would be rounding alone, and squares of what it leaves would vanish.
        largest = tile.maximum.where(tile.maximum > 0, 1.0)
        weights = tile.weights / largest[..., None]
        squares = torch.linalg.vecdot(weights, weights)
        return torch.where(squares > 0, weights.sum(-1) ** 2 / squares, 0.0)


class Logsumexp(RowMean):
    """How large the scores are, all in all."""

    definition = Definition(
        name="logsumexp",
        formula="mean over queries i of ln Σⱼ exp s[i, j], the sink included",
        unit="nats",
        excluded=EXCLUDED,
        source="the normaliser of the softmax; kept by FlashAttention, arXiv:2205.14135",
        title="How large its scores are, logsumexp",
        most="has the largest scores: {}",
    )

    def of_rows(self, tile: WeightTile) -> Tensor:
        return tile.logsumexp


class ScoreRange(RowMean):
    """How far the scores of a query lie apart; from about 17 on, float32 rounds weights away."""

    definition = Definition(
        name="score_range",
        formula="mean over queries i of maxⱼ s[i, j] − minⱼ s[i, j], over the keys i may attend to",
        unit="nats",
        excluded="padded queries, and those with one key or none",
        source="saturation of the softmax: Zhai et al. 2023, arXiv:2303.06296 (bounds by the "
        "spectral norm of the scores)",
        title="How far its scores lie apart",
        most="has scores furthest apart: {}",
    )
    reads_lowest = True

    def of_rows(self, tile: WeightTile) -> Tensor:
        assert tile.lowest is not None
        return tile.highest - tile.lowest

    def counts(self, tile: WeightTile) -> Tensor:
        return tile.counted & (tile.allowed > 1)
