"""The softmax is computed in a narrower dtype."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.attention_model import ForcedStage


class SoftmaxDtypeCause(Cause):
    """The softmax is computed in a narrower dtype.

    Hugging Face's eager attention computes the softmax in float32. A softmax in bfloat16 keeps 8
    bits. A float64 run of code with a float32 softmax still differs by 1e-7.

    Wrong:
        weights = scores.softmax(-1)  # bfloat16

    Right:
        weights = scores.softmax(-1, dtype=torch.float32).to(scores.dtype)

    Repair:
        Compute the softmax in float32 in both, or in the dtype of the scores in both.

    Confused with:
        dtype's rounding of weights: in the outputs alone, of about the same size.
    """

    name: ClassVar[str] = "softmax dtype"
    symptom: ClassVar[str] = (
        "A bfloat16 model differs more than rounding explains: softmax in half precision"
    )
    stages: ClassVar[tuple[str, ...]] = ("weights",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the softmax in each narrower dtype."""
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for function in (
                _softmax_in_dtype,
                _softmax_of_rounded_scores,
                _round_softmax_and_scores,
            ):
                model = evidence.model.with_stage_function("weights", partial(function, dtype))
                name = str(dtype).removeprefix("torch.")
                yield Variant(model, {"dtype": name}, "softmax in the dtype of the scores")


def _softmax_in_dtype(dtype: torch.dtype, forced: ForcedStage) -> Tensor:
    return _softmax_with_sink(forced["scores"].to(dtype), forced).double()


def _softmax_of_rounded_scores(dtype: torch.dtype, forced: ForcedStage) -> Tensor:
    return _softmax_with_sink(forced["scores"].to(dtype).double(), forced)


def _round_softmax_and_scores(dtype: torch.dtype, forced: ForcedStage) -> Tensor:
    return _softmax_with_sink(forced["scores"].to(dtype).double(), forced).to(dtype).double()


def _softmax_with_sink(scores: Tensor, forced: ForcedStage) -> Tensor:
    sink = forced.weight("sink")
    if sink is None:
        return scores.softmax(-1).nan_to_num(0.0)
    column = sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]
