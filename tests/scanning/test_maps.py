"""Maps of texts of several lengths, of a generation with a cache, and of an earlier version."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import AttentionMatrix, Mask
from headwise import scan as scan_model
from headwise.errors import OptionError
from headwise.reports import blobs
from headwise.reports.page import viewer_data
from headwise.reports.report import ScanReport
from headwise.scanning.plan import _cells_within_bounds
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.maps import Map
from tests.reports.viewer_scans import viewer_scan
from tests.scanning.models import SOURCE, llama, tokens

HEADS = 3


def matrix(length: int) -> AttentionMatrix:
    generator = torch.Generator().manual_seed(length)
    q, k = (2 * torch.randn(1, HEADS, length, 5, generator=generator) for _ in range(2))
    return AttentionMatrix(q, k, mask=Mask.causal())


def scan_of(length: int, cells: int | None = None) -> HeadScan:
    wanted = matrix(length)
    return scan_model(wanted, torch.zeros_like(wanted.q), statistics=Map(cells))


def mean_by_position(lengths: list[int], size: int) -> Tensor:
    """(heads, blocks, blocks): the mean over the queries of all texts that are in a block."""
    blocks = -(-max(lengths) // size)
    total, count = torch.zeros(HEADS, blocks, blocks).double(), torch.zeros(blocks, 1).double()
    for length in lengths:
        member = (torch.arange(length)[:, None] // size == torch.arange(blocks)).double()
        total += torch.einsum("hqk,qr,kc->hrc", matrix(length).dense()[0].double(), member, member)
        count += member.sum(0)[:, None]
    return total / count


# ---- several texts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "size"),
    [
        ([40, 300, 511], 1),
        ([40, 513, 300], 4),
        ([600, 1100, 40], 8),
        ([512, 1030], 8),
        ([700, 513], 8),
    ],
)
def test_texts_of_several_lengths_are_merged_by_position(lengths: list[int], size: int) -> None:
    first, *others = (scan_of(length) for length in lengths)
    merged = first.merge(*others)
    expected = mean_by_position(lengths, size)
    # Sums of size² weights of float32, over as many texts.
    allowed = (size**2 + len(lengths) + 8) * 2**-23
    for found in (merged, scan_of(lengths[-1]).merge(*(map(scan_of, lengths[:-1])))):
        summary = found.layer_scans[0].summaries["map"]
        assert summary["length"].tolist() == [max(lengths)] * 2
        assert found["map"][0].shape == expected.shape
        assert (found["map"][0] - expected).abs().max() <= allowed


def test_a_generation_with_a_cache_has_the_map_of_one_pass() -> None:
    model, ids = llama(), tokens(1, SOURCE + 20)

    def generate(model: Any, input_ids: Tensor) -> None:
        cache = model(input_ids[:, :SOURCE], use_cache=True).past_key_values
        for at in range(SOURCE, input_ids.shape[1]):
            model(input_ids[:, at : at + 1], past_key_values=cache, use_cache=True)

    steps = scan_model(model, {"input_ids": ids}, statistics=Map(), call=generate)
    whole = scan_model(model, {"input_ids": ids}, statistics=Map())
    assert whole["map"].shape[2:] == (SOURCE + 20, SOURCE + 20)
    assert steps.layer_scans[0].calls == 21
    torch.testing.assert_close(steps["map"], whole["map"], rtol=1e-4, atol=1e-6)


def test_scans_of_other_lengths_have_no_difference_of_maps() -> None:
    wanted = ["entropy", "map"]
    scans = [
        scan_model(m, torch.zeros_like(m.q), statistics=wanted) for m in map(matrix, (24, 31, 31))
    ]
    assert scans[0].diff(scans[1]).names == ("entropy",)
    diff = scans[1].diff(scans[2])
    assert diff.names == ("entropy", "map")
    assert not diff["map"].any()


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "tokens", "cells"),
    [
        (144, 512, None),
        (145, 512, 256),
        (1024, 100, None),
        (1024, 512, 128),
        (144, 16_384, None),
        (1024, 131_072, None),
    ],
)
def test_all_maps_of_a_scan_stay_within_bounds(heads: int, tokens: int, cells: int | None) -> None:
    assert _cells_within_bounds(heads, tokens) == cells
    side = min(tokens, cells or (512 if tokens <= 512 else 160))
    assert heads * side**2 <= 38_000_000


# ---- blocks of the page --------------------------------------------------------------------------


@pytest.mark.parametrize("length", [129, 200, 511, 512, 513, 1000])
@pytest.mark.parametrize("most", [1024, 64])
def test_the_arrays_of_a_page_are_the_pooled_matrix(length: int, most: int) -> None:
    read = scan_of(length)
    layer = read.layer_scans[0]
    maps = blobs.head_map_arrays(read, layer, most=most)
    assert maps is not None
    axes = blobs.map_axes(read, layer, maps.shape[1:])
    assert axes is not None
    assert axes[0] == axes[1]
    size = int(axes[0].size)
    assert size == next(
        s for s in (1, 2, 4, 8, 16) if length / s <= min(most, 512 if length <= 512 else 160)
    )
    assert axes[0].last == length - size * (axes[0].blocks - 1)
    expected = mean_by_position([length], size)
    assert maps.shape == expected.shape
    assert abs(torch.from_numpy(maps) - expected).max() <= (size**2 + 8) * 2**-23


def test_a_page_of_many_heads_has_larger_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "MOST_CELLS", HEADS * 64**2)
    for cells, most in ((None, 64), (200, 1024)):  # a number that was chosen stays
        read = scan_of(200, cells)
        assert blobs.most_blocks_of_page(read) == most
        (layer,) = viewer_data(ScanReport.of(read))[0]["scans"][0]["layers"]
        blocks = 50 if cells is None else 200
        assert (layer["map"], layer["map_length"]) == ([blocks, blocks], [200, 200])


def test_the_words_of_blocks() -> None:
    assert blobs.MapAxis(129, 513, 4).words == "4, the last of 1"
    assert blobs.MapAxis(128, 512, 4).words == "4"
    assert blobs.MapAxis(128, 200, 200 / 128).words == "1 to 2"
    assert blobs.MapAxis(1, 50, 50).words == "50"


def test_a_map_by_shares_keeps_its_blocks(tmp_path: Path) -> None:
    """Of a scan of an earlier version: 200 tokens in 128 blocks of one or two."""
    read = HeadScan.load(viewer_scan(length=200, cells=128, by_shares=True).save(tmp_path / "a"))
    layer = read.layer_scans[0]
    assert read.definition("map").id == "map-1"
    maps = blobs.head_map_arrays(read, layer)
    assert maps is not None
    assert maps.shape[1:] == (128, 128)
    assert torch.equal(torch.from_numpy(maps), read["map"][0])
    axes = blobs.map_axes(read, layer, maps.shape[1:])
    assert axes is not None
    assert (axes[0].size, axes[0].words, axes[0].has_short_end) == (200 / 128, "1 to 2", False)
    both = read.merge(read)
    assert torch.equal(both["map"], read["map"])
    with pytest.raises(OptionError, match="map-1"):
        read.merge(viewer_scan(length=200, cells=128))
