"""The layer exported: torch.export, and ONNX. In an interpreter that checks no annotations."""

from pathlib import Path

import pytest

from tests.apart import assert_passed_apart

FILE = Path(__file__).with_name("exported.py")


@pytest.mark.slow
def test_exported() -> None:
    """All but the layer with a causal mask, which tests/layers/test_traced.py exports."""
    assert_passed_apart(FILE, count=13, chosen="not causal")
