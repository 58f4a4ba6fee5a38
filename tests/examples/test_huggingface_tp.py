"""The example of transformers' tensor-parallel plan: outputs and scan are the whole model's."""

import re

import pytest

from tests.examples.torchrun import torchrun


@pytest.mark.extra
def test_the_sharded_model_is_the_whole_one() -> None:
    first, second = torchrun("huggingface_tp.py").splitlines()
    assert first == "each rank holds 3 of 6 heads"
    apart = [float(number) for number in re.findall(r"\d+e-\d+", second)]
    assert len(apart) == 2
    assert max(apart) < 1e-5
