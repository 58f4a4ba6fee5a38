"""A corpus by parts: shares, resumed and killed runs, merges in any order, and what is refused."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections import UserDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headwise
from headwise.errors import OptionError
from headwise.scanning.file import hash_nested_content
from headwise.scanning.parts import (
    divide_documents,
    find_parts,
    merge_parts,
    part_of_environment,
    process_mark,
    scan_part,
)
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.maps import Map
from tests.root import ROOT
from tests.scanning.documents import COUNT, SHORTEST, STATISTICS, Model, documents
from tests.scanning.edited import edit
from tests.scanning.scans import Own, is_same, random_scan


def run(out: Path, count: int = COUNT, **changed: Any) -> tuple[Path, ...]:
    options = {"texts": documents(count), "model": Model(), "statistics": STATISTICS, **changed}
    return scan_part(options.pop("model"), options.pop("texts"), out, **options)


def run_all(out: Path, count: int = COUNT, **changed: Any) -> HeadScan:
    run(out, count, **changed)
    return merge_parts(out)


def content(out: Path, *, corpus: bool = True) -> dict[str, bytes]:
    files = {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    return {name: data for name, data in files.items() if corpus or name != "corpus.json"}


def never(_: int) -> None:
    raise AssertionError("a document that was done was scanned again")


# ---- shares --------------------------------------------------------------------------------------


def test_documents_go_to_the_part_with_the_fewest_tokens_longest_first() -> None:
    assert divide_documents([5, 9, 1, 7, 3], 2) == [[1, 4, 2], [3, 0]]
    assert divide_documents([5, 5, 5], 2) == [[0, 2], [1]]
    assert divide_documents([2], 3) == [[0], [], []]


@given(tokens=st.lists(st.integers(0, 99), max_size=12), count=st.integers(1, 5))
def test_each_document_is_in_one_part_and_parts_are_balanced(tokens: list[int], count: int) -> None:
    shares = divide_documents(tokens, count)
    assert sorted(itertools.chain(*shares)) == list(range(len(tokens)))
    loads = [sum(tokens[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(tokens, default=0)


@pytest.mark.parametrize(
    ("environment", "part"),
    [
        ({"RANK": "2", "WORLD_SIZE": "8"}, (3, 8)),
        (
            {
                "SLURM_ARRAY_TASK_ID": "12",
                "SLURM_ARRAY_TASK_MIN": "10",
                "SLURM_ARRAY_TASK_COUNT": "4",
            },
            (3, 4),
        ),
    ],
)
def test_launchers_number_the_parts(environment: dict[str, str], part: tuple[int, int]) -> None:
    assert part_of_environment(environment) == part


def test_parts_that_are_not_numbered_are_refused(tmp_path: Path) -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "2"}
    slurm = {
        f"SLURM_ARRAY_TASK_{name}": value for name, value in zip(("ID", "MIN"), "90", strict=1)
    }
    slurm["SLURM_ARRAY_TASK_COUNT"] = "4"
    for environment, saw in (
        ({}, "part auto without the numbers of torchrun or of a Slurm array"),
        ({"RANK": "0"}, "part auto without the numbers"),
        (torchrun | slurm, "part auto with the numbers of torchrun and of a Slurm array"),
        (slurm, "part 10/4"),  # an array with gaps
    ):
        with pytest.raises(OptionError) as error:
            part_of_environment(environment)
        assert error.value.saw.startswith(saw)
    for part in ((0, 2), (3, 2), (1, 0), (1.0, 2), (True, 2), "3/8", (1, 2, 3)):
        with pytest.raises(OptionError, match="from 1 to the number of parts"):
            run(tmp_path, part=part)
    assert list(tmp_path.iterdir()) == []


# ---- runs and merges -----------------------------------------------------------------------------


def test_a_merge_is_the_scan_of_all_documents_in_their_order(tmp_path: Path) -> None:
    scan = run_all(tmp_path)
    inputs = [x for _, x in documents()]
    # A corpus has smaller maps, since each document has a file.
    whole = headwise.scan(Model(), inputs, statistics=["entropy", Map(128)])
    assert is_same(scan, whole)
    assert is_same(scan, HeadScan.load(tmp_path / "scan.safetensors"))
    assert sorted(content(tmp_path)) == [
        "corpus.json",
        *(f"parts/0000{index}-chapter-{index}-.txt.safetensors" for index in range(COUNT)),
        "scan.safetensors",
        "table.csv",
    ]
    assert len((tmp_path / "table.csv").read_text("utf-8").splitlines()) == 1 + 6


@pytest.mark.parametrize("count", [2, 3, 7])
def test_any_number_of_parts_in_any_order_gives_the_same_bytes(tmp_path: Path, count: int) -> None:
    run_all(tmp_path / "one")
    shared, apart = tmp_path / "shared", [tmp_path / f"part {n}" for n in range(count)]
    for number in reversed(range(count)):
        run(shared, part=(number + 1, count))
        run(apart[number], part=(number + 1, count))
    assert merge_parts(shared).tokens == sum(SHORTEST + n for n in range(COUNT))
    assert content(shared) == content(tmp_path / "one")
    for order in (apart, apart[::-1]):
        merge_parts(order, tmp_path / "merged")
        for name in ("scan.safetensors", "table.csv"):
            assert (tmp_path / "merged" / name).read_bytes() == (shared / name).read_bytes()


def test_the_share_of_a_part_is_all_that_it_scans(tmp_path: Path) -> None:
    lengths = [x.shape[1] for _, x in documents()]
    for number, share in enumerate(divide_documents(lengths, 3)):
        seen: list[int] = []
        model = Model(seen.append)
        files = run(tmp_path, model=model, part=(number + 1, 3))
        assert seen == [lengths[index] for index in share]
        assert [int(file.name[:5]) for file in files] == share


def test_what_is_done_by_any_number_of_parts_is_not_done_again(tmp_path: Path) -> None:
    (done,) = {*run(tmp_path, part=(1, 5))}
    before = done.stat().st_mtime_ns
    seen: list[int] = []
    model = Model(seen.append)
    run(tmp_path, model=model, part=(1, 2))
    run(tmp_path, model=model, part=(2, 2))
    lengths = {SHORTEST + n for n in range(COUNT)}
    assert sorted(seen) == sorted(lengths - {SHORTEST + int(done.name[:5])})
    assert done.stat().st_mtime_ns == before
    run(tmp_path, model=Model(never))
    whole = content(tmp_path)
    run_all(tmp_path)
    assert {**content(tmp_path), **whole} == content(tmp_path)


def test_a_corpus_may_grow(tmp_path: Path) -> None:
    run(tmp_path)
    seen: list[int] = []
    model = Model(seen.append)
    grown = run_all(tmp_path, COUNT + 2, model=model)
    assert sorted(seen) == [SHORTEST + COUNT, SHORTEST + COUNT + 1]
    run_all(tmp_path / "new", COUNT + 2)
    assert content(tmp_path / "new") == {
        name: data for name, data in content(tmp_path).items() if not name.startswith("new")
    }
    assert grown.sequences == COUNT + 2


@contextmanager
def stopped_part(
    out: Path, number: int, parts: int, stop: int
) -> Iterator[subprocess.Popen[bytes]]:
    """A part that waits in a document; it is killed at the end."""
    arguments = [str(out), str(number), str(parts), str(stop)]
    command = [sys.executable, "-m", "tests.scanning.documents", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"waiting\n"
        yield child
        child.kill()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_a_killed_part_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    """The longest documents come first; what the killed process was to write is removed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run_all(tmp_path / "whole")
        out = tmp_path / "killed"
        with stopped_part(out, 1, 1, stop=1) as child:
            pass
        assert child.returncode == -signal.SIGKILL
        assert sorted(int(path.name[:5]) for path in out.glob("parts/*")) == [2, 3, 4]
        host = process_mark().rpartition("-")[0]
        half = out / "parts" / f".00001-chapter-1-.txt.safetensors.{host}-{child.pid}.x1.part"
        other = half.with_name(half.name.replace(host, "another-host"))
        mine = half.with_name(half.name.replace(str(child.pid), str(os.getpid())))
        for path in (half, other, mine):
            path.write_bytes(b"half")
        kept = {path: path.stat().st_mtime_ns for path in out.glob("parts/[0-9]*")}
        run(out, part=(2, 2))
        assert [path.exists() for path in (half, other, mine)] == [False, True, True]
        other.unlink()
        mine.unlink()
        run(out, part=(1, 3))
        run_all(out)
        assert content(out) == content(tmp_path / "whole")
        assert kept == {path: path.stat().st_mtime_ns for path in kept}
    finally:
        torch.set_num_threads(threads)


