"""The result of a scan: what is read from it, and how several become one."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwise.errors import MissingExtraError, OptionError
from headwise.scanning.layer import LayerValue
from headwise.scanning.selection import select_statistics
from tests.scanning.scans import (
    BATCH,
    HEADS,
    LENGTH,
    STATISTICS,
    Own,
    changed,
    head_scan,
    is_same,
    layer_scan,
    matrix,
    random_scan,
    scalars,
    standard,
)


def test_a_statistic_is_layers_by_heads() -> None:
    scan = random_scan(layers=4)
    entropy = scan["entropy"]
    assert entropy.shape == (4, HEADS)
    assert entropy.dtype == torch.float64
    expected = matrix(3).entropy().double().mean((0, 2))
    torch.testing.assert_close(entropy[3], expected, rtol=1e-5, atol=0)
    assert scan["map"].shape == (4, HEADS, LENGTH, LENGTH)
    assert scan["offset_profile"].shape == (4, HEADS, 33)


def test_a_head_keeps_its_number_whatever_was_looked_at() -> None:
    whole = layer_scan([matrix(0)], name="a")
    some = layer_scan([matrix(0)], name="b", heads=(4, 1))
    small = layer_scan([matrix(1, heads=2)], name="c")
    values = head_scan(whole, some, small)["maximum"]
    assert values.shape == (3, HEADS)
    assert torch.equal(values[1, [1, 4]], values[0, [1, 4]])
    assert values[1, [0, 2, 3, 5]].isnan().all()
    assert values[2, :2].isfinite().all()
    assert values[2, 2:].isnan().all()


def test_other_heads_keep_their_numbers_too() -> None:
    whole = layer_scan([matrix(0)], name="a")
    some = layer_scan([matrix(0)], name="b", heads=(4, 1))
    small = layer_scan([matrix(1, heads=2)], name="c")
    values = head_scan(whole, some, small)["total_variation"]
    assert values.shape == (3, HEADS, HEADS)
    assert values[0].isfinite().all()
    assert values[1, 4, 1] == values[1, 1, 4] == values[0, 4, 1] != values[0, 1, 5]
    assert values[1].isfinite().nonzero().tolist() == [[1, 1], [1, 4], [4, 1], [4, 4]]
    assert values[2].isfinite().nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_a_layer_without_the_statistic_has_no_value() -> None:
    cross = layer_scan([matrix(0)], name="cross", is_cross=True)
    scan = head_scan(layer_scan([matrix(0)], name="self"), cross)
    assert scan["previous_token"][0].isfinite().all()
    assert scan["previous_token"][1].isnan().all()
    assert scan["entropy"].isfinite().all()
    with pytest.raises(OptionError) as error:
        head_scan(cross)["previous_token"]
    assert error.value.saw == (
        "statistic 'previous_token', which no layer has: "
        "cross attention: no key has the position of a query"
    )
    assert error.value.needed.startswith("a statistic that was measured: entropy, ")
    assert "previous_token" not in error.value.needed
    assert "own_key" in error.value.do


def test_unknown_names_are_refused_with_those_there_are() -> None:
    scan = random_scan(layers=1)
    for ask in (scan.__getitem__, scan.definition, scan.top):
        with pytest.raises(OptionError, match=r"statistic 'entrpy'\n  needed: one of entropy, "):
            ask("entrpy")
    assert scan.definition("entropy") == standard("entropy").definition


def test_the_table_has_a_row_for_each_head_that_was_looked_at() -> None:
    scan = head_scan(
        layer_scan([matrix(0)], name="a"),
        layer_scan([matrix(1)], name="b", heads=(4, 1), is_cross=True),
    )
    table = scan.table()
    assert len(table) == HEADS + 2
    row = table[HEADS]
    assert list(row) == [
        "layer",
        "layer_index",
        "head",
        *("entropy", "relative_entropy", "maximum", "previous_token", "first_token", "distance"),
    ]
    assert (row["layer"], row["layer_index"], row["head"]) == ("b", 1, 4)
    assert row["entropy"] == float(scan["entropy"][1, 4])
    assert math.isnan(row["distance"])  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_table_in_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    scan = random_scan(layers=2)
    frame = scan.to_pandas()
    assert list(frame.columns) == ["layer", "layer_index", "head", *scan.scalars]
    assert frame.loc[HEADS + 2, "maximum"] == float(scan["maximum"][1, 2])
    assert list(head_scan().to_pandas().columns) == ["layer", "layer_index", "head"]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError) as error:
        scan.to_pandas()
    assert error.value.do == "pip install pandas"


def test_the_top_heads() -> None:
    scan = random_scan(layers=3)
    values = scan["maximum"]
    best = scan.top("maximum", 2)
    assert best[0].value == values.max()
    assert values[best[0].layer_index, best[0].head] == best[0].value
    assert best[0].layer == f"layer.{best[0].layer_index}"
    assert best[1].value == values.flatten().sort(descending=True).values[1]
    assert scan.top("maximum", 1, lowest=True)[0].value == values.min()
    assert len(scan.top("maximum", 1000)) == 3 * HEADS
    assert scan.top("maximum", 0) == []
    with pytest.raises(OptionError, match="map, which has query_block x key_block numbers"):
        scan.top("map")


def test_a_layer_is_the_mean_of_its_heads_between_the_least_and_the_most() -> None:
    scan = scalars([0.25, 4.0, math.nan], [math.nan] * 3, [1.0, 1.0, 2.5])
    layers = scan.by_layer("entropy")
    assert layers[0] == LayerValue("layer.0", 0, 2.125, 0.25, 4.0)
    assert layers[2] == LayerValue("layer.2", 2, 1.5, 1.0, 2.5)
    assert all(math.isnan(value) for value in layers[1][2:])
    some = head_scan(layer_scan([matrix(0)], heads=(4, 1)), layer_scan([matrix(1)]))
    (layer, _), values = some.by_layer("maximum"), some["maximum"][0, [1, 4]]
    assert layer[2:] == (float(values.mean()), float(values.min()), float(values.max()))
    with pytest.raises(OptionError, match="one number for each head"):
        random_scan().by_layer("map")


@pytest.mark.parametrize("lowest", [False, True])
def test_heads_without_a_value_are_at_no_top(lowest: bool) -> None:
    scan = head_scan(
        layer_scan([matrix(0)], name="a", heads=(2,)), layer_scan([matrix(0)], is_cross=True)
    )
    found = scan.top("distance", 9, lowest=lowest)
    assert [(head.layer_index, head.head) for head in found] == [(0, 2)]


def test_merged_scans_are_the_scan_of_everything() -> None:
    calls = [matrix(seed, length=length) for seed, length in ((0, 24), (1, 29), (2, 7))]
    parts = [
        replace(head_scan(layer_scan([call])), notes=("all", str(call.shape[2]))) for call in calls
    ]
    merged = parts[0].merge(*parts[1:])
    assert is_same(merged, replace(head_scan(layer_scan(calls)), notes=merged.notes))
    assert (merged.sequences, merged.tokens) == (3 * BATCH, 3 * BATCH * LENGTH)
    assert merged.notes == ("all", "24", "29", "7")
    assert is_same(merged, parts[0].merge(parts[1]).merge(parts[2]))
    assert is_same(parts[0].merge(), parts[0])


def test_merging_changes_none_of_the_scans() -> None:
    one, two = random_scan(0), random_scan(1)
    before = one["entropy"].clone(), two["entropy"].clone()
    one.merge(two)
    assert torch.equal(one["entropy"], before[0])
    assert torch.equal(two["entropy"], before[1])


def test_merging_keeps_every_reason_of_what_is_missing() -> None:
    cross = head_scan(layer_scan([matrix(0)], is_cross=True))
    other = changed(cross, missing=dict.fromkeys(cross.layer_scans[0].missing, "no place"))
    reason = cross.merge(other, cross).layer_scans[0].missing["distance"]
    assert reason == "cross attention: no key has the position of a query; no place"


def test_scans_that_do_not_fit_are_not_merged() -> None:
    scan = random_scan(0)
    own = (*STATISTICS, Own())
    lacking = dict(scan.layer_scans[0].summaries)
    del lacking["distance"]
    for other, saw in (
        (random_scan(0, model="Other"), "a Model, and a Other"),
        (random_scan(0, layers=3), "layer layer.2, which only one of them has"),
        (random_scan(0, layers=1), "layer layer.1, which only one of them has"),
        (changed(scan, name="x"), "layer layer.0, which only one of them has"),
        (
            replace(scan, layer_scans=scan.layer_scans[::-1]),
            "layer layer.0, and layer.1 in its place",
        ),
        (replace(scan, layer_scans=(*scan.layer_scans, scan.layer_scans[0])), "2 layers, and 3"),
        (random_scan(0, heads=5), "layer layer.0 with 6 heads, and with 5 heads"),
        (
            changed(scan, kind="cross"),
            "layer layer.0 with self attention, and with cross attention",
        ),
        (changed(scan, heads=(0, 1)), "heads 0, 1, 2, 3, 4, 5, and with heads 0, 1"),
        (random_scan(0, statistics=own), "statistic own, which only one of them has"),
        (
            changed(scan, summaries=lacking, missing={"distance": "nowhere"}),
            "layer layer.0 with distance, and without: nowhere",
        ),
    ):
        for pair in ((scan, other), (other, scan)):
            with pytest.raises(OptionError, match=r"^scans 1 and 2 of 2: ") as error:
                pair[0].merge(pair[1])
            if pair[0] is scan:
                assert saw in error.value.saw
    with pytest.raises(OptionError, match=r"^scans 1 and 3 of 3: "):
        scan.merge(scan, random_scan(0, heads=5))


def test_one_name_has_one_meaning() -> None:
    otherwise = standard("entropy", formula="in bits", id="entropy-2")
    scan = random_scan(0, statistics=(standard("entropy"),))
    with pytest.raises(OptionError, match=r"entropy as mean .* \(entropy-1\), and as in bits"):
        scan.merge(random_scan(0, statistics=(otherwise,)))
    with pytest.raises(OptionError, match="two statistics with the name entropy"):
        select_statistics((standard("entropy"), otherwise))


def test_what_is_missing_has_a_reason(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"needs either a summary of entropy or a reason"):
        changed(random_scan(0), summaries={}).save(tmp_path / "scan.safetensors")
