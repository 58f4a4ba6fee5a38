"""Real scans of random calls: matrices that are swept, without a model around them."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from headwise.masks.mask import Mask
from headwise.matrix.operator import AttentionMatrix
from headwise.scanning.call import CapturedCall
from headwise.scanning.layer import LayerScan
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.catalogue import find_standard_statistics
from headwise.scanning.statistics.maps import (
    Map,
    MostReceived,
    OffsetProfile,
    TopKeysOfChosenQueries,
)
from headwise.scanning.statistics.outputs import TotalVariation
from headwise.scanning.statistics.statistic import (
    Definition,
    RowMean,
    TileStatistic,
    WeightTile,
    compute_summaries,
)

BATCH, HEADS, LENGTH, HEAD_DIM = 3, 6, 24, 10


def standard(name: str, /, **words: str) -> TileStatistic:
    """One of the standard set, with other words where these are given."""
    one = copy(find_standard_statistics([name])[0])
    one.definition = replace(one.definition, **words)  # type: ignore[arg-type]
    return one


STATISTICS: tuple[TileStatistic, ...] = (
    standard("entropy"),
    standard("relative_entropy"),
    standard("maximum"),
    standard("previous_token"),
    standard("first_token"),
    standard("distance"),
    OffsetProfile(),
    Map(),
    TotalVariation(),
    TopKeysOfChosenQueries(),
    MostReceived(),
)


class Own(RowMean):
    """A statistic that headwise does not have."""

    definition = Definition(
        name="own",
        formula="mean over queries i of A[i, i]",
        unit="share of the weight, 0 to 1",
        excluded="padded queries",
        source="this test",
    )
    needs = ("own_key",)

    def of_rows(self, tile: WeightTile) -> Tensor:
        return tile.diagonal(0)


def matrix(seed: int, *, heads: int = HEADS, length: int = LENGTH) -> AttentionMatrix:
    """A random call."""
    numbers = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, BATCH, heads, length, HEAD_DIM, generator=numbers)
    return AttentionMatrix(2 * q, k, mask=Mask.causal(align="top-left"))


def layer_scan(
    matrices: Sequence[AttentionMatrix],
    *,
    name: str = "layer.0",
    statistics: Sequence[TileStatistic] = STATISTICS,
    is_cross: bool = False,
    heads: tuple[int, ...] | None = None,
) -> LayerScan:
    """What calls of one layer show."""
    num_heads = matrices[0].shape[1]
    heads = tuple(range(num_heads)) if heads is None else heads
    observations = [_observation(m, heads, is_cross=is_cross) for m in matrices]
    missing = {
        s.definition.name: reason
        for s in statistics
        if (reason := s.reason_not_computable(observations[0])) is not None
    }
    there = [s for s in statistics if s.definition.name not in missing]
    swept = [compute_summaries(observation, there) for observation in observations]
    summaries = {
        s.definition.name: s.merge([found[s.definition.name] for found in swept]) for s in there
    }
    return LayerScan(
        name=name,
        num_heads=num_heads,
        heads=heads,
        kind="cross" if is_cross else "self",
        calls=len(matrices),
        summaries=summaries,
        missing=missing,
    )


def _observation(
    matrix: AttentionMatrix, heads: tuple[int, ...], *, is_cross: bool
) -> CapturedCall:
    some = AttentionMatrix(matrix.q[:, list(heads)], matrix.k[:, list(heads)], mask=matrix.mask)
    return CapturedCall.for_self_attention(some, own_key=None if is_cross else 0)


def head_scan(
    *layers: LayerScan,
    statistics: Sequence[TileStatistic] = STATISTICS,
    model: str = "Model",
    notes: tuple[str, ...] = (),
) -> HeadScan:
    """A scan of layers that read the same tokens."""
    calls = layers[0].calls if layers else 0
    return HeadScan(
        model=model,
        sequences=calls * BATCH,
        tokens=calls * BATCH * LENGTH,
        notes=notes,
        statistics=tuple(statistics),
        layer_scans=layers,
    )


def random_scan(
    seed: int = 0,
    *,
    layers: int = 2,
    heads: int = HEADS,
    length: int = LENGTH,
    statistics: Sequence[TileStatistic] = STATISTICS,
    model: str = "Model",
    notes: tuple[str, ...] = (),
) -> HeadScan:
    """A scan of one call a layer."""
    return head_scan(
        *(
            layer_scan(
                [matrix(1000 * seed + index, heads=heads, length=length)],
                name=f"layer.{index}",
                statistics=statistics,
            )
            for index in range(layers)
        ),
        statistics=statistics,
        model=model,
        notes=notes,
    )


def changed(scan: HeadScan, index: int = 0, **fields: object) -> HeadScan:
    """A scan with other fields in one of its layers."""
    layers = list(scan.layer_scans)
    layers[index] = replace(layers[index], **fields)  # type: ignore[arg-type]
    return replace(scan, layer_scans=tuple(layers))


def is_same(one: HeadScan, two: HeadScan) -> bool:
    """Whether all of two scans is the same, to the bit."""
    plain = [
        (scan.model, scan.sequences, scan.tokens, scan.notes, scan.names) for scan in (one, two)
    ]
    return plain[0] == plain[1] and all(
        (a.name, a.num_heads, a.heads, a.kind, a.calls, a.missing)
        == (b.name, b.num_heads, b.heads, b.kind, b.calls, b.missing)
        and a.summaries.keys() == b.summaries.keys()
        and all(
            a.summaries[name].keys() == b.summaries[name].keys()
            and all(torch.equal(t, b.summaries[name][part]) for part, t in summary.items())
            for name, summary in a.summaries.items()
        )
        for a, b in zip(one.layer_scans, two.layer_scans, strict=True)
    )


def scalars(*numbers: Sequence[float], name: str = "entropy") -> HeadScan:
    """A scan of given numbers: a row for each layer."""
    statistic = standard(name)
    scan = random_scan(layers=len(numbers), heads=len(numbers[0]), statistics=(statistic,))
    layers = [
        replace(
            layer,
            summaries={
                name: {
                    "sum": torch.tensor(row, dtype=torch.float64),
                    "count": torch.ones(len(row), dtype=torch.float64),
                }
            },
        )
        for layer, row in zip(scan.layer_scans, numbers, strict=True)
    ]
    return replace(scan, layer_scans=tuple(layers))
