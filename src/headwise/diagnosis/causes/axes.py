"""Causes in the axes: heads split, merged, counted or repeated otherwise, batch as tokens."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from headwise.diagnosis.causes.evidence import Evidence, Variant, Variants
from headwise.diagnosis.causes.masks import change_mask, fill_empty_rows
from headwise.diagnosis.simulation.gaps import list_misshapen_stages
from headwise.diagnosis.simulation.model import (
    AttentionModel,
    ForcedStage,
    RecordedCall,
    has_masks_of_heads,
)
from headwise.function.distance import slopes_of
from headwise.function.records import STAGES
from headwise.function.rotary import count_channels
from headwise.function.weights import AXES, bias_of, sizes_of
from headwise.identify.catalogue import KV_HEADS_TILED, ROTATED, SCORES
from headwise.layers.distance import alibi_slopes


def _split_without_transpose(evidence: Evidence) -> Variants:
    for roles in ("qkv", "qk", "q", "k", "v"):
        model = evidence.replace_stages(roles, _view_as_heads)
        yield Variant(model, {"roles": roles}, "view(batch, length, heads, d).transpose(1, 2)")
        model = evidence.replace_stages(roles, _view_as_heads_of_sequences)
        repair = "view(length, batch * heads, d).transpose(0, 1)"
        yield Variant(model, {"roles": roles, "first axis": "length"}, repair)
    weights = evidence.model.weights
    is_fused = len({weights[f"w{role}"].shape for role in "qkv"}) == 1
    if is_fused and not evidence.is_cross_attention:
        for is_first in (False, True):
            shape = "3, batch, heads" if is_first else "batch, 3, heads"
            model = evidence.replace_stages("qkv", _view_as_fused_heads, is_first)
            repair = "view(batch, length, 3, heads, d).permute(2, 0, 3, 1, 4)"
            yield Variant(model, {"roles": "qkv", "fused": f"({shape}, length, d)"}, repair)


def _view_as_heads(forced: ForcedStage) -> Tensor:
    split = forced.usual_result()
    return split.transpose(1, 2).flatten(2).reshape(split.shape)


def _view_as_heads_of_sequences(forced: ForcedStage) -> Tensor:
    """Return (length, batch, heads * d) whose memory is viewed as (batch * heads, length, d)."""
    split = forced.usual_result()
    return split.permute(2, 0, 1, 3).reshape(split.shape)


def _view_as_fused_heads(is_first: bool, forced: ForcedStage) -> Tensor:
    """Return q, k or v of a fused result whose memory is viewed in the shape that is wanted."""
    each = [ForcedStage(forced.model, forced.call, role).usual_result() for role in "qkv"]
    fused = torch.cat([x.transpose(1, 2).flatten(2) for x in each], 2)
    batch, heads, length, channels = each[0].shape
    shape = (3, batch) if is_first else (batch, 3)
    split = fused.reshape(*shape, heads, length, channels)
    return split.select(0 if is_first else 1, "qkv".index(forced.stage))


def _merge_without_transpose(evidence: Evidence) -> Variants:
    model = evidence.replace_stages(("output",), _project_unmerged_heads, (0, 2, 1, 3))
    yield Variant(model, {}, "outputs.transpose(1, 2).flatten(2)")
    model = evidence.replace_stages(("output",), _project_unmerged_heads, (2, 0, 1, 3))
    repair = "outputs.transpose(0, 1).reshape(length, batch, heads * d)"
    yield Variant(model, {"first axis": "length"}, repair)


def _project_unmerged_heads(order: tuple[int, ...], forced: ForcedStage) -> Tensor:
    """Return the output of memory that is viewed with its axes in another order."""
    heads = forced["head outputs"]
    viewed = heads.reshape([heads.shape[axis] for axis in order])
    split = viewed.permute([order.index(axis) for axis in range(4)])
    stages = {**forced.call.stages, "head outputs": split}
    return replace(forced, call=replace(forced.call, stages=stages)).usual_result()


def _batch_sequence_exchanged(evidence: Evidence) -> Variants:
    calls = evidence.calls
    if any(call.earlier or call.inputs.source is not None for call in calls):
        return
    repair = "batch_first=True, or x.transpose(0, 1) on both sides"
    moves = (
        (False, True) if any(_hides_keys_alone(call.inputs.mask) for call in calls) else (False,)
    )
    for by_batch, rotates in ((True, False), (False, False), (True, True)):
        for moves_mask in moves:
            scores = partial(_scores_along_batch, by_batch, moves_mask)
            model = evidence.replace_stages(("head outputs",), _head_outputs_along_batch)
            model = model.with_stage_function("scores", scores)
            for stage in ROTATED if rotates else ():
                model = model.with_stage_function(
                    stage, lambda x: x.with_inputs(positions=_positions_in_batch(x)).usual_result()
                )
            yield Variant(model, {}, repair)
            if moves_mask:  # which may hide all sequences from a token
                details = {"rows without keys": "NaN"}
                filled = model.with_stage_function("weights", partial(fill_empty_rows, math.nan))
                yield Variant(filled, {}, repair, details)


def _hides_keys_alone(mask: Tensor | None) -> bool:
    """True for a mask that is the same for all queries and heads, (batch, 1, 1, keys)."""
    return mask is not None and mask.shape[1:3] == (1, 1)


def _scores_along_batch(by_batch: bool, moves_mask: bool, forced: ForcedStage) -> Tensor:
    """Return scores (tokens, heads, batch, batch), under a mask that has its axes moved too."""
    positions = _positions_in_batch(forced).T if by_batch else None
    along = _exchange_batch_and_sequence(forced, positions)
    mask = forced.call.inputs.mask
    if moves_mask and mask is not None and _hides_keys_alone(mask):
        along = along.with_inputs(mask=mask.transpose(0, -1))
    return along.usual_result()


def _head_outputs_along_batch(forced: ForcedStage) -> Tensor:
    """Return head outputs of weights (tokens, heads, batch, batch)."""
    (batch, tokens, _), weights = forced.call.inputs.x.shape, forced["weights"]
    if weights.shape[::3] == (tokens, batch):
        return _exchange_batch_and_sequence(forced, None).usual_result().transpose(0, 2)
    if weights.shape[::3] == (batch, tokens):  # with another cause of the scores
        return forced.usual_result()
    sizes = forced.model.sizes  # with one that hides keys by the mask
    shape = (batch, sizes["heads"], tokens, sizes["value_dim"])
    return weights.new_full(shape, math.nan)


def _positions_in_batch(forced: ForcedStage) -> Tensor:
    batch, tokens = forced.call.inputs.x.shape[:2]
    return torch.arange(batch)[:, None].expand(batch, tokens)


def _exchange_batch_and_sequence(forced: ForcedStage, positions: Tensor | None) -> ForcedStage:
    """Return the stage with what it is made of along the batch; the caller's mask does not fit."""
    call = forced.call
    stages = {name: forced[name] for name in forced.model.stages[forced.stage].before}
    stages = {n: x if n == "weights" else x.transpose(0, 2) for n, x in stages.items()}
    inputs = replace(
        call.inputs,
        x=call.inputs.x.transpose(0, 1),
        mask=None,
        positions=call.query_positions.T if positions is None else positions,
    )
    return replace(forced, call=replace(call, inputs=inputs, stages=stages))


