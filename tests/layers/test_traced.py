"""A compiled and an exported case of each layer.

All run in one interpreter that checks no annotations: to start one costs as much as a case.
"""

from pathlib import Path

import pytest

from tests.apart import assert_passed_apart

FOLDER = Path(__file__).parent
# torch_api/test_paths.py exports the drop-in layer.
CASES = (
    "compiled.py::test_training[causal]",
    "exported.py::test_exported_saved_and_loaded[causal]",
    "torch_api/compiled.py::test_compiled_as_one_graph[both-True]",
)


@pytest.mark.slow
def test_a_case_of_each_layer() -> None:
    assert_passed_apart(*(f"{FOLDER}/{case}" for case in CASES), count=len(CASES))
