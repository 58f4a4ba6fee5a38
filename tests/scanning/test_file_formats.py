"""Format 1 of a saved scan, and the ids by which a file knows its statistics."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as tensors_in

from headwise.errors import OptionError
from headwise.scanning.file import FORMAT_1_NOTE
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics import catalogue
from headwise.scanning.statistics.catalogue import STANDARD
from headwise.scanning.statistics.maps import MostReceived, TopKeysOfEveryQuery
from tests.scanning.edited import Edit, edit, fields_in
from tests.scanning.scans import Own, head_scan, is_same, layer_scan, matrix, random_scan, standard

FORMAT_1 = Path(__file__).parent / "files" / "format_1.safetensors"  # headwise 0.1.0 wrote it
HEADS = 5  # of its layers


def test_a_file_of_format_1_loads_with_a_note(tmp_path: Path) -> None:
    scan = HeadScan.load(FORMAT_1)
    assert scan.notes == ("one", "zwei: ä", FORMAT_1_NOTE)
    assert FORMAT_1_NOTE.split(",", maxsplit=1)[0] in " ".join(str(scan).split())
    assert scan.layers == ("a", "b/ü")
    assert (scan.sequences, scan.tokens, scan.layer_scans[1].heads) == (3, 72, (4, 1))
    for key, tensor in tensors_in(FORMAT_1.read_bytes()).items():
        index, name, part = key.split("/")
        assert torch.equal(scan.layer_scans[int(index)].summaries[name][part], tensor)
    assert len(scan.measured) == 17
    again = HeadScan.load(scan.save(tmp_path / "a"))
    assert is_same(again, scan)  # the note stays, once
    assert again.merge(scan).notes == scan.notes
    assert fields_in(tmp_path / "a")["version"] == 3


def test_format_1_is_the_same_scan_today() -> None:
    scan = HeadScan.load(FORMAT_1)
    statistics = (standard("previous_token"), MostReceived())
    today = head_scan(
        layer_scan([matrix(0, heads=HEADS)], name="a", statistics=statistics),
        layer_scan(
            [matrix(1, heads=HEADS)],
            name="b/ü",
            heads=(4, 1),
            is_cross=True,
            statistics=statistics,
        ),
        statistics=statistics,
    )
    diff = scan.diff(today)
    assert diff.names == ("previous_token",)
    # The same operations, on another processor: a few float32 steps of a share.
    assert float(diff["previous_token"][0].abs().max()) < 24 * torch.finfo(torch.float32).eps


def test_every_statistic_has_an_id_of_its_own() -> None:
    shipped = (*STANDARD, TopKeysOfEveryQuery(), *catalogue.IMPORTANCE)
    for statistic in shipped:
        assert re.fullmatch(rf"{statistic.definition.name}-\d+", statistic.definition.id)
        assert statistic.parts is not None
    assert len({statistic.definition.id for statistic in shipped}) == len(shipped)
    assert Own.definition.id == ""


def test_the_words_of_format_1_have_the_ids_of_today() -> None:
    assert len(fields_in(FORMAT_1)["statistics"]) == 36
    scan = HeadScan.load(FORMAT_1)
    assert [scan.definition(name).id for name in scan.names] == [f"{n}-1" for n in scan.names]


def test_other_words_of_format_1_are_another_statistic(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(FORMAT_1.read_bytes())
    edit(path, worded(formula="something else"))
    with pytest.raises(OptionError, match=r"as something else"):
        HeadScan.load(path)


def worded(**words: str) -> Edit:
    return lambda about, _: about["statistics"][0].update(words)


def test_other_words_with_the_same_id_are_the_same_statistic(tmp_path: Path) -> None:
    before = random_scan(0, layers=1, statistics=(standard("previous_token"),))
    path = before.save(tmp_path / "a")
    edit(path, worded(formula="as it was worded once", unit="as once"))
    after = HeadScan.load(path)
    assert is_same(before, after)
    assert after.definition("previous_token") == standard("previous_token").definition
    for change in (worded(id="previous_token-2"), worded(id="")):
        edit(path, change)
        with pytest.raises(
            OptionError, match=r"this headwise defines it: mean .* \(previous_token-1\)"
        ):
            HeadScan.load(path)
