"""Activation checkpointing, and autocast to bfloat16 with and without a cache."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import Attention, Mask, Rotary
from headwise.errors import DTypeError
from headwise.layers.norm import QKNorm
from tests.layers import reference
from tests.layers.ecosystem import (
    BATCH,
    BY_NAME,
    LENGTH,
    SUBJECTS,
    Called,
    budget_of,
    layer_of,
    tokens,
)
from tests.paths import in_eager
from tests.paths.subjects import Subject
from tests.quick import others_slow

DROPPED = replace(
    BY_NAME["causal"],
    name="dropout",
    build=partial(Called, Mask.causal, dropout=0.3),
    training=True,
)


@pytest.mark.parametrize(
    "subject",
    others_slow([*SUBJECTS, DROPPED], "lengths", "sink", DROPPED.name),
    ids=lambda own: own.name,
)
def test_checkpointed_gradients_are_those_of_one_pass(subject: Subject) -> None:
    """Both forms of torch.utils.checkpoint; with dropout the second pass drops the same weights."""
    assert in_eager.checkpointed(subject).word == "works"


# ---- autocast ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "subject", others_slow(SUBJECTS, "lengths", "sink"), ids=lambda own: own.name
)
def test_autocast_is_within_the_budget_of_bfloat16(subject: Subject) -> None:
    assert in_eager.autocast(subject).word == "works"


def under_autocast() -> tuple[Attention, Tensor]:
    """A layer of float32 numbers that bfloat16 holds, and such input."""
    layer = layer_of(rotary=Rotary(), qk_norm=QKNorm(), window=(5, 0), sink=True)
    return layer.bfloat16().float(), tokens().bfloat16().float()


def test_gradients_under_autocast_have_the_dtype_of_the_parameters() -> None:
    layer, x = under_autocast()
    x.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x)
        loss = output.float().square().sum()
    loss.backward()
    assert output.dtype == torch.bfloat16
    assert {own.grad.dtype for own in (x, *layer.parameters())} == {torch.float32}
    assert all(own.grad.isfinite().all() for own in (x, *layer.parameters()))


def test_a_cache_under_autocast_holds_what_autocast_makes() -> None:
    layer, x = under_autocast()
    written = partial(reference.output, mask=Mask.causal())
    allowed = budget_of(layer.bfloat16(), written, x.bfloat16())
    layer.float()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(DTypeError, match=r"torch.bfloat16 for a cache of torch.float32") as bad:
            layer(x, cache=layer.cache(batch=BATCH, length=LENGTH))
        assert "dtype=torch.bfloat16" in str(bad.value)
        steps: dict[str, Any] = {
            "cache": layer.cache(batch=BATCH, length=LENGTH, dtype=torch.bfloat16)
        }
        found = [layer(part, **steps) for part in x.split([7] + [1] * (LENGTH - 7), dim=1)]
    allowed.assert_holds(torch.cat(found, dim=1))
