"""The picture of a scan in a terminal."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from headwise.scanning.head_scan import HeadScan
from headwise.scanning.statistics.views import Map
from tests.scanning.scans import Own, head_scan, layer_scan, matrix, random_scan, standard


def test_a_statistic_with_words_of_its_own_is_told() -> None:
    share = "share of the weight, 0 to 1"
    telling = standard("entropy", name="own", unit=share, most="has {} of it")
    silent = standard("entropy", name="silent", unit=share, most="")
    scan = random_scan(statistics=[standard("previous_token"), telling, silent])
    assert scan.known_for == ("previous_token", "own")
    largest = str(scan).partition("largest (layer, head):")[2]
    assert "own" in largest
    assert "silent" not in largest


def numbers(*rows: list[float], kept: tuple[int, ...] | None = None) -> HeadScan:
    """A scan of given entropies."""
    scan = random_scan(
        layers=1, heads=len(rows[0]), statistics=(standard("entropy"),), model="BertModel"
    )
    first = scan.layer_scans[0]
    layers = []
    for index, row in enumerate(rows):
        sums = torch.tensor(row, dtype=torch.float64)[list(kept or range(len(row)))]
        layers.append(
            replace(
                first,
                name=f"encoder.layer.{index}.attention.self",
                heads=kept or first.heads,
                summaries={"entropy": {"sum": sums, "count": torch.ones_like(sums)}},
            )
        )
    return replace(scan, layer_scans=tuple(layers))


def many_layers(count: int, name: str, heads: int = 12) -> HeadScan:
    scan = random_scan(layers=2, heads=heads)
    layers = [replace(scan.layer_scans[i % 2], name=name.format(i)) for i in range(count)]
    return replace(scan, layer_scans=tuple(layers))


def test_the_whole_picture() -> None:
    scan = numbers([0.0, 0.5, 1.0, math.nan, 4.0, 3.9], [2.0, 2.0, 1.49, 1.51, 0.0, 0.0])
    expected = """\
HeadScan of BertModel: 2 layers of 6 heads, 1 statistic, 3 sequences, 72 tokens
entropy, from 0 ▁ to 4 █
  0    5
