"""Rows without keys: each filling of their weights is named, NaN too."""

import math

import pytest
import torch
from torch import Tensor

from headwise.diagnosis.simulation.model import ForcedStage
from tests.diagnosis.causes.faulty_models import TOKENS, inputs_of, model_of, recorded, searched


@pytest.mark.parametrize(
    ("value", "row"), [(math.nan, "NaN"), (1 / TOKENS, "equal weights"), (1.0, "weights of 1")]
)
def test_each_filling_is_named(value: float, row: str) -> None:
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    mask[..., 3, :] = False

    def filled(forced: ForcedStage) -> Tensor:
        return forced.usual_result().masked_fill(~mask.any(-1, keepdim=True), value)

    calls = recorded(model_of().with_stage_function("weights", filled), inputs_of(mask=mask))
    result = searched(model_of(), calls)
    assert not result.left.cells_beyond_rounding
    [named] = result.causes
    assert (named.cause.name, named.variant.parameters) == ("rows without keys", {"row": row})
