"""Ports that were written without sight of the search; their faults were read after its answers.

Each author's note, in short, stands beside the answer.
"""

from types import ModuleType

import pytest

from headwise import compare
from headwise.identify.results import Verdict
from tests.diagnosis.sealed import megatron, open_lm, picogpt

ANSWERS = [
    # "Rows of the fused weight are ordered by head, and the port splits them as three blocks."
    pytest.param(
        megatron,
        "nesting of fused rows",
        {"stored": "heads [q|k|v] head_dim"},
        marks=pytest.mark.slow,
    ),
    # "Future keys get the score 1e-9 in place of minus a billion, so that they keep weight."
    (picogpt, "finite number for -inf", {"set to hidden keys": 0.0}),
    # "The rotation counts along the heads; the position of the token is not used at all."
    pytest.param(open_lm, "rotary axis", {"axis": "head"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("port", "name", "parameters"), ANSWERS)
def test_the_fault_is_named(port: ModuleType, name: str, parameters: dict[str, object]) -> None:
    faulty, layer = port.make()
    diagnosis = compare(faulty, layer)
    assert diagnosis.verdict is Verdict.DIFFERENT
    assert diagnosis.function is not None
    [cause] = diagnosis.function.causes
    assert cause.name == name
    assert cause.parameters.items() >= parameters.items()
    assert cause.output_left < 1e-6
