"""Which tokens a head looks at: the same again, what came after it, separators, special tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.scanning.statistics.spread import EXCLUDED
from headwise.scanning.statistics.statistic import Definition, RowMean
from headwise.scanning.statistics.tile import WeightTile

WITHOUT_A_REPEAT = (
    "padded queries, those that may attend to nothing, special tokens where they are known, and "
    "queries whose token is not known or did not come before; an earlier one that the mask hides "
    "counts as 0"
)


class _AtRepeats(RowMean):
    """The weight on keys that stand ``after`` places behind an earlier key with the same token."""

    needs = ("own_key", "tokens")
    after: int

    def of_rows(self, tile: WeightTile) -> Tensor:
        batch, row, key = tile.repeats
        batches, heads, rows, columns = tile.weights.shape
        column = key + self.after - tile.columns.start
        inside = (column >= 0) & (column < columns)
        batch, row, column = batch[inside], row[inside], column[inside]
        total = torch.zeros(batches * rows, heads, dtype=torch.float64, device=row.device)
        total.index_add_(0, batch * rows + row, tile.weights[batch, :, row, column].double())
        return total.view(batches, rows, heads).transpose(1, 2)

    def counts(self, tile: WeightTile) -> Tensor:
        repeats, specials = tile.call.repeats, tile.call.specials
        repeated = repeats.earlier[tile.batches][:, tile.own] > 0
        if specials is not None:
            repeated = repeated & ~specials[tile.batches][:, tile.own]
        return tile.counted & repeated[:, None]


class DuplicateToken(_AtRepeats):
    """The weight on earlier keys that hold the query's own token."""

    definition = Definition(
        name="duplicate_token",
        formula="mean over queries i of Σⱼ A[i, j] over the keys j < i with token[j] = token[i]",
        unit="share of the weight, 0 to 1",
        excluded=WITHOUT_A_REPEAT,
        source="duplicate token heads: Wang et al. 2022, arXiv:2211.00593, section 3",
        title="Weight on the same token, earlier",
        most="puts {} of its weight on its own token, where it stood before",
    )
    after = 0


class Induction(_AtRepeats):
    """The weight on what came after an earlier key with the query's own token."""

    definition = Definition(
        name="induction",
        formula="mean over queries i of Σⱼ A[i, j] over the keys j ≤ i with token[j − 1] = "
        "token[i] and j − 1 < i",
        unit="share of the weight, 0 to 1",
        excluded=WITHOUT_A_REPEAT,
        source="prefix matching: Olsson et al. 2022, arXiv:2209.11895, on any text in place of "
        "random tokens that are repeated",
        title="Weight on what came next last time",
        most="puts {} of its weight on what followed its token the last time",
    )
    after = 1


class Separators(RowMean):
    """The weight on separators."""

    definition = Definition(
        name="separator",
        formula="mean over queries i of Σⱼ A[i, j] over the keys j that hold a separator",
        unit="share of the weight, 0 to 1",
        excluded=EXCLUDED + "; separators count as queries too",
        source="Clark et al. 2019, arXiv:1906.04341, section 3.2",
        title="Weight on separators",
        most="puts {} of its weight on separators",
    )
    needs = ("separators",)

    def of_rows(self, tile: WeightTile) -> Tensor:
        chosen = tile.call.separators
        assert chosen is not None
        return tile.on(chosen)


class Specials(RowMean):
    """The weight on the tokenizer's special tokens."""

    definition = Definition(
        name="special",
        formula="mean over queries i of Σⱼ A[i, j] over the keys j that hold a special token",
        unit="share of the weight, 0 to 1",
        excluded=EXCLUDED + "; special tokens count as queries too",
        source="Kovaleva et al. 2019, arXiv:1908.08593; Clark et al. 2019, arXiv:1906.04341, "
        "section 3.2",
        title="Weight on special tokens",
        most="puts {} of its weight on special tokens",
    )
    needs = ("specials",)

    def of_rows(self, tile: WeightTile) -> Tensor:
        chosen = tile.call.specials
        assert chosen is not None
        return tile.on(chosen)