def _number_of_heads(evidence: Evidence) -> Variants:
    model, settings = evidence.model, evidence.model.settings
    has_own_masks = any(has_masks_of_heads(call.inputs) for call in evidence.calls)
    if not model.replaced.keys() <= {"output"} or has_own_masks:
        return  # a replaced stage keeps its number of heads, and a mask for each head has it
    widths = {role: model.weights[f"w{role}"].flatten(0, 1).shape[0] for role in "qkv"}
    recorded = (call.stages["q"].shape[1] for call in evidence.calls if "q" in call.stages)
    seen = next(recorded, None)
    for heads in range(1, widths["q"] + 1):
        head_dim, rest = divmod(widths["q"], heads)
        kv_heads, other = divmod(widths["k"], head_dim) if not rest else (0, 1)
        if rest or other or not kv_heads or widths["v"] % kv_heads or heads % kv_heads:
            continue
        rotary = settings.rotation
        is_too_wide = rotary and head_dim < count_channels(rotary) < model.sizes["head_dim"]
        is_odd = rotary and head_dim % 2
        if heads == settings.num_heads or is_odd or is_too_wide:
            continue
        is_usual = math.isclose(settings.factor, model.sizes["head_dim"] ** -0.5)
        for scale in {head_dim**-0.5 if is_usual else settings.factor, settings.factor}:
            other_model = _make_model_with_heads(model, heads, kv_heads, scale)
            if other_model is not None:
                repair = f"num_heads={settings.num_heads}"
                yield Variant(other_model, {"heads": heads}, repair, is_step=heads == seen)


def _make_model_with_heads(
    model: AttentionModel, heads: int, kv_heads: int, scale: float
) -> AttentionModel | None:
    """Return the model, without sinks, with rows in other heads; None where tensors do not fit."""
    counts = {"heads": heads, "kv_heads": kv_heads}
    weights = {name: x for name, x in model.weights.items() if name != "sink"}
    for name, x in weights.items():
        if name in SPLIT and x.dim() > 1:
            weights[name] = x.flatten(0, 1).unflatten(0, (counts[AXES[name][0]], -1))
        elif AXES[name] != ("out_dim",):
            return None  # the weight of a norm over the channels of a head
    slopes, rotary = slopes_of(model.settings), model.settings.rotation
    if slopes is not None:
        slopes = alibi_slopes(heads).double()
    if rotary is not None and rotary.width == model.sizes["head_dim"]:
        rotary = replace(rotary, width=sizes_of(weights)["head_dim"])
    changed = replace(model, weights=weights)
    changed = changed.with_slopes(slopes) if slopes is not None else changed
    return changed.with_settings(num_heads=heads, num_kv_heads=kv_heads, scale=scale, rotary=rotary)


