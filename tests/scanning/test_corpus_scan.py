"""Many documents in a run that can be interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import UserDict
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.scanning.corpus import hash_nested_content, scan_corpus
from headwise.scanning.result import HeadScan
from headwise.scanning.schema import FORMAT_1_NOTE
from tests.root import ROOT
from tests.scanning.documents import COUNT, MADE_WITH, documents, scan_one
from tests.scanning.edited import as_format_1, edit, fields_in
from tests.scanning.scans import STATISTICS, Own, is_same, layer_scan, matrix, random_scan


def run(out: Path, count: int = COUNT, **changed: Any) -> HeadScan:
    given = {"made_with": MADE_WITH, **changed}
    return scan_corpus(given.pop("scan_one", scan_one), documents(count), out, **given)


def content(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


def never(inputs: Tensor) -> HeadScan:
    raise AssertionError("a document that was done was scanned again")


def test_documents_are_merged_in_their_order(tmp_path: Path) -> None:
    scan = run(tmp_path)
    first, *others = (scan_one(inputs) for _, inputs in documents())
    assert is_same(scan, first.merge(*others))
    assert is_same(scan, HeadScan.load(tmp_path / "scan.safetensors"))
    assert scan.notes == tuple(f"{7 + index} tokens" for index in range(COUNT))
    assert sorted(content(tmp_path)) == [
        *(f"parts/0000{index}-chapter-{index}-.txt.safetensors" for index in range(COUNT)),
        "scan.safetensors",
    ]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_a_run_that_was_killed_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    run(tmp_path / "whole")
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "tests.scanning.documents", str(out)]
    with subprocess.Popen([*command, "3"], cwd=ROOT, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"waiting\n"
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert len(os.listdir(out / "parts")) == 3
    assert not (out / "scan.safetensors").exists()
    # What the third was written to, had it been killed a moment later.
    out.joinpath("parts", ".00003-chapter-3-.txt.safetensors.x1.part").write_bytes(b"half")
    out.joinpath(".scan.safetensors.x1.part").write_bytes(b"half")
    kept = {path: path.stat().st_mtime_ns for path in (out / "parts").glob("[0-9]*")}
    subprocess.run(command, cwd=ROOT, check=True)
    assert content(out) == content(tmp_path / "whole")
    assert kept == {path: path.stat().st_mtime_ns for path in kept}


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    run(tmp_path)
    before = content(tmp_path)
    run(tmp_path, scan_one=never)
    assert content(tmp_path) == before
    seen = []

    def watched(inputs: Tensor) -> HeadScan:
        seen.append(inputs.shape[3])
        return scan_one(inputs)

    assert is_same(run(tmp_path, COUNT + 2, scan_one=watched), run(tmp_path / "new", COUNT + 2))
    assert seen == [7 + COUNT, 8 + COUNT]


def test_a_scan_that_fails_leaves_what_was_done(tmp_path: Path) -> None:
    def fails(inputs: Tensor) -> HeadScan:
        if inputs.shape[3] == 9:
            raise KeyboardInterrupt
        return scan_one(inputs)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, scan_one=fails)
    assert len(os.listdir(tmp_path / "parts")) == 2
    assert is_same(run(tmp_path), run(tmp_path / "whole"))


def test_a_part_of_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    run(tmp_path)
    before = content(tmp_path)
    other = documents()
    other[1] = (other[1][0], other[1][1] + 1)
    renamed = documents()
    renamed[1] = ("chapter 9", renamed[1][1])
    weights = {**MADE_WITH, "weights": {"layer": torch.arange(6.0) + 1}}
    for given, made_with, saw in (
        (other, MADE_WITH, "00001-chapter-1-.txt.safetensors, made from other content of"),
        (renamed, MADE_WITH, "made from 'chapter 1/ü.txt'"),
        (documents(), weights, "00000-chapter-0-.txt.safetensors, made with other weights"),
        (documents(), {"weights": MADE_WITH["weights"]}, "made with other statistics"),
        (documents(), {**MADE_WITH, "layers": 3}, "made with other layers"),
        (documents(3), MADE_WITH, "00003-chapter-3-.txt.safetensors, with 3 documents"),
    ):
        with pytest.raises(OptionError) as error:
            scan_corpus(never, given, tmp_path, made_with=made_with)
        assert saw in error.value.saw
        assert error.value.do.startswith("name another folder")
        assert content(tmp_path) == before


def test_a_damaged_part_is_named_and_its_removal_is_all_it_takes(tmp_path: Path) -> None:
    whole = run(tmp_path)
    before = content(tmp_path)
    part = sorted((tmp_path / "parts").iterdir())[2]
    raw = part.read_bytes()
    half, bit = raw[: len(raw) // 2], raw[:-5] + bytes([raw[-5] ^ 64]) + raw[-4:]
    for damaged, said in ((half, "it is no whole"), (bit, "the digest"), (b"", "it is no whole")):
        part.write_bytes(damaged)
        with pytest.raises(OptionError) as error:
            run(tmp_path)
        assert error.value.saw.startswith(f"the file {part} is damaged or was edited: ")
        assert said in error.value.saw
        assert error.value.do == (
            "remove this file and start the same run again: it keeps the other parts and scans "
            "only the document of this part again"
        )
        assert part.read_bytes() == damaged
        part.unlink()
        scanned = []

        def watched(inputs: Tensor, scanned: list[int] = scanned) -> HeadScan:
            scanned.append(inputs.shape[3])
            return scan_one(inputs)

        assert is_same(run(tmp_path, scan_one=watched), whole)
        assert scanned == [9]
        assert content(tmp_path) == before


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("chapter", "document is 'chapter' and no mapping"),
        ({}, "document has no field 'name'"),
        ({"name": "a", "digest": "b", "made_with": {}, "seed": 1}, "document has a field 'seed'"),
        ({"name": 1, "digest": "b", "made_with": {}}, "document.name is 1 and no text"),
        ({"name": "a", "digest": [], "made_with": {}}, "document.digest is a list of 0 entries"),
        ({"name": "a", "digest": "b", "made_with": []}, "document.made_with is a list of 0"),
        ({"name": "a", "digest": "b", "made_with": {"c": 1}}, "document.made_with.c is 1 and no"),
    ],
)
def test_an_edited_document_is_refused(tmp_path: Path, document: object, said: str) -> None:
    run(tmp_path, 1)
    (part,) = (tmp_path / "parts").iterdir()
    edit(part, lambda about, _: about.update(document=document))
    with pytest.raises(OptionError) as error:
        run(tmp_path, 1, scan_one=never)
    assert error.value.saw.startswith(f"the file {part} is damaged or was edited: ")
    assert said in error.value.saw


def test_a_part_of_something_else_is_no_part(tmp_path: Path) -> None:
    whole = run(tmp_path)
    part = min((tmp_path / "parts").iterdir())
    raw = part.read_bytes()
    scan_one(documents()[0][1]).save(part)
    with pytest.raises(OptionError, match="a scan that scan_corpus did not write"):
        run(tmp_path)
    part.write_bytes(raw)
    twice = part.with_name("00000-twice.safetensors")
    twice.write_bytes(raw)
    with pytest.raises(OptionError, match=r"beside 00000-chapter-0-\.txt\.safetensors"):
        run(tmp_path)
    twice.rename(part.with_name("1st-draft.safetensors"))  # whose name is none of a part
    part.with_name("00009-folder.safetensors").mkdir()
    assert is_same(run(tmp_path, scan_one=never), whole)


def test_a_run_goes_on_from_parts_of_format_1(tmp_path: Path) -> None:
    whole = run(tmp_path)
    first, second, *_, last = sorted((tmp_path / "parts").iterdir())
    edit(first, as_format_1)
    edit(second, as_format_1)
    last.unlink()
    scan = run(tmp_path)
    assert is_same(replace(scan, notes=whole.notes), whole)
    assert scan.notes.count(FORMAT_1_NOTE) == 1
    assert fields_in(first)["version"] == 1
    assert fields_in(last)["version"] == 2


def test_a_name_with_half_a_character_is_kept(tmp_path: Path) -> None:
    odd = [(f"a\udcff{name}", inputs) for name, inputs in documents(2)]
    scan = scan_corpus(scan_one, odd, tmp_path, made_with=MADE_WITH)
    assert is_same(scan_corpus(never, odd, tmp_path, made_with=MADE_WITH), scan)


def test_a_document_that_does_not_fit_is_named_and_not_kept(tmp_path: Path) -> None:
    def sometimes_other(inputs: Tensor) -> HeadScan:
        scan = scan_one(inputs)
        if inputs.shape[3] == 9:
            more = layer_scan([matrix(0)], name="cross")
            return replace(scan, layer_scans=(*scan.layer_scans, more))
        return scan

    with pytest.raises(OptionError) as error:
        run(tmp_path, scan_one=sometimes_other)
    assert error.value.saw == (
        "document 2, chapter 2/ü.txt: layer cross, which only one of them has"
    )
    assert len(os.listdir(tmp_path / "parts")) == 2
    left = [document for document in documents() if document[1].shape[3] != 9]
    scan = scan_corpus(sometimes_other, left, tmp_path, made_with=MADE_WITH)
    assert scan.layer_scans[0].calls == COUNT - 1


def test_a_folder_with_a_scan_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = random_scan().save(tmp_path / "scan.safetensors")
    before = path.read_bytes()
    with pytest.raises(OptionError, match="a scan without its parts"):
        run(tmp_path)
    assert path.read_bytes() == before


def test_statistics_of_ones_own_can_be_read_again(tmp_path: Path) -> None:
    def own(inputs: Tensor) -> HeadScan:
        return random_scan(int(inputs), statistics=(*STATISTICS, Own()))

    given = [("one", torch.tensor(1)), ("two", torch.tensor(2))]
    with pytest.raises(OptionError, match="statistic 'own', which is not in headwise's catalogue"):
        scan_corpus(own, given, tmp_path, made_with={})
    for statistics in ([Own()], iter([Own()])):
        scan = scan_corpus(own, given, tmp_path, made_with={}, statistics=statistics)
    assert "own" in scan.names


def test_no_documents(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no documents"):
        scan_corpus(never, [], tmp_path / "out", made_with={})
    assert not (tmp_path / "out").exists()


def test_progress_of_a_list_and_of_a_stream(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    run(tmp_path, 2, progress=lambda *news: told.append(news))
    names = [name for name, _ in documents(2)]
    assert told == [(names[0], 0, 2), (names[0], 1, 2), (names[1], 1, 2), (names[1], 2, 2)]

    def stream() -> Iterator[tuple[str, Tensor]]:
        yield from documents(2)

    told.clear()
    scan_corpus(
        never, stream(), tmp_path, made_with=MADE_WITH, progress=lambda *news: told.append(news)
    )
    assert told == [(names[0], 0, 1), (names[0], 1, 1), (names[1], 1, 2), (names[1], 2, 2)]


# ---- digests ------------------------------------------------------------------------------------


def test_a_digest_is_the_same_everywhere() -> None:
    inputs = {"ids": torch.tensor([[1, 2]]), "text": "ä", "rest": [None, True, 2, 0.5]}
    assert hash_nested_content(inputs) == hash_nested_content(dict(reversed(inputs.items())))
    assert hash_nested_content(inputs) == hash_nested_content(UserDict(inputs))
    assert hash_nested_content("") == sha256(b"str 0 ").hexdigest()


def test_a_digest_is_of_the_content() -> None:
    numbers = torch.arange(12.0).reshape(3, 4)
    assert hash_nested_content(numbers.mT) == hash_nested_content(numbers.mT.contiguous())
    assert hash_nested_content(numbers[1]) == hash_nested_content(numbers[1].clone())
    assert hash_nested_content(torch.nn.Parameter(numbers)) == hash_nested_content(numbers)
    assert hash_nested_content(["a", "b"]) == hash_nested_content(("a", "b"))


def test_different_contents_have_different_digests() -> None:
    zeros = torch.zeros(2, 3)
    different = [
        "ab",
        ["ab"],
        ["a", "b"],
        ["", "ab"],
        [["a"], "b"],
        {"a": "b"},
        {"a": "b", "c": None},
        "1",
        1,
        1.0,
        True,
        None,
        [],
        {},
        zeros,
        zeros.mT,
        zeros.flatten(),
        zeros.int(),
        zeros.bfloat16(),
        zeros.half(),
        zeros[:0],
        torch.tensor(0.0),
        torch.tensor(False),
        [zeros, zeros],
        torch.stack([zeros, zeros]),
    ]
    assert len({hash_nested_content(content) for content in different}) == len(different)


def test_what_has_no_digest_is_refused() -> None:
    for content, saw in (
        (b"raw", "a bytes as content"),
        ({"a": {1, 2}}, "a set as content"),
        ({1: "a"}, "a mapping with the key 1 as content"),
        (Path("x"), "PosixPath as content"),
    ):
        with pytest.raises(OptionError) as error:
            hash_nested_content(content)
        assert saw in error.value.saw
