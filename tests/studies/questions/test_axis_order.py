"""The order of axes: each fact turns when the library, or what is given, is otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.drop_in import checks
from headwise.drop_in.layer import MultiheadAttention
from headwise.masks import Mask
from headwise.studies.question import Answer
from headwise.studies.questions import axis_order
from headwise.studies.study import ask


@pytest.fixture(autouse=True)
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(axis_order, "times", lambda kind: {"infer": 1.0, "train": 1.0})


def asked() -> Answer:
    return ask(axis_order.QUESTION)


def assert_fails(answer: Answer, *facts: int) -> None:
    """These facts do not hold, the others do, and the verdict says so."""
    failed = [number for number, (held, _) in enumerate(answer.facts) if not held]
    assert failed == list(facts), answer.verdict
    assert all(answer.facts[number][1] in answer.verdict for number in failed)


def own_order(layer: MultiheadAttention, x: Tensor, *, batch_first: bool) -> Any:
    """The layer's answer as if it had been built for this order."""
    layer.batch_first, built = batch_first, layer.batch_first
    try:
        return layer(x, x, x)
    finally:
        layer.batch_first = built


class AlwaysBatchFirst(MultiheadAttention):
    """It was built for one order, and takes the other."""

    def __init__(self, *args: Any, batch_first: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, batch_first=True, **kwargs)


class AlwaysLengthFirst(MultiheadAttention):
    """The same mistake the other way round."""

    def __init__(self, *args: Any, batch_first: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, batch_first=False, **kwargs)


class Suspicious(MultiheadAttention):
    """A layer that wants a mask."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if "need_weights" not in kwargs and len(args) + len(kwargs) == 3 and not self.batch_first:
            raise RuntimeError("no mask")
        return super().forward(*args, **kwargs)
