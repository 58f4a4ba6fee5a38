"""The cause of values, scores, keys or other activations that are kept in a narrower dtype."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from headwise.diagnosis.causes.evidence import Evidence, Variant, Variants
from headwise.diagnosis.moves.move import format_dtype
from headwise.diagnosis.simulation.model import ForcedStage, RecordedCall, scale_products
from headwise.function.stages import BEFORE

# What is rounded, in words -> the stages before each stage that reads rounded ones.
ROUNDED: dict[str, dict[str, tuple[str, ...]]] = {
    "values": {"head outputs": ("v",)},
    "queries, keys": {"scores": ("q after rotary", "k after rotary")},
    "queries, keys and their products": {
        "scores": ("q after rotary", "k after rotary", "products")
    },
    "queries, keys and scores": {
        "scores": ("q after rotary", "k after rotary", "products", "scores")
    },
    "keys, values": {"scores": ("k after rotary",), "head outputs": ("v",)},
    "keys before the rotation, values": {"k after norm": ("k",), "head outputs": ("v",)},
    "queries, keys, values": {
        "scores": ("q after rotary", "k after rotary"),
        "head outputs": ("v",),
    },
    "head outputs": {"output": ("head outputs",)},
    "queries, keys, values, head outputs": {
        "scores": ("q after rotary", "k after rotary"),
        "head outputs": ("v",),
        "output": ("head outputs",),
    },
}


def _activations_dtype(evidence: Evidence) -> Variants:
    for dtype in (torch.bfloat16, torch.float16):
        for words, stages in ROUNDED.items():
            model = evidence.model
            for stage, parts in stages.items():
                change = partial(_compute_from_rounded, dtype, parts)
                model = model.with_stage_function(stage, change)
            parameters, details = {"dtype": format_dtype(dtype)}, {"of": words}
            repair = f"keep {words} in the dtype of the input"
            yield Variant(model, parameters, repair, details)


def _compute_from_rounded(dtype: torch.dtype, parts: Sequence[str], forced: ForcedStage) -> Tensor:
    """Return a stage that is computed from earlier stages in a dtype."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    def round_stages(call: RecordedCall) -> RecordedCall:
        whole = ForcedStage(forced.model, call, forced.stage)
        stages = {name: rounded(whole[name]) for name in parts if name in BEFORE[forced.stage]}
        return call.with_stages({**call.stages, **stages})

    near = replace(forced, call=forced.call.change(round_stages))
    result = near.usual_result()
    if "products" not in parts or near.settings.cap is not None:
        return result
    scaled, factor = scale_products(near), near.settings.factor
    products = rounded(scaled / factor) * factor
    return result + (rounded(products) if "scores" in parts else products) - scaled
