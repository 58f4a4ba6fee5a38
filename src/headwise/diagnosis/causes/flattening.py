"""Causes in axes that are flattened in one order, and read in another."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product

from torch import Tensor

from headwise.diagnosis.causes.evidence import Evidence, Variant, Variants
from headwise.diagnosis.simulation.model import ForcedStage, key_query_distances
from headwise.function.distance import slopes_of
from headwise.function.stages import distance_bias

Reorder = Callable[[Tensor], Tensor]  # of (batch, heads, ...)


def _heads_before_batch(x: Tensor) -> Tensor:
    """Return (batch, heads, ...) that was flattened as it is, and read as (heads, batch, ...)."""
    read: Tensor = x.flatten(0, 1).unflatten(0, (x.shape[1], x.shape[0]))
    return read.transpose(0, 1)


def _batch_before_heads(x: Tensor) -> Tensor:
    """Return (batch, heads, ...) that was flattened as (heads, batch, ...), and read as it is."""
    read: Tensor = x.transpose(0, 1).flatten(0, 1).unflatten(0, x.shape[:2])
    return read


StageOfOrder = Callable[[Reorder, ForcedStage], Tensor]
REORDERED: Mapping[str, Reorder] = {
    "batch heads read as heads batch": _heads_before_batch,
    "heads batch read as batch heads": _batch_before_heads,
}


def _batch_and_heads(evidence: Evidence) -> Variants:
    settings = evidence.model.settings
    if settings.num_heads == 1:
        return
    parts: list[tuple[str, str, StageOfOrder]] = [
        ("the head outputs", "head outputs", _reorder_stage),
        *((role, role, _reorder_stage) for role in "qkv"),
    ]
    if evidence.has_masks:
        parts.append(("the mask", "scores", _reorder_mask))
    if slopes_of(settings) is not None or settings.buckets is not None:
        parts.append(("the score bias", "scores", _reorder_bias))
    if slopes_of(settings) is not None and evidence.has_masks:
        parts.append(("the score bias", "scores", _reorder_bias_of_keys))
    for (part, stage, function), (text, reorder) in product(parts, REORDERED.items()):
        model = evidence.replace_stages((stage,), function, reorder)
        repair = f"flatten the batch and the heads of {part} in the order in which they are split"
        yield Variant(model, {"of": part, "order": text}, repair)


def _reorder_stage(reorder: Reorder, forced: ForcedStage) -> Tensor:
    return reorder(forced.usual_result())


def _reorder_mask(reorder: Reorder, forced: ForcedStage) -> Tensor:
    mask = forced.call.inputs.mask
    if mask is None:
        return forced.usual_result()
    batch, heads = len(forced.call.inputs.x), forced.settings.num_heads
    return forced.with_inputs(mask=reorder(mask.expand(batch, heads, -1, -1))).usual_result()


def _reorder_bias(reorder: Reorder, forced: ForcedStage) -> Tensor:
    distances, scores = key_query_distances(forced.call), forced.usual_result()
    bias = distance_bias(forced.settings, distances, forced.model.weights.get("distances"))
    if bias is None:  # with another cause, which leaves it out
        return scores
    return scores + (reorder(bias.expand(len(scores), -1, -1, -1)) - bias)


def _reorder_bias_of_keys(reorder: Reorder, forced: ForcedStage) -> Tensor:
    """Return scores with slopes times positions of keys, 0 for padding, as Bloom and Falcon do."""
    call, slopes, mask = forced.call, slopes_of(forced.settings), forced.call.inputs.mask
    if slopes is None or mask is None or mask.shape[1:3] != (1, 1) or call.earlier:
        return _reorder_bias(reorder, forced)
    kept = mask[:, 0, 0].long()
    positions = (kept.cumsum(1) - 1) * kept
    bias = slopes[:, None, None] * positions[:, None, None]
    usual = distance_bias(forced.settings, key_query_distances(call), None)
    assert usual is not None
    return forced.usual_result() + (reorder(bias) - usual)


def _weights_transposed(evidence: Evidence) -> Variants:
    model = evidence.replace_stages(("head outputs",), _mix_along_queries)
    yield Variant(
        model, {}, "outputs = weights @ v: sum over the last axis of the weights, the keys"
    )


def _mix_along_queries(forced: ForcedStage) -> Tensor:
    """Return head outputs whose sum is over queries; usual where there are others than keys."""
    weights = forced["weights"]
    if weights.shape[2] != weights.shape[3]:
        return forced.usual_result()
    stages = {**forced.call.stages, "weights": weights.mT}
    return replace(forced, call=forced.call.with_stages(stages)).usual_result()
