"""The text of a scan, as ``print`` shows it."""

import io
import math
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from headwise.scanning.result import HeadScan
from headwise.study.output import show_study
from headwise.study.question import Study
from tests.scanning.scans import head_scan, layer_scan, matrix, random_scan, standard
from tools.study import answers_of, read_record


def test_a_statistic_with_words_of_its_own_is_told() -> None:
    telling = standard("entropy", name="own", unit="nats", most="has {} of it")
    silent = standard("entropy", name="silent", unit="nats", most="")
    scan = random_scan(statistics=[standard("previous_token"), telling, silent])
    assert scan.characterising_scalars == ("previous_token", "own")
    layer = scan.layer_scans[0]
    ones = torch.ones(layer.num_heads, dtype=torch.float64)
    values = {"sum": 1 + 8.0 * torch.eye(layer.num_heads, dtype=torch.float64)[2], "count": ones}
    summaries = {**layer.summaries, "own": values, "silent": values}
    text = str(replace(scan, layer_scans=(replace(layer, summaries=summaries),)))
    assert re.search(r"\b0 +2  has 9\.00 nats of it +1\.00 nats", text)
    assert "has the most silent" not in text


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


def test_the_whole_text() -> None:
    scan = numbers([0.0, 0.5, 1.0, math.nan, 4.0, 3.9], [2.0, 2.0, 1.49, 1.51, 0.0, 0.0])
    expected = """\
BertModel: HeadScan of 1 statistic; 2 layers of 6 heads.

Input: 3 sequences, 72 tokens.


 layer  head  heads that stand out                middle head
 ────────────────────────────────────────────────────────────
     0     4  has the highest entropy: 4.00 nats    1.49 nats


Every head: a row is a layer, a column a head, both counted from 0. In per cent,
unless a unit is given. Layers: 0 is encoder.layer.0.attention.self, 1 is
encoder.layer.1.attention.self.

Entropy, nats
     0   1   2   3   4   5
0  0.0 0.5 1.0   · 4.0 3.9
1  2.0 2.0 1.5 1.5 0.0 0.0"""
    assert str(scan) == expected


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


def test_layers_and_heads_that_are_left_out_are_counted() -> None:
    assert "\nDrawn: 48 of 64 layers, 12 of 12 heads" in str(many_layers(64, "layers.{}"))
    assert "\nDrawn: 2 of 2 layers, 78 of 96 heads" in str(random_scan(layers=2, heads=96))
    assert "Drawn: " not in str(many_layers(48, "layers.{}"))


def test_layers_are_named_and_a_page_is_not() -> None:
    text = " ".join(str(many_layers(9, "h.{}")).split())
    assert "Layers: 0 is h.0, 1 is h.1, 2 is h.2, ..., 8 is h.8." in text
    assert "page" not in text


def test_heads_that_were_not_scanned_and_layers_of_other_sizes() -> None:
    scan = numbers([0.0, 1.0, 2.0], kept=(0, 2))
    wide = layer_scan([matrix(0, heads=4)], name="wide", statistics=(standard("entropy"),))
    both = replace(scan, layer_scans=(scan.layer_scans[0], wide))
    rows = [line for line in str(both).splitlines() if line[:2] in ("0 ", "1 ")]
    assert rows[0] == "0  0.0   · 2.0   ·"
    assert "·" not in rows[1]
    assert "2 layers of 3 to 4 heads." in str(both)


@pytest.mark.parametrize("row", [[2.0, 2.0, 2.0], [math.nan, math.nan]], ids=["equal", "NaN"])
def test_heads_without_differences_have_no_picture(row: list[float]) -> None:
    text = str(numbers(row))
    assert "Every head" not in text
    assert "No head stands out." in text


def test_one_head_is_not_several() -> None:
    assert "1 layer of 1 head." in str(numbers([1.0]))


def test_what_is_missing_is_told_with_its_reason() -> None:
    cross = layer_scan([matrix(1)], name="cross", is_cross=True)
    names = "previous token, distance, offset profile"
    why = "(cross attention: no key has the position of a query)."
    both = head_scan(layer_scan([matrix(0)], name="self"), cross)
    assert f"Not measured in 1 of 2 layers: {names} {why}" in " ".join(str(both).split())
    assert f"Not measured: {names} {why}" in " ".join(str(head_scan(cross)).split())


def test_a_scan_of_nothing() -> None:
    scan = head_scan(notes=("no attention was seen",), model="Linear")
    assert str(scan) == (
        "Linear: HeadScan of 0 statistics; 0 layers.\n\nInput: 0 sequences, 0 tokens.\n\n"
        "Note: no attention was seen."
    )
    assert "no attention was seen" in scan._repr_html_()


def test_every_column_of_the_study_is_printed() -> None:
    """Two columns may have the same header."""
    record = read_record()
    answers = [answer for answer in answers_of(record) if answer.question.table]
    for answer in answers:
        console = Console(file=io.StringIO(), width=400, color_system=None)
        with console.capture() as captured:
            show_study(Study((answer,), (), record["setting"]), console, whole=True)
        columns = [name for name, _ in answer.columns if name]
        header = re.compile(" *" + r" {2,}".join(map(re.escape, columns)) + " *")
        lines = captured.get().splitlines()
        assert [line for line in lines if header.fullmatch(line)] != [], answer.question.id
    titles = [[title for title, _ in each.columns] for each in answers]
    assert any(len(set(each)) < len(each) for each in titles)
