"""The keys with the largest weights of every query, against the dense weights in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import AttentionMatrix, Mask, scan
from headwise.errors import OptionError
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.maps import Map, TopKeysOfEveryQuery, find_largest
from tests.scanning.models import BATCH, HEADS, LENGTH, SOURCE, bert, own, t5, text, tokens

NAME = "top_keys_of_every_query"
EPS = torch.finfo(torch.float32).eps
QUERIES, KEYS, DIM = 11, 13, 5


def matrix(seed: int = 0, *, heads: int = HEADS, kv_heads: int = 2) -> AttentionMatrix:
    generator = torch.Generator().manual_seed(seed)
    q = 3 * torch.randn(BATCH, heads, KEYS, DIM, generator=generator, dtype=torch.float64)
    k = torch.randn(BATCH, kv_heads, KEYS, DIM, generator=generator, dtype=torch.float64)
    return AttentionMatrix(q, k, mask=Mask.causal())


def scanned(weights: AttentionMatrix, *statistics: TopKeysOfEveryQuery) -> HeadScan:
    values = torch.zeros(BATCH, 2, KEYS, DIM, dtype=torch.float64)
    return scan(weights, values, statistics=statistics)


def test_keys_and_weights_are_those_of_the_dense_matrix() -> None:
    weights = matrix()
    dense = weights.dense()
    summary = scanned(weights, TopKeysOfEveryQuery()).layer_scans[0].summaries[NAME]
    assert summary["lengths"].tolist() == [KEYS] * BATCH
    share, key = dense.topk(4, dim=-1)
    for sequence in range(BATCH):
        rows = slice(sequence * KEYS, (sequence + 1) * KEYS)
        for head in range(HEADS):
            for query in range(KEYS):
                count = min(4, query + 1)  # a causal row has so many keys
                stored = summary["key"][head, rows][query], summary["share"][head, rows][query]
                assert stored[0].tolist() == key[sequence, head, query, :count].tolist() + [-1] * (
                    4 - count
                )
                torch.testing.assert_close(
                    stored[1][:count].double(),
                    share[sequence, head, query, :count].double(),
                    rtol=EPS,
                    atol=EPS,
                )


def test_only_chosen_heads_are_stored() -> None:
    model, ids = own().double(), tokens(BATCH, LENGTH)
    chosen = TopKeysOfEveryQuery([(0, 1), ("blocks.1*", 3), (1, 0)], ranks=2)
    first, second = scan(model, ids, statistics=["standard", chosen]).layer_scans
    assert first.summaries[NAME]["row"].tolist() == [-1, 0, -1, -1]
    assert second.summaries[NAME]["row"].tolist() == [0, -1, -1, 1]
    assert second.summaries[NAME]["key"].shape == (2, BATCH * LENGTH, 2)
    only = scan(model, ids, statistics=["entropy", TopKeysOfEveryQuery([(1, 2)])])
    assert "none of the chosen heads" in only.layer_scans[0].missing[NAME]
    result = only[NAME][1]
    assert result.shape == (HEADS, BATCH * LENGTH, 4, 2)
    assert [bool(head.isnan().all()) for head in result] == [True, True, False, True]


def test_padding_does_not_count() -> None:
    model = bert()
    together = text(left=True)
    whole = scan(model, together, statistics=TopKeysOfEveryQuery()).layer_scans[0]
    lengths = together["attention_mask"].sum(1).tolist()
    assert whole.summaries[NAME]["lengths"].tolist() == lengths
    second = {"input_ids": together["input_ids"][1:, LENGTH - lengths[1] :]}
    alone = scan(model, second, statistics=TopKeysOfEveryQuery()).layer_scans[0]
    keys = whole.summaries[NAME]["key"][:, lengths[0] :]
    assert int(keys.max()) == lengths[1] - 1
    # Position embeddings see the padding, so only the range of the keys is the same.
    assert keys.shape == alone.summaries[NAME]["key"].shape


def test_cross_attention_and_texts() -> None:
    inputs = {"input_ids": tokens(BATCH, SOURCE), "decoder_input_ids": tokens(BATCH, LENGTH)}
    read = scan(t5(), inputs, statistics=TopKeysOfEveryQuery())
    kinds = {(layer.kind, layer.query_text, layer.key_text) for layer in read.layer_scans}
    assert kinds == {("self", 0, 0), ("self", 1, 1), ("cross", 1, 0)}
    assert [list(each.lengths) for each in read.texts] == [[SOURCE] * BATCH, [LENGTH] * BATCH]
    assert torch.equal(read.texts[1].ids, inputs["decoder_input_ids"].flatten().int())
    cross = next(layer for layer in read.layer_scans if layer.kind == "cross")
    assert cross.summaries[NAME]["key"].shape == (HEADS, BATCH * LENGTH, 4)
    assert int(cross.summaries[NAME]["key"].max()) == SOURCE - 1


def test_merging_keeps_the_order_of_sequences_and_texts(tmp_path: Path) -> None:
    model = own().double()
    inputs = [tokens(1, LENGTH), tokens(1, SOURCE)]
    statistics: list[Any] = [TopKeysOfEveryQuery([(0, 2)]), Map(cells=16)]
    parts = [scan(model, ids, statistics=statistics) for ids in inputs]
    merged, together = parts[0].merge(parts[1]), scan(model, inputs, statistics=statistics)
    saved = HeadScan.load(merged.save(tmp_path / "a"))
    for each in (merged, together, saved):
        assert [text.lengths for text in each.texts] == [(LENGTH, SOURCE)]
        assert torch.equal(each.texts[0].ids, torch.cat([ids[0] for ids in inputs]).int())
        summary = each.layer_scans[0].summaries[NAME]
        assert summary["lengths"].tolist() == [LENGTH, SOURCE]
        for name, tensor in together.layer_scans[0].summaries[NAME].items():
            assert torch.equal(summary[name], tensor)
        # In blocks of two tokens, by position.
        assert each["map"].shape == (2, HEADS, (LENGTH + 1) // 2, (LENGTH + 1) // 2)
        assert each.layer_scans[0].summaries["map"]["length"].tolist() == [LENGTH, LENGTH]


OTHERS = {
    "heads": (TopKeysOfEveryQuery([(0, 1)]), TopKeysOfEveryQuery([(0, 2)]), "the top keys of some"),
    "ranks": (TopKeysOfEveryQuery(ranks=2), TopKeysOfEveryQuery(ranks=3), "2 top keys a query"),
    "cells": (Map(), Map(cells=8), "a map of the text's cells, and one of 8"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_scans_with_other_settings_do_not_merge(case: str) -> None:
    first, second, message = OTHERS[case]
    model, ids = own().double(), tokens(1, SOURCE)
    with pytest.raises(OptionError, match=message):
        scan(model, ids, statistics=first).merge(scan(model, ids, statistics=second))


WRONG: dict[str, tuple[Any, str]] = {
    "a name": (lambda: TopKeysOfEveryQuery("some"), "heads=\\[\\(1, 0\\)"),
    "a head alone": (lambda: TopKeysOfEveryQuery([3]), "pairs of a layer and a head"),
    "no head": (lambda: TopKeysOfEveryQuery([]), "pairs of a layer and a head"),
    "no rank": (lambda: TopKeysOfEveryQuery(ranks=0), "from 1 to 64"),
    "no cells": (lambda: Map(cells=0), "the most blocks on each side, from 1 to 1,024"),
    "many cells": (lambda: Map(cells=2048), "Map\\(cells=2048\\)"),
}


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_are_refused(case: str) -> None:
    make, message = WRONG[case]
    with pytest.raises(OptionError, match=message):
        make()


@pytest.mark.parametrize("cells", [1, 8, 128])
def test_a_map_of_any_size_is_the_pooled_matrix(cells: int) -> None:
    weights = matrix()
    pooled = scan(
        weights, torch.zeros(BATCH, 2, KEYS, DIM, dtype=torch.float64), statistics=Map(cells)
    )
    dense = weights.dense()
    size = {1: 16, 8: 2, 128: 1}[cells]
    block = torch.arange(KEYS) // size
    member = (block[:, None] == torch.arange(int(block[-1]) + 1)).double()
    expected = torch.einsum("bhqk,qr,kc->hrc", dense.double(), member, member)
    expected = expected / (BATCH * member.sum(0))[:, None]
    found = pooled["map"][0]
    torch.testing.assert_close(found, expected, rtol=EPS + 2**-24, atol=EPS, equal_nan=True)


def test_texts_beyond_the_limit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.scanning.layer.MOST_TOKENS", 2 * LENGTH + 1)
    model: Any = own()
    inputs: list[Tensor] = [tokens(1, LENGTH), tokens(1, LENGTH), tokens(1, 3), tokens(1, 1)]
    whole = scan(model, inputs, statistics="entropy")
    merged = scan(model, inputs[:2], statistics="entropy").merge(
        scan(model, inputs[2:], statistics="entropy")
    )
    assert whole.texts[0].lengths == merged.texts[0].lengths == (LENGTH, LENGTH)


@pytest.mark.parametrize("columns", [3, 64, 2047, 2048, 2049, 5000])
@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_the_largest_of_long_rows_are_those_of_topk(columns: int, ranks: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    # All values differ, so that the order is one.
    rows = [torch.randperm(columns, generator=generator) for _ in range(6)]
    weights = torch.stack(rows).view(2, 3, columns) / columns
    weights[0, 0] = weights[0, 0].sort().values  # the largest stand behind the last block
    found = find_largest(weights, min(ranks, columns))
    expected = weights.topk(min(ranks, columns), dim=-1)
    assert torch.equal(found[0], expected.values)
    assert torch.equal(found[1], expected.indices)
