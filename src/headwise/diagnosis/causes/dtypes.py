"""The cause of values, scores, keys or other activations that are kept in a narrower dtype."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headwise.diagnosis.causes.evidence import Evidence, Variant, Variants
from headwise.diagnosis.simulation.model import ForcedStage, RecordedCall, key_query_distances
from headwise.function.distance import slopes_of
from headwise.function.records import STAGES, scale_products
from headwise.identify.catalogue import ROTATED, SCORES
from headwise.identify.moves.move import format_dtype

# What is rounded, in words -> stages, where the next one reads them, and parts of the scores.
ROUNDED: dict[str, tuple[str, ...]] = {
    "values": ("v",),
    "queries, keys": ROTATED,
    "queries, keys and their products": (*ROTATED, "products"),
    "queries, keys and scores": (*ROTATED, "products", "rounded products"),
    "keys, values": ("k after rotary", "v"),
    "keys before the rotation, values": ("k", "v"),
    "queries, keys, values": (*ROTATED, "v"),
    "head outputs": ("head outputs",),
    "queries, keys, values, head outputs": (*ROTATED, "v", "head outputs"),
}
READERS = {
    words: tuple(name for name, stage in STAGES.items() if {*parts} & {*stage.before})
    for words, parts in ROUNDED.items()
}
# What a bias by distance multiplies: what a whole row has in common falls out of the softmax.
PLACES: dict[str, Callable[[RecordedCall], Tensor]] = {
    "from the query": lambda call: -key_query_distances(call).abs(),
    "from the first key": lambda call: call.key_positions[:, None, None],
    "from the last key": lambda call: (call.key_positions - call.key_positions[:, -1:])[
        :, None, None
    ],
}


def _activations_dtype(evidence: Evidence) -> Variants:
    slopes = slopes_of(evidence.model.settings)
    for dtype in (torch.bfloat16, torch.float16):
        for words, parts in ROUNDED.items():
            model = evidence.replace_stages(READERS[words], _compute_from_rounded, dtype, parts)
            parameters, details = {"dtype": format_dtype(dtype)}, {"of": words}
            repair = f"keep {words} in the dtype of the input"
            yield Variant(model, parameters, repair, details)
        if slopes is not None:
            yield from _round_biases(evidence, dtype, slopes)


def _round_biases(evidence: Evidence, dtype: torch.dtype, slopes: Tensor) -> Variants:
    for words, places in PLACES.items():
        if any(_find_rounding(dtype, slopes, places(call)).any() for call in evidence.calls):
            model = evidence.replace_stages(SCORES, _round_bias, dtype, slopes, places)
            details = {"of": f"the bias by distance, {words}"}
            repair = "keep the bias by distance in the dtype of the input"
            yield Variant(model, {"dtype": format_dtype(dtype)}, repair, details)


def _round_bias(
    dtype: torch.dtype,
    slopes: Tensor,
    places: Callable[[RecordedCall], Tensor],
    forced: ForcedStage,
) -> Tensor:
    return forced.usual_result() + _find_rounding(dtype, slopes, places(forced.call))


def _find_rounding(dtype: torch.dtype, slopes: Tensor, places: Tensor) -> Tensor:
    bias = slopes[:, None, None] * places
    return bias.to(dtype).double() - bias


def _compute_from_rounded(dtype: torch.dtype, parts: Sequence[str], forced: ForcedStage) -> Tensor:
    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    def round_stages(call: RecordedCall) -> RecordedCall:
        whole = ForcedStage(forced.model, call, forced.stage)
        stages = {
            name: rounded(whole[name])
            for name in parts
            if name in forced.model.stages[forced.stage].before
        }
        return call.with_stages({**call.stages, **stages})

    near = replace(forced, call=forced.call.change(round_stages))
    result = near.usual_result()
    if "products" not in parts or near.settings.cap is not None:
        return result
    scaled, factor = scale_products(near), near.settings.factor
    products = rounded(scaled / factor) * factor
    return result + (rounded(products) if "rounded products" in parts else products) - scaled
