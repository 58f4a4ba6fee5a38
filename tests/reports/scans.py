"""Scans that were made up: of any size, and at once."""

from collections.abc import Sequence

import torch

from headwise.masks.mask import Mask
from headwise.matrix.operator import AttentionMatrix
from headwise.reports.report import ScanReport
from headwise.scanning.call import CapturedCall
from headwise.scanning.layer import LayerScan
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics import catalogue
from headwise.scanning.statistics.similarity import HeadDistance, PassOfModel
from headwise.scanning.statistics.statistic import TileStatistic, compute_summaries, read_tiles

LAYERS, HEADS, LENGTH = 3, 5, 37


def call_of(index: int, *, heads: int, length: int) -> CapturedCall:
    generator = torch.Generator().manual_seed(index)
    q, k, v = (3 * torch.randn(1, heads, length, 7, generator=generator) for _ in range(3))
    matrix = AttentionMatrix(q, k, mask=Mask.causal(), scale=1.0)
    tokens = torch.randint(20, (1, length), generator=generator)
    return CapturedCall.for_self_attention(
        matrix, tokens=tokens, separators=tokens == 3, values=v, outputs=matrix @ v
    )


def layer_of(
    index: int, statistics: Sequence[TileStatistic], *, heads: int, length: int
) -> LayerScan:
    observation = call_of(index, heads=heads, length=length)
    missing = {
        s.definition.name: r for s in statistics if (r := s.reason_not_computable(observation))
    }
    fitting = [s for s in statistics if s.definition.name not in missing]
    return LayerScan(
        name=f"layer.{index}.attention",
        num_heads=heads,
        heads=tuple(range(heads)),
        kind="self",
        calls=1,
        summaries=compute_summaries(observation, fitting),
        missing=missing,
    )


def made_up(
    *,
    layers: int = LAYERS,
    heads: int = HEADS,
    length: int = LENGTH,
    names: Sequence[str] | None = None,
    notes: tuple[str, ...] = (),
) -> HeadScan:
    statistics = catalogue.STANDARD if names is None else catalogue.find_standard_statistics(names)
    made = [layer_of(index, statistics, heads=heads, length=length) for index in range(layers)]
    if names is None:
        together = PassOfModel()
        for index in range(layers):
            call = call_of(index, heads=heads, length=length)
            together.add(index, 0, read_tiles(call, [HeadDistance()])[0][1])
        for index, summary in together.compare([heads] * layers):
            made[index].summaries["head_distance"] = summary
    return HeadScan(
        model="MadeUp",
        sequences=1,
        tokens=length,
        notes=notes,
        statistics=statistics,
        layer_scans=tuple(made),
    )


def report(scan: HeadScan, **changes: object) -> ScanReport:
    given: dict[str, object] = {
        "scan": scan,
        "title": "made-up",
        "about": "MadeUp, 12 parameters in float32",
        "read": "a <text> & more, all 37 tokens",
        "chosen": "Separators: “.”.",
        "name_of": lambda token: f"<{token}>",
        "versions": {"headwise": "0.0", "torch": "0.1"},
        **changes,
    }
    return ScanReport(**given)  # type: ignore[arg-type]