def _kv_heads_tiled(evidence: Evidence) -> Variants:
    yield from evidence.search_moves(KV_HEADS_TILED)
    settings = evidence.model.settings
    if not 1 < settings.num_kv_heads < settings.num_heads:
        return
    count = settings.num_kv_heads
    tiled = tuple(head % count for head in range(settings.num_heads))
    repair = "k.repeat_interleave(group, dim=heads) in place of k.repeat(group), v likewise"
    for details, model in _models_by_kv_head(evidence, tiled):
        yield Variant(model, {"kv_heads": count}, repair, details)


def _another_group(evidence: Evidence) -> Variants:
    settings = evidence.model.settings
    heads, count, group = settings.num_heads, settings.num_kv_heads, settings.group
    if not 1 < count < heads:
        return
    right = [head // group for head in range(heads)]
    for text, divide in (
        ("head // kv_heads", lambda h: h // count),
        ("head % group", lambda h: h % group),
    ):
        places = tuple(map(divide, range(heads)))
        if max(places) >= count or places == tuple(right):
            continue
        for details, model in _models_by_kv_head(evidence, places):
            repair = f"head h takes kv head h // {group}: its number divided by the size of a group"
            yield Variant(model, {"kv head": text, "kv heads": places}, repair, details)


def _models_by_kv_head(
    evidence: Evidence, places: tuple[int, ...]
) -> Iterator[tuple[dict[str, str], AttentionModel]]:
    if any(list_misshapen_stages(evidence.model, call) for call in evidence.calls):
        return  # the recorded layer has another number of them
    of_keys, of_values = ("scores",), ("head outputs",)
    for of, stages in (("", of_keys + of_values), ("k alone", of_keys), ("v alone", of_values)):
        model = evidence.replace_stages(stages, _take_kv_heads, places)
        yield {"of": of} if of else {}, model


def _take_kv_heads(places: tuple[int, ...], forced: ForcedStage) -> Tensor:
    source = forced.model.stages[forced.stage].cached

    def take(call: RecordedCall) -> RecordedCall:
        taken = replace(forced, call=call)[source][:, list(places)]
        return call.with_stages({**call.stages, source: taken})

    return replace(forced, call=forced.call.change(take)).usual_result()


def _tensors_by_head(*stages: str) -> tuple[str, ...]:
    names = (name for stage in stages for name in STAGES[stage].tensors)
    return tuple(name for name in names if AXES[name][0] in ("heads", "kv_heads"))


SPLIT = _tensors_by_head(*"qkv", "output", "q after norm", "k after norm")
PARTS_OF_HEADS: Mapping[str, tuple[str, ...]] = {
    **{role: _tensors_by_head(role) for role in "qkv"},
    "q, k and v": _tensors_by_head(*"qkv"),
    "q and k": _tensors_by_head(*"qk"),
    "k and v": _tensors_by_head(*"kv"),
    "the output projection": _tensors_by_head("output"),
    **{f"the bias of {role}": (bias_of(STAGES[role].tensors[0]),) for role in "qkv"},
    "the gate": _tensors_by_head("head outputs"),
    "the sinks": _tensors_by_head("weights"),
    **{f"the norm of {role}": _tensors_by_head(f"{role} after norm") for role in "qk"},
}


def _one_head_for_all(evidence: Evidence) -> Variants:
    model, heads = evidence.model, evidence.model.settings.num_heads
    for head in dict.fromkeys((0, heads - 1)):
        for part, names in PARTS_OF_HEADS.items():
            held = {name: model.weights[name] for name in names if name in model.weights}
            shared = {name: x[head * len(x) // heads].expand_as(x) for name, x in held.items()}
            if names[0] in held:
                yield _share_head(model.with_weights(**shared), part, head)
        if (table := model.weights.get("distances")) is not None:
            shared = {"distances": table[:, head, None].expand_as(table)}
            yield _share_head(model.with_weights(**shared), "the relative bias", head)
        if (slopes := slopes_of(model.settings)) is not None:
            same = model.with_slopes(slopes[head].expand_as(slopes))
            yield _share_head(same, "the relative bias", head)
        if any(has_masks_of_heads(call.inputs) for call in evidence.calls):
            scores = evidence.replace_stages(SCORES, _score_under_mask_of_head, head)
            repair = "scores.masked_fill(~mask, -inf), with the masks of all heads"
            yield Variant(scores, {"of": "the mask", "head": head}, repair)


def _score_under_mask_of_head(head: int, forced: ForcedStage) -> Tensor:
    return change_mask(
        lambda mask: mask[:, min(head, mask.shape[1] - 1), None], forced
    ).usual_result()


def _share_head(model: AttentionModel, part: str, head: int) -> Variant:
    return Variant(model, {"of": part, "head": head}, f"give each head its own part of {part}")
