"""The shapes in the annotations are checked in this very run. This is what proves it."""

import pytest
import torch
from jaxtyping import TypeCheckError

from headwise.function import stages


def test_a_wrong_shape_is_noticed() -> None:
    q, k = torch.randn(3, 6, 24, 10), torch.randn(3, 2, 29, 11)
    with pytest.raises(TypeCheckError, match="head_dim"):
        stages.scores(q, k)
