"""The layer exported: torch.export, and ONNX. In an interpreter that checks no annotations."""

from pathlib import Path

import pytest

from tests.apart import assert_passed_apart
from tests.quick import others_extra

FILE = Path(__file__).with_name("exported.py")


@pytest.mark.parametrize(
    ("chosen", "count"),
    others_extra([("onnx and lengths", 2), ("not causal and not (onnx and lengths)", 12)]),
)
def test_exported(chosen: str, count: int) -> None:
    """All but the layer with a causal mask, which tests/layers/test_traced.py exports."""
    assert_passed_apart(FILE, count=count, chosen=chosen)
