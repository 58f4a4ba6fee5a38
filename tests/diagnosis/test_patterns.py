"""Positions and inputs that part, in words."""

import pytest
import torch

from headwise.diagnosis.explained import describe_calls, describe_positions
from headwise.diagnosis.simulation.model import Inputs, RecordedCall


@pytest.mark.parametrize(
    ("parted", "words"),
    [
        ({*range(12)}, ""),
        (set(), ""),
        ({0}, "only the first token"),
        ({*range(1, 12)}, "all but the first token"),
        ({*range(8, 12)}, "from position 8 on"),
        ({0, 1, 2}, "up to position 2"),
        ({11}, "from position 11 on"),
        ({3, 4, 5}, "positions 3 to 5"),
        ({3, 7}, "positions 3, 7"),
    ],
)
def test_positions(parted: set[int], words: str) -> None:
    assert describe_positions(parted, {*range(12)}) == words


def call(length: int, mask: torch.Tensor | None = None, *earlier: RecordedCall) -> RecordedCall:
    return RecordedCall(Inputs(torch.zeros(2, length, 4), mask=mask), {}, earlier=earlier)


def padded(side: str) -> RecordedCall:
    index = torch.arange(6)
    seen = index < 4 if side == "right" else index >= 2
    return call(6, seen[None, None, None].expand(2, 1, 6, 6) | torch.eye(6, dtype=torch.bool))


CAUSAL = torch.ones(8, 8, dtype=torch.bool).tril()
FIRST = call(5)
# plain, short, long and causal, padded on the right, padded on the left
CALLS = [call(6), call(3), call(8, CAUSAL), padded("right"), padded("left")]


@pytest.mark.parametrize(
    ("parted", "words"),
    [
        ({0, 1, 2, 3, 4}, ""),
        (set(), ""),
        ({2, 3, 4}, "only where a mask is given"),
        ({0, 1}, "only where no mask is given"),
        ({3}, "only with padding on the right"),
        ({4}, "only with padding on the left"),
        ({3, 4}, "only with padding"),
        ({2}, "only in inputs longer than 6 tokens"),
        ({0, 2, 3, 4}, "only in inputs longer than 3 tokens"),
        ({0, 4}, ""),
    ],
)
def test_inputs(parted: set[int], words: str) -> None:
    assert describe_calls(CALLS, parted) == words


def test_calls_with_a_cache() -> None:
    calls = [FIRST, call(1, None, FIRST), call(2, None, FIRST)]
    assert describe_calls(calls, {1, 2}) == "only in later calls with a cache"
    assert describe_calls(calls, {0}) == "only without earlier calls"
    assert describe_calls(calls, {1}) == ""
