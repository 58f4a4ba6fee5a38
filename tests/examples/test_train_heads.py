"""The example that trains with heads over ranks: the loss falls, and is that of one process."""

import re

import pytest

from tests.examples.torchrun import torchrun

pytestmark = pytest.mark.extra


def test_the_training_is_that_of_one_process() -> None:
    printed = torchrun("train_heads.py")
    assert "rank 0 computes heads 0 to 3 of 8" in printed
    assert "rank 1 computes heads 4 to 7 of 8" in printed
    losses = [float(loss) for loss in re.findall(r"step +\d+: loss (\S+)", printed)]
    assert len(losses) == 6
    assert losses[-1] < 0.5 * losses[0]
    apart = [float(number) for number in re.findall(r"(\S+) apart", printed)]
    assert len(apart) == 2
    assert max(apart) <= 1e-11