def interrupt_at_9(length: int) -> None:
    if length == 9:
        raise KeyboardInterrupt


def test_a_scan_that_fails_leaves_what_was_done(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, model=Model(interrupt_at_9))
    assert len(os.listdir(tmp_path / "parts")) == 2  # the longer ones
    assert is_same(run_all(tmp_path), run_all(tmp_path / "whole"))


def test_progress_counts_the_documents_of_the_part(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    run(tmp_path, 2, progress=lambda *news: told.append(news))
    names = [name for name, _ in documents(2)]
    assert [news for news in told if news[2]] == [
        (names[1], 0, 2),
        (names[1], 1, 2),
        (names[0], 1, 2),
        (names[0], 2, 2),
    ]
    assert [news for news in told if not news[2]] == [("layer", 1, 0)] * 2


# ---- what is refused -----------------------------------------------------------------------------


def test_another_corpus_is_refused_and_the_folder_kept(tmp_path: Path) -> None:
    run(tmp_path)
    before = content(tmp_path)
    other, renamed = documents(), documents()
    other[1] = (other[1][0], other[1][1] + 1)
    renamed[1] = ("chapter 9", renamed[1][1])
    weights = Model()
    with torch.no_grad():
        weights.layer.out_proj.weight += 1
    for changed, saw in (
        ({"texts": other}, "corpus.json, made from other content of 'chapter 1/ü.txt'"),
        ({"texts": renamed}, "corpus.json, made from 'chapter 1/ü.txt'"),
        ({"model": weights}, "corpus.json, made with other weights"),
        ({"model": Model().double()}, "made with other weights"),
        ({"statistics": "entropy"}, "made with statistics entropy-1, map-2 cells=128"),
        ({"layers": "*"}, "made with layers all"),
        ({"length": 12}, "made with length of the model"),
        ({"separators": 5}, "made with separators none"),
        ({"texts": documents(3)}, "corpus.json, of 5 documents"),
    ):
        with pytest.raises(OptionError) as error:
            run(tmp_path, **changed)
        assert saw in error.value.saw
        assert error.value.do.startswith("name another folder")
        assert content(tmp_path) == before


@pytest.mark.parametrize("name", ["machine", "device", "dtype", "threads"])
def test_parts_of_another_machine_are_refused(tmp_path: Path, name: str) -> None:
    run(tmp_path / "a", part=(1, 2))
    run(tmp_path / "b", part=(2, 2))
    path = tmp_path / "b" / "corpus.json"
    about = json.loads(path.read_text("utf-8"))
    about["made_with"][name] = "7"
    path.write_text(json.dumps(about), "utf-8")
    with pytest.raises(OptionError, match=f"made with {name} ") as error:
        merge_parts([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(OptionError, match=f"made with {name} 7"):
        run(tmp_path / "b", part=(1, 2))
    assert (error.value.do.startswith("OMP_NUM_THREADS=")) == (name == "threads")


def test_another_number_of_threads_is_refused(tmp_path: Path) -> None:
    run(tmp_path, part=(1, 2))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(OptionError, match=f"made with threads {threads}") as error:
            run(tmp_path, part=(2, 2))
    finally:
        torch.set_num_threads(threads)
    assert error.value.do.startswith(f"OMP_NUM_THREADS={threads}, or name another folder")


def test_a_merge_names_missing_doubled_and_foreign_documents(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    run(a, part=(1, 2))
    run(b, part=(2, 2))
    extra = run(tmp_path / "c", texts=[("other", torch.randn(1, 20, 36))])[0]
    assert find_parts([a, b]).faults == []
    missing = [int(path.name[:5]) for path in b.glob("parts/*")]
    names = ", ".join(documents()[index][0] for index in sorted(missing))
    with pytest.raises(OptionError) as error:
        merge_parts(a)
    assert error.value.saw == f"{len(missing)} of 5 documents missing: {names}"
    assert not (a / "scan.safetensors").exists()
    copy = b / "parts" / min(a.glob("parts/*")).name
    copy.write_bytes(min(a.glob("parts/*")).read_bytes())
    foreign = b / "parts" / "00009-other.safetensors"
    foreign.write_bytes(extra.read_bytes())
    assert find_parts([a, b]).faults == [f"1 doubled: {copy}", f"1 foreign: {foreign}"]
    # In the place of a document of the corpus.
    foreign.replace(copy)
    found = find_parts([b, a])
    assert (found.doubled, found.foreign, found.missing) == ((), (copy,), ())
    assert find_parts([a, a, b]).faults == [f"1 foreign: {copy}"]


def test_folders_without_a_corpus_or_of_several(tmp_path: Path) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b", 3)
    tmp_path.joinpath("c").mkdir()
    for folders, saw in (
        ([], "no folder"),
        ([tmp_path / "a", tmp_path / "c"], "c, which holds no corpus.json"),
        ([tmp_path / "a", tmp_path / "b"], "of 5 documents"),
        ([tmp_path / "b", tmp_path / "a"], "of 5 documents"),
    ):
        with pytest.raises(OptionError, match=saw):
            merge_parts(folders)
    (tmp_path / "a" / "corpus.json").write_text('{"documents": 3}', "utf-8")
    with pytest.raises(OptionError, match=r"corpus\.json is damaged or was edited"):
        merge_parts(tmp_path / "a")


def test_a_damaged_part_is_named_and_its_removal_is_all_it_takes(tmp_path: Path) -> None:
    run_all(tmp_path)
    before = content(tmp_path)
    part = sorted((tmp_path / "parts").iterdir())[2]
    raw = part.read_bytes()
    half, bit = raw[: len(raw) // 2], raw[:-5] + bytes([raw[-5] ^ 64]) + raw[-4:]
    for damaged, said in ((half, "it is no whole"), (bit, "the digest"), (b"", "it is no whole")):
        part.write_bytes(damaged)
        for again in (run, run_all):
            with pytest.raises(OptionError) as error:
                again(tmp_path)
            assert error.value.saw.startswith(f"the file {part} is damaged or was edited: ")
            assert said in error.value.saw
            assert error.value.do.startswith("remove this file and start the same run again")
        assert part.read_bytes() == damaged
        part.unlink()
        seen: list[int] = []
        model = Model(seen.append)
        run_all(tmp_path, model=model)
        assert seen == [9]
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
    (part,) = run(tmp_path, 1)
    edit(part, lambda about, _: about.update(document=document))
    for again in (lambda: run(tmp_path, 1, model=Model(never)), lambda: merge_parts(tmp_path)):
        with pytest.raises(OptionError) as error:
            again()
        assert error.value.saw.startswith(f"the file {part} is damaged or was edited: ")
        assert said in error.value.saw


def test_a_part_of_something_else_is_no_part(tmp_path: Path) -> None:
    run_all(tmp_path)
    part = min((tmp_path / "parts").iterdir())
    raw = part.read_bytes()
    random_scan().save(part)
    with pytest.raises(OptionError, match="a scan that scan_part did not write"):
        run(tmp_path)
    assert find_parts([tmp_path]).foreign == (part,)
    part.write_bytes(raw)
    twice = part.with_name("00000-twice.safetensors")
    twice.write_bytes(raw)
    with pytest.raises(OptionError, match=r"beside 00000-chapter-0-\.txt\.safetensors"):
        run(tmp_path)
    assert find_parts([tmp_path]).doubled == (twice,)
    twice.rename(part.with_name("1st-draft.safetensors"))  # whose name is none of a part
    part.with_name("00009-folder.safetensors").mkdir()
    run_all(tmp_path, model=Model(never))


def test_a_name_with_half_a_character_is_kept(tmp_path: Path) -> None:
    odd = [(f"a\udcff{name}", inputs) for name, inputs in documents(2)]
    scan = run_all(tmp_path, texts=odd)
    assert is_same(run_all(tmp_path, texts=odd, model=Model(never)), scan)


class SometimesTwice(Model):
    """A model that attends with a second layer in one document."""

    def __init__(self) -> None:
        super().__init__()
        self.more = headwise.Attention(36, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.more(super().forward(x)) if x.shape[1] == 9 else super().forward(x)


def test_a_document_that_does_not_fit_is_named_and_not_kept(tmp_path: Path) -> None:
    with pytest.raises(OptionError) as error:
        run(tmp_path, model=SometimesTwice())
    assert error.value.saw == (
        "document 2, chapter 2/ü.txt: layer more, which only one of them has"
    )
    assert len(os.listdir(tmp_path / "parts")) == 2
    left = [document for document in documents() if document[1].shape[1] != 9]
    scan = run_all(tmp_path / "left", model=SometimesTwice(), texts=left)
    assert scan.layer_scans[0].calls == COUNT - 1


def test_a_folder_with_a_scan_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = random_scan().save(tmp_path / "scan.safetensors")
    before = path.read_bytes()
    with pytest.raises(OptionError, match="a scan without its parts"):
        run(tmp_path)
    assert content(tmp_path) == {"scan.safetensors": before}


def test_statistics_of_ones_own_can_be_read_again(tmp_path: Path) -> None:
    run(tmp_path, statistics=[Own()])
    with pytest.raises(OptionError, match="statistic 'own', which is not in headwise's catalogue"):
        merge_parts(tmp_path)
    for statistics in ([Own()], iter([Own()])):
        scan = merge_parts(tmp_path, statistics=statistics)
    assert "own" in scan.names
    reworded = type("Reworded", (Own,), {"definition": replace(Own.definition, formula="other")})
    with pytest.raises(OptionError, match="made with statistics own: mean over queries"):
        run(tmp_path, statistics=[reworded()])


def test_no_documents(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no documents"):
        run(tmp_path / "out", texts=[])
    assert not (tmp_path / "out").exists()


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
