"""Digests: a flipped bit, which no header of safetensors tells."""

from pathlib import Path

import pytest
import torch

from headwise.checkpoints.safetensors import compute_digests, read_digests, write_digests
from headwise.errors import CheckpointError


def test_the_digest_of_known_bytes() -> None:
    found = compute_digests({"a": torch.tensor([1.0, 2.0])})
    # printf '\x00\x00\x80\x3f\x00\x00\x00\x40' | sha256sum
    assert found["a"] == {
        "shape": [2],
        "dtype": "float32",
        "sha256": "b9c80b5adeca450753a16950c3cc655d271f7bef7a485bc83f112b72fef21d37",
    }


def test_one_bit_changes_one_digest(tmp_path: Path) -> None:
    state = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "c": torch.tensor(3)}
    path = write_digests(tmp_path / "d.json", compute_digests(state))
    state["b"].view(torch.int16)[4] ^= 1
    now, before = compute_digests(state), read_digests(path)
    assert [name for name in state if now[name] != before[name]] == ["b"]


def test_a_view_has_the_digest_of_its_numbers() -> None:
    x = torch.randn(4, 3)
    assert compute_digests({"x": x.mT})["x"] == compute_digests({"x": x.mT.contiguous()})["x"]
    assert compute_digests({"x": x.mT})["x"]["sha256"] != compute_digests({"x": x})["x"]["sha256"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"kind": "other"}',
        "\udcff",
        '{"kind": "headwise digests"}',
        '{"kind": "headwise digests", "tensors": []}',
        '{"kind": "headwise digests", "tensors": {"a": 3}}',
        "[" * 100_000,
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "d.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match="holds no digests"):
        read_digests(tmp_path / "d.json")
