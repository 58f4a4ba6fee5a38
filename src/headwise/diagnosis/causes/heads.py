"""Heads that are gone, and faults of one role of two, of some heads or of one kv head.

Where the stages of heads were recorded, they tell which heads part. Outputs alone are sums over
heads: a fault of some heads changes them by the sum of what it changes in each, so that least
squares over heads finds which. In short inputs there are fewer weights than channels, and the
weights of every head can be read off the outputs. Changes of a model that hold in some heads alone,
in later calls, or beside those of another cause, are made here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from headwise.diagnosis.causes.evidence import Evidence, Family, Variant, Variants
from headwise.diagnosis.simulation import gaps
from headwise.diagnosis.simulation.gaps import WHOLE
from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage, RecordedCall
from headwise.function.distance import slopes_of
from headwise.function.rotary import has_frequencies
from headwise.function.spec import AlibiRule
from headwise.function.stages import repeat_kv_heads
from headwise.function.weights import State, take_heads
from headwise.identify import catalogue
from headwise.identify.catalogue import NORMED, Cause

IN_ROLES = {*NORMED}
IN_HEADS = {*NORMED, "scores", "weights", "head outputs"}
# Causes of the axes, which mix heads, and those of later calls.
WHOLE_CAUSES = {
    catalogue.SOFTMAX_AXIS,
    catalogue.BATCH_SEQUENCE_EXCHANGED,
    catalogue.GATE_MERGED,
    catalogue.ANOTHER_GROUP,
    catalogue.WEIGHTS_TRANSPOSED,
    catalogue.POSITION_IN_DECODING,
    catalogue.PADDING_IN_DECODING,
    catalogue.WINDOW_IN_DECODING,
    catalogue.EVICTED_KEYS,
    catalogue.DROPOUT_LEFT_ON,
    catalogue.SINKS,
    catalogue.DISTANCE_BIAS_SLOPE_RULE,
}
CERTAIN = 0.02  # how far a share of a head may be from 0 or 1
SMALL = 1e-6  # of what parts: what a variant changes less in a head says nothing about it
ROUNDS = 10
STEP = 1e-4


def limit(cause: Cause, variants: Variants, evidence: Evidence) -> Variants:
    """Yield the variants of a cause in one role alone, and in some heads, where outputs are known.

    A family is limited to the heads whose weights part, as far as these can be read.
    """
    is_of_heads = IN_HEADS.issuperset(cause.stages) and cause not in WHOLE_CAUSES
    if not is_of_heads or not evidence.shows_outputs_alone:
        return
    roles = ("", "q", "k") if IN_ROLES.issuperset(cause.stages) else ("",)
    known = read_parted_heads(evidence)
    every = tuple(range(evidence.model.settings.num_heads))
    for each in variants:
        if isinstance(each, Variant) and each.heads is not None:  # which says them itself
            yield each
            continue
        for role in roles if not _states_role(each) else ("",):
            if role and cause is not catalogue.ROTARY_SOME_HEADS:
                yield from _limit_variant(each, evidence, role, None)
            heads = known
            if known is None and isinstance(each, Variant):
                model = _limit_model(evidence.model, each.model, role, None)
                heads = None if model is None else find_heads(evidence, model)
            if heads and heads != every and cause is not catalogue.ROTARY_MISSING:
                yield from _limit_variant(each, evidence, role, heads)


def _states_role(variant: Variant | Family) -> bool:
    return isinstance(variant, Variant) and not {"role", "roles"}.isdisjoint(variant.parameters)


def _limit_variant(
    variant: Variant | Family, evidence: Evidence, role: str, heads: tuple[int, ...] | None
) -> Variants:
    if _limit_model(evidence.model, evidence.model, role, heads) is None:
        return
    if isinstance(variant, Variant):
        yield _make_part(evidence, role, heads, variant)
        return
    make = variant.make
    yield replace(variant, make=lambda number: _make_part(evidence, role, heads, make(number)))


def _make_part(
    evidence: Evidence, role: str, heads: tuple[int, ...] | None, variant: Variant
) -> Variant:
    model = _limit_model(evidence.model, variant.model, role, heads)
    assert model is not None
    parameters, settings = {**variant.parameters}, evidence.model.settings
    if role:
        parameters = {"role": role, **parameters}
    if role == "k" and heads and settings.group > 1:
        parameters["kv heads"] = _kv_heads(settings.group, heads)
    details = {**variant.details}
    if heads and "rotated" in details:  # the others are
        details["rotated"] = tuple(n for n in range(settings.num_heads) if n not in heads)
    return replace(variant, model=model, parameters=parameters, details=details, heads=heads)


def _kv_heads(group: int, heads: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({head // group for head in heads}))


def _limit_model(
    base: AttentionModel, changed: AttentionModel, role: str, heads: tuple[int, ...] | None
) -> AttentionModel | None:
    """Return the model with a change in a role or in some heads; None for a part of a kv head."""
    if changed.projection("q")[0].shape != base.projection("q")[0].shape:
        return None
    if not role:
        return within(base, changed, "head outputs", heads)
    if role == "k" and heads is not None:
        kv_heads = _kv_heads(base.settings.group, heads)
        if len(kv_heads) * base.settings.group != len(heads):
            return None
        heads = kv_heads
    return within(base, changed, f"{role} after rotary", heads)


def change_later_calls(
    evidence: Evidence,
    stages: Sequence[str],
    change: Callable[[ForcedStage], ForcedStage],
    most: int | None = None,
) -> AttentionModel:
    """Return the model with other stages in calls with earlier keys, of so many tokens at most."""

    def in_later_calls(forced: ForcedStage) -> Tensor:
        is_short = most is None or forced.call.inputs.x.shape[1] <= most
        return (change(forced) if forced.call.earlier and is_short else forced).usual_result()

    return evidence.replace_stages(stages, in_later_calls)


@lru_cache(maxsize=4)
def _smallest_parted_call(evidence: Evidence) -> RecordedCall:
    parted = {number for _, number, _ in evidence.parted_calls_and_heads("output")}
    return min((evidence.calls[n] for n in parted), key=lambda call: call.stages["output"].numel())


def contributions(model: AttentionModel, call: RecordedCall) -> Tensor:
    """Return what each head adds to the output, (heads, batch, queries, out_dim).

    Head outputs are the recorded ones, where these are known.
    """
    heads = model.prepare_stage("output", call)["head outputs"]
    return torch.einsum("bhqd,hde->hbqe", heads, model.projection("o")[0])


@lru_cache(maxsize=4)
def _base_parts(evidence: Evidence) -> tuple[Tensor, Tensor]:
    """Return contributions to the smallest call that parts, and what the model leaves of it."""
    call = _smallest_parted_call(evidence)
    left = call.stages["output"] - evidence.model.predict_stage("output", call)
    return contributions(evidence.model, call), left


def find_heads(evidence: Evidence, model: AttentionModel) -> tuple[int, ...] | None:
    """Return the heads in which a changed model explains the smallest call that parts."""
    base, left = _base_parts(evidence)
    if left.shape != base.shape[1:]:
        return None
    other = contributions(model, _smallest_parted_call(evidence))
    if other.shape != base.shape or not other.isfinite().all():
        return None
    seen = left.flatten().isfinite()  # a port may return NaN at some tokens
    left, changes = left.flatten()[seen], (other - base).flatten(1)[:, seen]
    is_live = changes.norm(dim=1) > SMALL * left.norm()
    if not is_live.any():
        return None
    live = is_live.nonzero().flatten()
    places = solve_heads(changes[live], left)
    return tuple(live[list(places)].tolist()) if places else None


def solve_heads(changes: Tensor, left: Tensor) -> tuple[int, ...] | None:
    """Return the heads whose changes (heads, numbers) add up to what is left, (numbers,).

    Least squares gives each head a share. None where a share is neither 0 nor 1, up to `CERTAIN`.
    """
    solution = torch.linalg.lstsq(changes.T, left[:, None], driver="gelsd")
    shares = solution.solution[:, 0]
    is_in = shares > 0.5
    if bool(((shares - is_in.to(shares.dtype)).abs() > CERTAIN).any()):
        return None
    return tuple(is_in.nonzero().flatten().tolist())


@lru_cache(maxsize=4)
def read_parted_heads(evidence: Evidence) -> tuple[int, ...] | None:
    """Return the heads whose weights part in the smallest call that parts.

    They are read off its outputs. None where values and output projection do not explain these, or
    where there are more weights than channels.
    """
    model, call = evidence.model, _smallest_parted_call(evidence)
    (wo, bias), output = model.projection("o"), call.stages["output"]
    keys = call.key_positions.shape[1]
    if (
        wo.shape[0] * keys > wo.shape[2]
        or model.projection("g")[0] is not None
        or "output" in model.replaced
    ):
        return None
    forced = model.prepare_stage("output", call)
    values = repeat_kv_heads(forced.of_all_calls("v"), heads=wo.shape[0])
    parts = torch.einsum("bhjd,hde->behj", values, wo).flatten(2)
    if forced.result.shape != output.shape:
        return None
    rest = output if bias is None else output - bias
    bound = gaps.allowed_difference(forced)
    inverse = torch.linalg.pinv(parts)
    read = inverse @ rest.mT  # (batch, heads * keys, queries)
    if not float((parts @ read - rest.mT).norm()) <= float(bound.norm()):  # it may be NaN
        return None
    error = (inverse.abs() @ bound.mT).unflatten(1, (wo.shape[0], keys))
    weights = model.predict_stage("weights", call).mT  # (batch, heads, keys, queries)
    apart = (read.unflatten(1, (wo.shape[0], keys)) - weights).abs() > error
    return tuple(apart.transpose(0, 1).flatten(1).any(1).nonzero().flatten().tolist())


def fit_by_head(
    evidence: Evidence, make: Callable[[Tensor], AttentionModel], start: Tensor
) -> Tensor | None:
    """Return a number for each head that makes the outputs nearest, (heads,).

    Each number changes its head alone, so two runs give the derivatives by all of them.
    """
    calls = [call for call in evidence.calls if "output" in call.stages]
    recorded = torch.cat([call.stages["output"].flatten() for call in calls])
    seen = recorded.isfinite()

    def run(numbers: Tensor) -> Tensor:
        parts = [contributions(make(numbers), call).flatten(1) for call in calls]
        return torch.cat(parts, 1)[:, seen]

    def residuals(numbers: Tensor) -> Tensor:
        model = make(numbers)
        outputs = [model.predict_stage("output", call).flatten() for call in calls]
        return (torch.cat(outputs) - recorded)[seen]

    numbers, left = start.double(), residuals(start.double())
    for _ in range(ROUNDS):
        steps = STEP * numbers.abs().clamp_min(1.0)
        slopes = (run(numbers + steps) - run(numbers - steps)) / (2 * steps[:, None])
        if not (slopes.isfinite().all() and left.isfinite().all()):
            return None
        move = torch.linalg.lstsq(slopes.T, -left[:, None], driver="gelsd").solution[:, 0]
        tried = [(numbers + share * move) for share in (1.0, 0.25)]
        sizes = [float(residuals(each).norm()) for each in tried]
        best = min(range(2), key=sizes.__getitem__)
        if not sizes[best] < float(left.norm()):
            break
        numbers = tried[best]
        left = residuals(numbers)
    return numbers


class _ConflictError(Exception):
    """Two changes of one value."""


def merge_models(
    base: AttentionModel, first: AttentionModel, second: AttentionModel
) -> AttentionModel | None:
    """Return the model with the changes of two others; None where both change one value.

    None too for a theta and a scaling whose rotation has no frequencies.
    """
    try:
        settings = _merge_values(base.settings, first.settings, second.settings)
        names = base.weights.keys() | first.weights.keys() | second.weights.keys()
        sides = [[model.weights.get(n) for model in (base, first, second)] for n in names]
        merged = dict(zip(names, (_merge_tensors(*side) for side in sides), strict=True))
    except _ConflictError:
        return None
    if settings.rotation is not None and not has_frequencies(settings.rotation):
        return None
    weights = {name: x for name, x in merged.items() if x is not None}
    model = replace(first, settings=settings, weights=weights)
    for stage, function in second.replaced.items():
        if function is not base.replaced.get(stage):
            model = model.with_stage_function(stage, function)
    return model


def _merge_values(base: Any, first: Any, second: Any) -> Any:
    if first in (base, second):
        return second
    if second == base:
        return first
    values = base, first, second
    if len({type(each) for each in values}) > 1 or not is_dataclass(base):
        raise _ConflictError
    parts = {f.name: [getattr(each, f.name) for each in values] for f in fields(base)}
    made: Any = type(base)
    return made(**{name: _merge_values(*each) for name, each in parts.items()})


def _merge_tensors(
    base: Tensor | None, first: Tensor | None, second: Tensor | None
) -> Tensor | None:
    if first is base or first is second:
        return second
    if second is base:
        return first
    raise _ConflictError


def within(
    base: AttentionModel, changed: AttentionModel, stage: str, heads: Sequence[int] | None
) -> AttentionModel:
    """Return ``base`` with a stage of ``changed``, in some heads alone (all for None or WHOLE)."""
    some = None if heads is None or WHOLE in heads else tuple(heads)
    function = _StageInHeads(base, changed, stage, some)
    return replace(base, replaced={**base.replaced, stage: function})


@dataclass(frozen=True, eq=False)
class _StageInHeads:
    """A stage of a changed model, in some heads.

    The change is one of ``base``. Where the model that computes the stage has more changes, such as
    those of a second cause, the stage has them too.
    """

    base: AttentionModel
    changed: AttentionModel
    stage: str
    heads: tuple[int, ...] | None  # None for all

    def __call__(self, forced: ForcedStage) -> Tensor:
        usual, changed = self._with_later_changes(forced.model)
        other = ForcedStage(changed, forced.call, self.stage).result
        if self.heads is None:
            return other
        mine = ForcedStage(usual, forced.call, self.stage).result
        if forced.substitute is not None:  # of another cause, in other heads
            mine = forced.usual_result()
        chosen = torch.zeros(mine.shape[1], dtype=torch.bool)
        chosen[list(self.heads)] = True
        return torch.where(chosen[:, None, None], other, mine)

    def _with_later_changes(self, now: AttentionModel) -> tuple[AttentionModel, AttentionModel]:
        base, replaced = self.base, {**now.replaced}
        replaced.pop(self.stage, None)
        if self.stage in base.replaced:
            replaced[self.stage] = base.replaced[self.stage]
        usual = replace(now, replaced=replaced)
        if usual.settings is base.settings and _are_same(usual, base):
            return base, self.changed
        merged = merge_models(base, self.changed, usual)
        return usual, self.changed if merged is None else merged


def _are_same(first: AttentionModel, second: AttentionModel) -> bool:
    sides = ((first.weights, second.weights), (first.replaced, second.replaced))
    return all(
        a is b or (a.keys() == b.keys() and all(x is b[name] for name, x in a.items()))
        for a, b in sides
    )


BY_HEAD = ("scores", "weights", "head outputs")  # stages of as many heads as there are queries'


def _heads_gone(evidence: Evidence) -> Variants:
    """Yield the model without the heads that are gone, with another bias where that is all else.

    Where heads were taken out, the recorded queries and keys tell which are left. Where rows of the
    output projection are 0, the output is without what these heads add.
    """
    for model, gone in _models_without_heads(evidence):
        parameters: dict[str, object] = {"without heads": gone}
        repair = "put these heads back, from the weights of the other one"
        shifted = with_mean_gap_in_bias(model, evidence.calls)
        if shifted is not None and not _output_parts(shifted, evidence.calls):
            parameters["bias"] = "another one"
            yield Variant(shifted, parameters, f"{repair}, and the bias of its output")
        else:
            yield Variant(model, parameters, repair)


def _output_parts(model: AttentionModel, calls: Sequence[RecordedCall]) -> bool:
    return bool(gaps.measure_gaps(model, calls, ("output",)).cells_beyond_rounding)


def _models_without_heads(evidence: Evidence) -> list[tuple[AttentionModel, tuple[int, ...]]]:
    model = evidence.model
    total = range(model.settings.num_heads)
    if (left := _find_recorded_heads(evidence)) is not None:
        heads, kv_heads = left
        return [(take(model, heads, kv_heads), tuple(sorted({*total} - {*heads})))]
    off = _find_silent_heads(evidence)
    if not off or len(off) == len(total):
        return []
    wo = model.weights["wo"].clone()
    wo[list(off)] = 0
    return [(model.with_weights(wo=wo), off)]


def take(
    model: AttentionModel, heads: tuple[int, ...], kv_heads: tuple[int, ...]
) -> AttentionModel:
    """Return the model with these heads and kv heads alone, in this order."""
    settings = replace(model.settings, num_heads=len(heads), num_kv_heads=len(kv_heads))
    rule = settings.score_bias
    if isinstance(rule, AlibiRule):
        slopes = slopes_of(model.settings)
        assert slopes is not None
        kept = tuple(slopes[list(heads)].tolist())
        settings = replace(settings, score_bias=replace(rule, slopes=kept))
    return replace(model, settings=settings, weights=take_heads(model.weights, heads, kv_heads))


def _find_recorded_heads(evidence: Evidence) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the model's heads, and kv heads, that the recorded ones are; None where some are none.

    There are fewer recorded heads than the model has.
    """
    model, stages = evidence.model, [evidence.shown_stages[role] for role in ("q", "k")]
    call = find_smallest_call(evidence, stages)
    if call is None or call.stages[stages[0]].shape[1] >= model.settings.num_heads:
        return None
    heads, kv_heads = (match_heads(model, call, stage) for stage in stages)
    if heads is None or kv_heads is None or len(heads) % len(kv_heads):
        return None
    group = len(heads) // len(kv_heads)
    sources = [kv_heads[place // group] for place in range(len(heads))]
    belongs = all(
        head // model.settings.group == kv for head, kv in zip(heads, sources, strict=True)
    )
    return (heads, kv_heads) if belongs else None


def find_smallest_call(evidence: Evidence, stages: Sequence[str]) -> RecordedCall | None:
    """Return the smallest call with these stages of queries, keys or values; None for others."""
    if {*stages} - {*NORMED, "q", "k", "v"}:  # they were not recorded
        return None
    calls = [
        call
        for call in evidence.calls
        if {*stages} <= {*call.stages} and _has_heads_of_its_queries(call, stages[0])
    ]
    return min(calls, key=lambda call: call.inputs.x.numel(), default=None)


def _has_heads_of_its_queries(call: RecordedCall, queries: str) -> bool:
    """True if what follows the queries has as many heads: a port may record one head by itself."""
    counts = {call.stages[stage].shape[1] for stage in BY_HEAD if stage in call.stages}
    return counts <= {call.stages[queries].shape[1]}


def match_heads(model: AttentionModel, call: RecordedCall, stage: str) -> tuple[int, ...] | None:
    """Return the model's head that each recorded one is; None where one is none."""
    forced, recorded = model.prepare_stage(stage, call), call.stages[stage]
    predicted, bound = forced.result, gaps.allowed_difference(forced)
    if recorded.shape[::3] != predicted.shape[::3] or recorded.shape[2] != predicted.shape[2]:
        return None
    matched = []
    for head in recorded.unbind(1):
        apart = (predicted - head[:, None]).abs() <= bound
        fits = [
            n for n, each in enumerate(apart.unbind(1)) if bool(each.all()) and n not in matched
        ]
        if not fits:
            return None
        matched.append(fits[0])
    return tuple(matched)


def _find_silent_heads(evidence: Evidence) -> tuple[int, ...]:
    """Return the heads without which the model's output is the recorded one, up to a constant."""
    model = evidence.model
    calls = [call for call in evidence.calls if "output" in call.stages]
    if any(gaps.list_misshapen_stages(model, call) for call in calls):
        return ()
    wo, sums = model.weights["wo"], list[tuple[Tensor, Tensor]]()
    for call in calls:
        forced = model.prepare_stage("output", call)
        recorded = call.stages["output"]
        if forced["head outputs"].shape[1] != len(wo) or forced.result.shape != recorded.shape:
            return ()
        parts = contributions(model, call).flatten(1, 2)
        sums.append((parts, (recorded - forced.result).flatten(0, 1)))
    if not sums:
        return ()
    parts, left = (torch.cat(each, -2) for each in zip(*sums, strict=True))
    parts, left = (x - x.mean(-2, keepdim=True) for x in (parts, left))
    if not bool(left.isfinite().all()):
        return ()
    return solve_heads(parts.flatten(1), -left.flatten()) or ()


def with_mean_gap_in_bias(
    model: AttentionModel, calls: Sequence[RecordedCall]
) -> AttentionModel | None:
    """Return the model whose output has the mean of the recorded one; None where it has it."""
    call = next((call for call in calls if "output" in call.stages), None)
    if call is None:
        return None
    forced = model.prepare_stage("output", call)
    if forced.result.shape != call.stages["output"].shape:
        return None
    gap = (call.stages["output"] - forced.result).flatten(0, 1).mean(0)
    if bool((gap.abs() <= gaps.allowed_difference(forced).amax()).all()):
        return None
    return model.with_weights(bo=gap + model.weights.get("bo", torch.zeros_like(gap)))


def narrowest_dtype(weights: State) -> torch.dtype:
    """Return the narrowest dtype that holds every weight."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if all(torch.equal(x.to(dtype).to(x), x) for x in weights.values()):
            return dtype
    return torch.float64
