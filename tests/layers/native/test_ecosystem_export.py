"""The layer exported: torch.export, and ONNX. In an interpreter that checks no annotations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.apart import assert_passed_apart

FILE = Path(__file__).with_name("exported.py")


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        ("test_exported and causal", 1),
        pytest.param("test_exported and not causal", 6, marks=pytest.mark.slow),
        pytest.param("test_onnx", 2, marks=pytest.mark.slow),
        pytest.param("test_traced_to_onnx", 5, marks=pytest.mark.slow),
    ],
)
def test_exported(chosen: str, count: int) -> None:
    assert_passed_apart(FILE, count, chosen=chosen)
