"""A mask that hides what it should show, as large numbers that are added to the scores."""

import pytest
import torch
from torch import Tensor

from headwise.diagnosis.simulation.model import ForcedStage
from headwise.function.records import scale_products
from tests.diagnosis.causes.faulty_models import TOKENS, inputs_of, model_of, recorded, searched

PADDED = torch.arange(TOKENS) < torch.tensor([TOKENS, 13, 9])[:, None]


def names(number: float) -> list[tuple[str, object]]:
    def scores(forced: ForcedStage) -> Tensor:
        mask = forced.call.inputs.mask
        assert mask is not None
        return scale_products(forced) + number * mask

    right = model_of()
    inputs = inputs_of(mask=PADDED[:, None, None])
    calls = recorded(right.with_stage_function("scores", scores), inputs)
    causes = searched(right, calls).causes
    return [(each.cause.name, each.variant.parameters.get("added")) for each in causes]


@pytest.mark.parametrize("number", [-1e4, -1e9])
def test_large_numbers_at_the_keys_that_the_mask_shows_are_named(number: float) -> None:
    assert names(number) == [("mask polarity", number)]


@pytest.mark.slow
def test_other_numbers_are_not_named_so() -> None:
    assert names(-37.0) == []
