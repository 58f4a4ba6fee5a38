"""A scan as a file: whole, the same bytes, and clear words about any other file."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as tensors_in
from safetensors.torch import save as safetensors_of

from headwise.errors import OptionError
from headwise.scanning.file import KEY, read_scan_fields, write_scan_file
from headwise.scanning.result import HeadScan
from tests.root import ROOT
from tests.scanning.edited import edit, fields_in
from tests.scanning.scans import (
    STATISTICS,
    Own,
    head_scan,
    is_same,
    layer_scan,
    matrix,
    random_scan,
    standard,
)


@pytest.fixture
def scan() -> HeadScan:
    return head_scan(
        layer_scan([matrix(0)], name="a"),
        layer_scan([matrix(1)], name="b/ü", heads=(4, 1), is_cross=True),
        notes=("one", "zwei: ä"),
    )


def test_a_scan_comes_back(scan: HeadScan, tmp_path: Path) -> None:
    path = scan.save(tmp_path / "new" / "scan.safetensors")
    assert path == tmp_path / "new" / "scan.safetensors"
    assert is_same(HeadScan.load(path), scan)
    assert os.listdir(path.parent) == ["scan.safetensors"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_summary_keeps_its_order(scan: HeadScan, tmp_path: Path) -> None:
    loaded = HeadScan.load(scan.save(tmp_path / "a"))
    for one, two in zip(scan.layer_scans, loaded.layer_scans, strict=True):
        assert [list(one.summaries[name]) for name in two.summaries] == [
            list(summary) for summary in two.summaries.values()
        ]


def test_the_tensors_are_called_by_their_place(scan: HeadScan, tmp_path: Path) -> None:
    tensors = tensors_in(scan.save(tmp_path / "a").read_bytes())
    assert torch.equal(tensors["1/entropy/sum"], scan.layer_scans[1].summaries["entropy"]["sum"])
    assert "0/distance/count" in tensors
    assert "1/distance/count" not in tensors


def test_the_file_says_what_its_numbers_mean(scan: HeadScan, tmp_path: Path) -> None:
    about = fields_in(scan.save(tmp_path / "a"))
    assert about["version"] == 3
    assert about["statistics"][0]["formula"] == standard("entropy").definition.formula
    assert about["statistics"][0]["id"] == "entropy-1"


def test_the_same_scan_gives_the_same_bytes(scan: HeadScan, tmp_path: Path) -> None:
    raw = scan.save(tmp_path / "a").read_bytes()
    again = HeadScan.load(tmp_path / "a").save(tmp_path / "b").read_bytes()
    turned = replace(
        scan,
        layer_scans=tuple(
            replace(
                layer,
                summaries=dict(reversed(layer.summaries.items())),
                missing=dict(reversed(layer.missing.items())),
            )
            for layer in scan.layer_scans
        ),
    )
    assert raw == again == turned.save(tmp_path / "c").read_bytes()


@pytest.mark.slow
def test_another_process_writes_the_same_bytes(tmp_path: Path) -> None:
    raw = random_scan(7).save(tmp_path / "a").read_bytes()
    program = (
        "import sys; from tests.scanning.scans import random_scan\nrandom_scan(7).save(sys.argv[1])"
    )
    root = ROOT
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "b")], check=True, cwd=root)
    assert raw == (tmp_path / "b").read_bytes()


def test_views_and_shared_memory_are_saved(tmp_path: Path) -> None:
    scan = random_scan(0, statistics=(standard("entropy"),), layers=1)
    whole = torch.arange(12, dtype=torch.float64).reshape(6, 2)
    summary = {"sum": whole[:, 1], "count": whole[:, 1]}
    layer = replace(scan.layer_scans[0], summaries={"entropy": summary})
    loaded = HeadScan.load(replace(scan, layer_scans=(layer,)).save(tmp_path / "a"))
    assert torch.equal(loaded.layer_scans[0].summaries["entropy"]["sum"], whole[:, 1])


def test_a_scan_without_layers_comes_back(tmp_path: Path) -> None:
    scan = head_scan(notes=("nothing was reached",))
    assert is_same(HeadScan.load(scan.save(tmp_path / "a")), scan)


def test_what_is_kept_beside_a_scan_comes_back(scan: HeadScan, tmp_path: Path) -> None:
    path = write_scan_file(scan, tmp_path / "a", document={"name": "é"})
    assert read_scan_fields(path)[1] == {"name": "é"}
    assert read_scan_fields(scan.save(tmp_path / "b"))[1] is None


def test_a_statistic_of_ones_own_is_given_to_load(tmp_path: Path) -> None:
    scan = random_scan(0, statistics=(*STATISTICS, Own()))
    path = scan.save(tmp_path / "a")
    with pytest.raises(
        OptionError, match="with statistic 'own', which is not in headwise's catalogue"
    ):
        HeadScan.load(path)
    assert torch.equal(HeadScan.load(path, statistics=[Own()])["own"], scan["own"])


def test_a_statistic_that_means_something_else_is_refused(tmp_path: Path) -> None:
    class Otherwise(Own):
        definition = replace(Own.definition, formula="something else")

    path = random_scan(0, statistics=(Own(),)).save(tmp_path / "a")
    with pytest.raises(OptionError) as error:
        HeadScan.load(path, [Otherwise()])
    assert error.value.saw == f"{path} with own as mean over queries i of A[i, i]"
    assert error.value.needed == "own as this headwise defines it: something else"


def test_an_id_keeps_the_meaning_when_the_words_change(tmp_path: Path) -> None:
    class First(Own):
        definition = replace(Own.definition, id="own-1")

    class Reworded(Own):
        definition = replace(Own.definition, id="own-1", formula="the same in other words")

    class Second(Own):
        definition = replace(Own.definition, id="own-2")

    without, first = (
        random_scan(0, statistics=(statistic,)).save(tmp_path / name)
        for statistic, name in ((Own(), "a"), (First(), "b"))
    )
    numbers = HeadScan.load(without, [Own()])["own"]
    for path, statistic in (
        (without, First()),
        (first, First()),
        (first, Reworded()),
        (first, Own()),
    ):
        scan = HeadScan.load(path, [statistic])
        assert torch.equal(scan["own"], numbers)
        assert scan.definition("own") == statistic.definition
    for path, statistic in ((without, Reworded()), (first, Second())):
        with pytest.raises(OptionError, match="own as this headwise defines it"):
            HeadScan.load(path, [statistic])
    one, two = HeadScan.load(first, [First()]), HeadScan.load(first, [Reworded()])
    assert torch.equal(one.merge(two)["own"], numbers)
    assert float(one.diff(two)["own"].abs().max()) == 0
    with pytest.raises(OptionError, match=r"\(own-1\), and as .* \(own-2\)"):
        one.diff(random_scan(0, statistics=(Second(),)))


def test_an_unknown_format_is_refused(scan: HeadScan, tmp_path: Path) -> None:
    path = scan.save(tmp_path / "a")
    edit(path, lambda about, _: about.update(version=4, headwise="9.9"))
    with pytest.raises(OptionError, match=r"a scan in format 4, saved by headwise '9\.9'"):
        HeadScan.load(path)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(safetensors_of({"weight": torch.ones(2)}))
    with pytest.raises(OptionError, match="a safetensors file that holds no scan"):
        HeadScan.load(path)
    path.write_bytes(safetensors_of({"weight": torch.ones(2)}, metadata={KEY: "no JSON"}))
    with pytest.raises(OptionError, match="its metadata cannot be read as the JSON of a scan"):
        HeadScan.load(path)
    path.write_text("not a safetensors file at all")
    with pytest.raises(OptionError, match="is damaged or was edited: it is no whole"):
        HeadScan.load(path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        HeadScan.load(tmp_path / "none")


def test_no_part_of_a_file_is_taken_for_it(scan: HeadScan, tmp_path: Path) -> None:
    raw = scan.save(tmp_path / "a").read_bytes()
    for length in (0, 4, 8, 100, len(raw) // 2, len(raw) - 1):
        tmp_path.joinpath("b").write_bytes(raw[:length])
        with pytest.raises(OptionError, match="is damaged or was edited: it is no whole"):
            HeadScan.load(tmp_path / "b")


def test_a_write_that_fails_leaves_what_was_there(
    scan: HeadScan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = scan.save(tmp_path / "a")
    raw = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OptionError, match="No space left on device"):
        random_scan(1).save(path)
    assert path.read_bytes() == raw
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be replaced")
def test_whoever_reads_the_old_file_reads_it_to_its_end(scan: HeadScan, tmp_path: Path) -> None:
    path = scan.save(tmp_path / "a")
    raw = path.read_bytes()
    with path.open("rb") as reading:
        first = reading.read(100)
        random_scan(1).save(path)
        assert first + reading.read() == raw
    assert is_same(HeadScan.load(path), random_scan(1))


def test_a_place_where_nothing_can_be_written(scan: HeadScan, tmp_path: Path) -> None:
    tmp_path.joinpath("file").touch()
    for path, said in (
        (tmp_path, "which is a folder"),
        (tmp_path / "file" / "scan.safetensors", "which is a file or is below a file"),
    ):
        with pytest.raises(OptionError, match=said):
            scan.save(path)
    assert os.listdir(tmp_path) == ["file"]


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(OptionError, match="File name too long") as refused:
        HeadScan.load("a" * 5000)
    assert len(refused.value.saw) < 200
