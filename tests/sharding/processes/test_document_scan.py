"""Documents over real processes: the bytes of one process, and the same refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from headwise.errors import HeadwiseError, OptionError
from headwise.scanning.corpus import scan_corpus
from headwise.scanning.result import HeadScan
from headwise.sharding import scan_documents
from tests.scanning.documents import MADE_WITH, documents, scan_one
from tests.scanning.scans import is_same
from tests.sharding.ranks import ranks


def content(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


def test_a_process_without_a_group_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"scan_documents\(\.\.\.\) without a process group"):
        scan_documents(scan_one, documents(), tmp_path, made_with=MADE_WITH)


def scan_on_ranks(out: Path, count: int) -> tuple[bool, list[int], list[tuple[str, int, int]]]:
    """True if the scan is the saved one, the documents of this rank, and its progress."""
    scanned: list[int] = []
    progress: list[tuple[str, int, int]] = []

    def scan(inputs: Tensor) -> HeadScan:
        scanned.append(inputs.shape[3] - 7)
        return scan_one(inputs)

    merged = scan_documents(
        scan,
        documents(count),
        out,
        made_with=MADE_WITH,
        progress=lambda *step: progress.append(step),
    )
    return is_same(merged, HeadScan.load(out / "scan.safetensors")), scanned, progress


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_any_number_of_ranks_writes_the_bytes_of_one_process(tmp_path: Path, count: int) -> None:
    scan_corpus(scan_one, documents(9), tmp_path / "one", made_with=MADE_WITH)
    results = ranks(count).run(scan_on_ranks, tmp_path / "ranks", 9)
    assert all(is_saved for is_saved, _, _ in results)
    assert sorted(index for _, scanned, _ in results for index in scanned) == list(range(9))
    assert content(tmp_path / "ranks") == content(tmp_path / "one")
    steps = [step for _, _, progress in results for step in progress]
    assert {total for _, _, total in steps} == {9}
    assert max(done for _, done, _ in steps) == 9


@pytest.mark.slow
def test_runs_resume_each_other(tmp_path: Path) -> None:
    """Two parts are there, a third was half-written; one rank is without a document."""
    scan_corpus(scan_one, documents(4), tmp_path / "one", made_with=MADE_WITH)
    out = tmp_path / "ranks"
    scan_corpus(scan_one, documents(2), out, made_with=MADE_WITH)
    out.joinpath("parts", ".00003-chapter-3-.txt.safetensors.x1.part").write_bytes(b"half")
    results = ranks(4).run(scan_on_ranks, out, 4)
    assert sorted(index for _, scanned, _ in results for index in scanned) == [2, 3]
    assert content(out) == content(tmp_path / "one")
    again = ranks(2).run(scan_on_ranks, out, 4)
    assert [scanned for _, scanned, _ in again] == [[], []]
    assert content(out) == content(tmp_path / "one")


class FailingScan:
    """The scan of a document, which fails for the third; each rank waits for the others once."""

    def __init__(self) -> None:
        self._has_waited = False

    def __call__(self, inputs: Tensor) -> HeadScan:
        if not self._has_waited:
            self._has_waited = True
            dist.barrier()
        if inputs.shape[3] == 9:
            raise OptionError(saw="a document that fails", needed="another", do="leave it out")
        return scan_one(inputs)


def faults(out: Path) -> list[str]:
    """The first line of the error of each fault on this rank."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    weights = {**MADE_WITH, "weights": {"layer": torch.arange(6.0) + is_last}}
    texts, heads = documents(), documents()
    texts[3] = (texts[3][0], texts[3][1] + is_last)
    heads[4] = (heads[4][0], heads[4][1][:, :, :1])
    calls: list[dict[str, Any]] = [
        {"made_with": weights},
        {"documents": texts},
        {"documents": []},
        {"documents": heads, "out": out / "heads"},
        {"out": out / f"disk {dist.get_rank()}"},
        {"scan_one": FailingScan(), "out": out / "fails"},
    ]
    return [message_of(**call) for call in calls]


def message_of(**changed: Any) -> str:
    options = {"scan_one": scan_one, "documents": documents(), "out": "none", **changed}
    scan, texts, out = (options.pop(name) for name in ("scan_one", "documents", "out"))
    try:
        scan_documents(scan, texts, out, **{"made_with": MADE_WITH, **options})
    except HeadwiseError as error:
        return error.saw
    return "no error"


@pytest.mark.slow
def test_a_fault_of_one_rank_is_an_error_on_both(tmp_path: Path) -> None:
    messages = ranks(2).run(faults, tmp_path)
    weights, texts, none, heads, disk, fails = zip(*messages, strict=True)
    assert set(weights) == {"weights of rank 1, which differs from weights of rank 0"}
    assert set(texts) == {"documents of rank 1, which differs from documents of rank 0"}
    assert set(none) == {"no documents"}
    assert all("6 heads, and with 1 heads" in message for message in heads)
    assert all("which lacks" in message or "rank" in message for message in disk)
    saw = "a document that fails"
    assert sorted(fails) in ([saw, f"rank {rank} of 2 failed: {saw}"] for rank in range(2))


@pytest.mark.slow
def test_the_documents_before_a_failure_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "fails"
    ranks(2).run(faults, tmp_path)
    parts = sorted(path.name for path in (out / "parts").iterdir())
    assert parts[:2] == [f"0000{n}-chapter-{n}-.txt.safetensors" for n in range(2)]
    assert "00002-chapter-2-.txt.safetensors" not in parts
    results = ranks(2).run(scan_on_ranks, out, 5)
    assert all(is_saved for is_saved, _, _ in results)
    assert sum(len(scanned) for _, scanned, _ in results) == 5 - len(parts)
    scan_corpus(scan_one, documents(), tmp_path / "one", made_with=MADE_WITH)
    assert content(out) == content(tmp_path / "one")
