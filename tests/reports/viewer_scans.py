"""Scans for the viewer that no model made: of any size, in a few seconds, from a seed."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headwise.reports.report import ScanReport
from headwise.scanning.layer import LayerScan, ScannedText
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.catalogue import find_standard_statistics
from headwise.scanning.statistics.maps import Map, MapOfShares, TopKeysOfEveryQuery, block_size
from headwise.scanning.statistics.statistic import Statistic, Summary

SCALARS = ("previous_token", "induction", "first_token", "entropy", "effective_keys")
RANKS = 4
CELLS = 128
REACH = 16
WORDS = (
    *(" the", " rabbit", " hole", " Alice", "\n", " was", " beginning", " to", " get", " very"),
    *(" tired", ",", ".", " of", " sitting", " by", " her", " sister"),
)
HOSTILE = (
    "</script><script>alert(1)</script>",
    '<img src="x" onerror="alert(1)">',
    "\u202eabc",
    "\x00",
    "x" * 10_000,
    "שלום",
    "\U0001f407",
    "\ud83d",  # half of an emoji
    "\ufffd",
    "",
)


def words_of(words: Sequence[str]) -> dict[int, str]:
    return dict(enumerate(words))


def _mean(values: Tensor) -> Summary:
    return {"sum": values.double(), "count": torch.ones_like(values, dtype=torch.float64)}


def _maps(generator: np.random.Generator, heads: int, cells: int) -> Tensor:
    """Causal maps: local ones, of the first token, with a stripe at half the distance."""
    query, key = np.arange(cells)[:, None], np.arange(cells)[None]
    maps = []
    for head in range(heads):
        values = np.exp(-(((query - key) / (1 + head % 5)) ** 2))
        values = (
            values + 3 * (head % 3 == 0) * (key == 0) + 4 * (head % 4 == 1) * (key == query // 2)
        )
        values = (values + 1e-3 * generator.random((cells, cells))) * (key <= query)
        maps.append(values / values.sum(1, keepdims=True))
    return torch.from_numpy(np.stack(maps))


def _top_keys(generator: np.random.Generator, heads: int, top: int, length: int) -> Summary:
    row = torch.full((heads,), -1)
    row[:top] = torch.arange(top)
    back = generator.geometric(0.02, (top, length, RANKS)) - 1
    key = np.arange(length)[:, None] - back
    share = np.sort(generator.dirichlet([0.5] * (RANKS + 1), (top, length))[..., :RANKS], -1)
    none = key < 0
    return {
        "row": row,
        "lengths": torch.tensor([length]),
        "key": torch.from_numpy(np.where(none, -1, key)).int(),
        "share": torch.from_numpy(np.where(none, -1, share[..., ::-1])).float(),
    }


def _distances(generator: np.random.Generator, index: int, heads: int, length: int) -> Summary:
    """From the heads of a layer to those so far: of 256 queries, or of all of a short text."""
    rows = float(length if length <= 512 else 256)
    distances = torch.from_numpy(generator.uniform(0.02, 1.0, (heads, (index + 1) * heads)))
    own = distances[:, -heads:]
    own.copy_((own + own.T) / 2).fill_diagonal_(0.0)
    queries = torch.full((heads,), float(length), dtype=torch.float64)
    return {
        "sum": rows * distances,
        "count": torch.full_like(distances, rows),
        "queries": queries,
    }


def _map_summary(maps: Tensor, length: int, *, by_shares: bool) -> Summary:
    """The summary of maps of one text of this length."""
    heads, cells = maps.shape[:2]
    if by_shares:  # as earlier versions had it
        block = torch.arange(length) * cells // length
        inside = block.bincount(minlength=cells).double()
        return {"sum": maps * inside[:, None], "count": inside.expand(heads, -1).clone()}
    size = block_size(length, cells)
    inside = (length - size * torch.arange(cells)).clamp(max=size).double()
    return {
        "sum": (maps * inside[:, None]).float(),
        "count": inside.expand(heads, -1).clone(),
        "length": torch.tensor([length, length]),
        "cells": torch.tensor(CELLS),
    }


def layer_of(
    index: int, *, heads: int, length: int, top: int, cells: int, by_shares: bool
) -> LayerScan:
    generator = np.random.default_rng(index)
    shares = torch.from_numpy(generator.beta(1, 20, (3, heads)))
    if index == 1:
        shares[1, min(2, heads - 1)] = 0.92  # an induction head
    entropy = torch.from_numpy(generator.uniform(0.5, 6.0, heads))
    profile = torch.from_numpy(generator.dirichlet([0.3] * (2 * REACH + 2), heads))
    summaries: dict[str, Summary] = {
        "previous_token": _mean(shares[0]),
        "induction": _mean(shares[1]),
        "first_token": _mean(shares[2]),
        "entropy": _mean(entropy),
        "effective_keys": _mean(entropy.exp()),
        "offset_profile": {
            "sum": profile[:, :-1] * length,
            "count": torch.full((heads, 2 * REACH + 1), float(length), dtype=torch.float64),
        },
        "most_received": {
            "received": torch.arange(8.0, 0.0, -1.0).double().expand(heads, -1).clone(),
            "key": (torch.arange(8) % length).expand(heads, -1).clone(),
            "token": torch.arange(8).expand(heads, -1).clone(),
        },
        "map": _map_summary(_maps(generator, heads, cells), length, by_shares=by_shares),
    }
    summaries["head_distance"] = _distances(generator, index, heads, length)
    if top:
        summaries["top_keys_of_every_query"] = _top_keys(generator, heads, top, length)
    return LayerScan(
        name=f"h.{index}.attn",
        num_heads=heads,
        heads=tuple(range(heads)),
        kind="self",
        calls=1,
        summaries=summaries,
        missing={} if top else {"top_keys_of_every_query": "no head was chosen"},
        query_text=0,
        key_text=0,
    )


def viewer_scan(
    *,
    layers: int = 3,
    heads: int = 5,
    length: int = 640,
    top: int = 1,
    cells: int = CELLS,
    by_shares: bool = False,
    words: Sequence[str] = WORDS,
) -> HeadScan:
    """A scan with everything that the viewer shows; ``top`` heads of a layer have top keys.

    A map has at most so many ``cells`` on each side, or with ``by_shares`` just so many.
    """
    blocks = cells if by_shares else -(-length // block_size(length, cells))
    ids = torch.from_numpy(np.random.default_rng(7).integers(len(words), size=length)).int()
    ids[: len(words)] = torch.arange(len(words))[:length]
    statistics: list[Statistic] = [
        *find_standard_statistics([*SCALARS, "offset_profile", "most_received", "head_distance"]),
        MapOfShares() if by_shares else Map(cells),
        TopKeysOfEveryQuery(ranks=RANKS),
    ]
    return HeadScan(
        model="MadeUp",
        sequences=1,
        tokens=length,
        notes=(),
        statistics=tuple(statistics),
        layer_scans=tuple(
            layer_of(index, heads=heads, length=length, top=top, cells=blocks, by_shares=by_shares)
            for index in range(layers)
        ),
        texts=(ScannedText(ids, (length,)),),
    )


def turned(scan: HeadScan, order: Tensor) -> HeadScan:
    """The scan with the heads of each layer in another order: head h is head ``order[h]`` of it."""
    layers = []
    for layer in scan.layer_scans:
        summaries = {
            name: {
                part: value[order] if value.dim() and len(value) == len(order) else value
                for part, value in summary.items()
            }
            for name, summary in layer.summaries.items()
        }
        layers.append(replace(layer, summaries=summaries))
    return replace(scan, layer_scans=tuple(layers))


def with_summary(scan: HeadScan, layer: int, **summaries: Summary) -> HeadScan:
    """The scan with other summaries in a layer."""
    layers = list(scan.layer_scans)
    layers[layer] = replace(layers[layer], summaries={**layers[layer].summaries, **summaries})
    return replace(scan, layer_scans=tuple(layers))


def viewer_report(
    scan: HeadScan, *, title: str = "made-up", words: Sequence[str] = WORDS, **changes: object
) -> ScanReport:
    names = words_of(words)
    given: dict[str, object] = {
        "scan": scan,
        "title": title,
        "about": "MadeUp, 12 parameters in float32",
        "read": f"a made-up text of {scan.tokens:,} tokens",
        "name_of": lambda token: names.get(token, "?"),
        "versions": {"headwise": "0.0", "torch": "0.1"},
        "command": "headwise scan FOLDER --top-keys {heads}",
        **changes,
    }
    return ScanReport(**given)  # type: ignore[arg-type]


def gpt2_sized(length: int = 16_384) -> ScanReport:
    """144 heads with the top keys of every query."""
    scan = viewer_scan(layers=12, heads=12, length=length, top=12)
    return viewer_report(scan, title="GPT-2 sized")


def incompressible(length: int = 16_384) -> ScanReport:
    """The report of GPT-2's size that deflate can shrink least.

    Squares of normal numbers have the most entropy among weights whose rows sum to 1, since their
    roots, of which a byte is stored, then have a given mean square.
    """
    report = gpt2_sized(length)
    generator = np.random.default_rng(0)
    for layer in report.scan.layer_scans:
        heads, cells, _ = layer.summaries["map"]["sum"].shape
        weights = generator.standard_normal((heads, cells, cells)) ** 2
        weights *= length / cells / weights.sum(-1, keepdims=True)
        layer.summaries["map"]["sum"] = torch.from_numpy(weights).float()
        top = layer.summaries["top_keys_of_every_query"]
        top["key"] = torch.from_numpy(generator.integers(length, size=top["key"].shape)).int()
    ids = torch.from_numpy(generator.permutation(length)).int()
    texts = (ScannedText(ids, (length,)),)
    names = [f" w{number}" for number in range(length)]
    return viewer_report(replace(report.scan, texts=texts), words=names)


def large(length: int = 131_072) -> ScanReport:
    """1,024 heads."""
    return viewer_report(
        viewer_scan(layers=32, heads=32, length=length, top=0), title="1,024 heads"
    )