0 ▁▂▃·██  encoder.layer.0.attention.self
1 ▅▅▃▄▁▁  encoder.layer.1.attention.self
largest (layer, head):
  entropy    4.00 (0, 4)    3.90 (0, 5)    2.00 (1, 0)"""
    assert str(scan) == expected


def test_heads_that_were_not_looked_at_and_heads_that_are_not() -> None:
    scan = numbers([0.0, 1.0, 2.0], kept=(0, 2))
    wide = layer_scan([matrix(0, heads=4)], name="wide", statistics=(standard("entropy"),))
    both = replace(scan, layer_scans=(scan.layer_scans[0], wide))
    rows = [line for line in str(both).splitlines() if line[:2] in ("0 ", "1 ")]
    assert rows[0].startswith("0 ▁·█   encoder")
    assert rows[1].endswith("wide")


def test_heads_that_are_all_the_same() -> None:
    assert "0 ▁▁▁  " in str(numbers([2.0, 2.0, 2.0]))


def test_relative_entropy_is_drawn_where_there_is_one() -> None:
    text = str(random_scan(statistics=(Own(), standard("entropy"))))
    assert text.splitlines()[1].startswith("entropy, from ")
    assert str(random_scan()).splitlines()[1].startswith("relative_entropy, from ")
    assert str(random_scan(statistics=(Own(),))).splitlines()[1].startswith("own, from ")


def test_the_heads_that_stand_out_are_those_of_what_heads_are_known_for() -> None:
    scan = random_scan()
    lines = str(scan).splitlines()
    told = lines[lines.index("largest (layer, head):") + 1 :]
    assert [line.split()[0] for line in told] == ["previous_token", "first_token"]
    best = scan.top("previous_token", 1)[0]
    assert f"{best.value:.2f} ({best.layer_index}, {best.head})" in told[0]


@pytest.mark.parametrize(
    "scan",
    [
        random_scan(layers=12, heads=12),
        random_scan(layers=2, heads=96),
        many_layers(32, "model.layers.{}.self_attn", heads=32),
        many_layers(96, "transformer.decoder.blocks.{}." + "attention." * 9 + "inner", heads=64),
        numbers([1e7, 2e8, 3e9]),
        replace(random_scan(notes=("a b " * 60,)), model="A" * 100),
    ],
    ids=["12x12", "2x96", "32x32", "96x64", "large numbers", "long words"],
)
def test_it_is_never_wider_than_a_terminal(scan: HeadScan) -> None:
    assert max(len(line) for line in str(scan).splitlines()) <= 80


def test_a_long_name_with_large_numbers_tells_of_fewer_heads() -> None:
    class Long(Own):
        definition = replace(Own.definition, name="a_statistic_of_very_many_words_in_its_name")

    scan = random_scan(layers=1, heads=128, statistics=(Long(),))
    large = {"sum": torch.arange(128).double() * 1.23e9, "count": torch.ones(128).double()}
    layer = replace(scan.layer_scans[0], summaries={Long.definition.name: large})
    line = str(replace(scan, layer_scans=(layer,) * 12)).splitlines()[-1]
    assert line == "  …f_very_many_words_in_its_name  1.56e+11 (0, 127)  1.56e+11 (1, 127)"


def test_twelve_by_twelve_names_every_layer() -> None:
    lines = str(many_layers(12, "encoder.layer.{}.attention.self")).splitlines()
    rows = lines[3:15]
    assert [row.split()[0] for row in rows] == [str(index) for index in range(12)]
    assert all(row.endswith(f"encoder.layer.{i}.attention.self") for i, row in enumerate(rows))


def test_thirty_two_layers_are_all_there() -> None:
    assert "left out" not in str(many_layers(32, "layers.{}", heads=32))


def test_many_layers_are_left_out_in_the_middle() -> None:
    lines = str(many_layers(96, "layers.{}")).splitlines()
    rows = lines[3:35]
    assert rows[15].startswith("15 ")
    assert rows[16] == "   … 65 layers left out"
    assert rows[17].startswith("81 ")
    assert rows[31].startswith("95 ")
    assert str(many_layers(33, "layers.{}")).count("2 layers left out") == 1


def test_many_heads_are_left_out_at_the_end() -> None:
    assert "; 32 more heads are left out" in str(random_scan(layers=1, heads=96))


def test_long_names_keep_their_end() -> None:
    text = str(many_layers(2, "model." * 20 + "layers.{}.attn"))
    assert text.splitlines()[3].endswith("layers.0.attn")
    assert "  …" in text.splitlines()[3]


def test_what_is_missing_is_told_with_its_reason() -> None:
    cross = layer_scan([matrix(1)], name="cross", is_cross=True)
    text = str(head_scan(layer_scan([matrix(0)], name="self"), cross))
    assert "  cross (cross)" in text
    assert (
        "missing:\n  previous_token, distance, offset_profile: cross attention: no key stands where"
        "\n    a query stands (in 1 of 2 layers)"
    ) in text
    assert "(in all layers)" in str(head_scan(cross))


def test_notes_are_told_whole_and_many_are_counted() -> None:
    text = str(random_scan(notes=tuple(f"note {index}" for index in range(12))))
    assert text.endswith("notes:\n" + "".join(f"  note {i}\n" for i in range(7)) + "  and 5 more")
    text = str(random_scan(notes=tuple(f"note {index}" for index in range(8))))
    assert text.endswith("  note 7")


def test_a_scan_of_nothing() -> None:
    text = str(head_scan(notes=("no attention was seen",), model="Linear"))
    assert text == (
        "HeadScan of Linear: 0 layers, 0 statistics, 0 sequences, 0 tokens\n"
        "notes:\n  no attention was seen"
    )
    assert "largest" not in str(random_scan(statistics=(Map(),)))
    assert "entropy: no head has a value" in str(numbers([math.nan, math.nan]))
