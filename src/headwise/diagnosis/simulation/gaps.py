"""Gaps between a model and recorded calls, and the rounding that explains them.

Bounds a priori (`headwise.function.records`) hold for a stage where all that it is made of was
recorded.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage, RecordedCall
from headwise.function import distance, rounding
from headwise.function.records import FLOAT32, STAGES, largest_bias
from headwise.function.spec import ABSENT

MOST_KEPT = 1 << 22  # entries of a tensor whose moved copies are kept


# Moved copies of a tensor, kept as long as it is: the causes of a search mostly share the weights
# and stages of one model.
_KEPT = WeakTensorKeyDictionary()


def perturb(x: Tensor, name: str, draw: int, share: float) -> Tensor:
    """Return x in float64, each entry times 1 + s, with s uniform from -share to share.

    The draws of a name and a number are the same in every call.
    """
    copies = _KEPT.setdefault(x, {}) if x.numel() <= MOST_KEPT else {}
    key = (name, draw, share)
    if key not in copies:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {draw}".encode()))
        shares = torch.rand(x.shape, generator=generator).mul_(2).sub_(1).double()
        copies[key] = x.double() * shares.mul_(share).add_(1)
    moved: Tensor = copies[key]
    return moved


# Both sides round, and the frequencies and slopes of both may be float32.
SIDES = 2
DRAWS = 3
NEARER = 0.1  # of a difference that is as random as rounding
FAR = 30  # times one draw's change: no three draws differ by as much


def allow_output(
    model: AttentionModel, call: RecordedCall, stage: str, dtype: torch.dtype
) -> Tensor:
    """Return how far runs in ``dtype`` may part in a stage that is computed from the inputs."""
    inputs = call.inputs

    def run(x: Tensor, *source: Tensor) -> Tensor:
        given = replace(inputs, x=x, source=source[0] if source else None)
        return model.predict_in_dtype(stage, replace(call, inputs=given), x.dtype)

    given = (inputs.x,) if inputs.source is None else (inputs.x, inputs.source)
    return rounding.allow_two_runs(run, *given, dtype=dtype)[1]


def allowed_difference(forced: ForcedStage) -> Tensor:
    """Return the difference that rounding explains, of the shape of the stage."""
    r = rounding.Roundoff.of(forced.call.dtype, with_reference=False)
    if _can_bound_by_formula(forced):
        return SIDES * forced.model.stages[forced.stage].bound(forced, r)
    call, is_bare = forced.call, not forced.call.stages and not forced.model.replaced
    if is_bare and call.dtype != torch.float64:
        exact = forced.result
        # Exact outputs may part by FORWARD errors of plain torch. A run in the dtype has one more.
        allowed = allow_output(forced.model, call, forced.stage, call.dtype)
        allowed = (1 + 1 / rounding.FORWARD) * allowed
        near = _move_positions(forced.model, r.u)
        if near is not forced.model:  # angles and biases grow with positions, and so their rounding
            change = near.predict_stage(forced.stage, call) - exact
            change = change.abs().nan_to_num(0.0, posinf=0.0)
            allowed = allowed + change.amax(-1, keepdim=True)
        return allowed + rounding.last_rounding(exact.nan_to_num(0.0, 0.0, 0.0), call.dtype)
    # Rounding in a sum of n products is that of exact sums of factors that differ by up to n u
    # (Higham 2002, section 3.1). Some draws of such factors stand for all.
    return SIDES * _change_by_rounding(forced, draws=DRAWS)


def _can_bound_by_formula(forced: ForcedStage) -> bool:
    """True if all that the stage is made of was recorded, in its usual shape."""
    call, stage = forced.call, forced.stage
    if any(before not in call.stages for before in forced.model.stages[stage].before):
        return False
    if stage != "head outputs":
        return True
    weights = call.stages["weights"]  # usual ones have the keys and batches of call and model
    if (weights.shape[0], weights.shape[-1]) != (len(call.inputs.x), call.key_positions.shape[1]):
        return False
    is_usual = forced.model.replaced.keys().isdisjoint(("scores", "weights"))
    return is_usual or replace(forced, stage="weights").result.shape == weights.shape


def is_far_beyond_rounding(forced: ForcedStage, apart: Tensor) -> bool:
    """True if a difference is so much larger than rounding that one draw of it says so.

    False where a formula bounds the stage, which costs little.
    """
    if _can_bound_by_formula(forced):
        return False
    return bool(apart.amax() > FAR * SIDES * _change_by_rounding(forced, draws=1).amax())


def hopeless_difference(forced: ForcedStage) -> Tensor:
    """Return a difference that is beyond rounding in any variant of the model.

    Rounding moves a variant's stage by more than the model's where its scores are larger.
    """
    if _can_bound_by_formula(forced):
        return torch.tensor(math.inf)
    return FAR * FAR * SIDES * _change_by_rounding(forced, draws=1).amax()


def _change_by_rounding(forced: ForcedStage, *, draws: int) -> Tensor:
    u = rounding.Roundoff.of(forced.call.dtype, with_reference=False).u
    changes = [_change_by_one_perturbation(forced, draw).amax() for draw in range(draws)]
    last = _count_summed_terms(forced) * u * forced.result.abs().nan_to_num(0.0, posinf=0.0)
    return torch.stack(changes).amax() + last


def _count_summed_terms(forced: ForcedStage) -> int:
    tensors = (*forced.model.weights.values(), forced.call.inputs.x)
    return max([sum(x.shape[-2:]) for x in tensors if x.dim() > 1])


def _change_by_one_perturbation(forced: ForcedStage, draw: int) -> Tensor:
    model, call, stage = forced.model, forced.call, forced.stage
    share = rounding.input_share(_count_summed_terms(forced), forced.call.dtype)
    moved = partial(perturb, draw=draw, share=share)
    used, source = _name_used_weights(model, call, stage), call.inputs.source
    weights = {name: moved(x, name) if name in used else x for name, x in model.weights.items()}
    source = None if source is None else moved(source, "source")
    inputs = replace(call.inputs, x=moved(call.inputs.x, "x"), source=source)
    near = replace(call, inputs=inputs, stages={n: moved(x, n) for n, x in call.stages.items()})
    other = replace(model, weights=weights)
    other = _move_positions(other, rounding.Roundoff.of(call.dtype, with_reference=False).u)
    change = other.predict_stage(stage, near) - forced.result
    return change.abs().nan_to_num(0.0, posinf=0.0)


def _move_positions(model: AttentionModel, u: float) -> AttentionModel:
    """Return the model with frequencies and biases by distance that are off by rounding."""
    settings = model.settings
    has_bias = settings.score_bias is not ABSENT and "scores" not in model.replaced
    if has_bias and (slopes := distance.slopes_of(settings)) is not None:
        model = model.with_stage_function("scores", partial(_round_bias, 2 * SIDES * u, slopes))
    if settings.rotation is None:
        return model
    # With theta * (1 + d), pair i turns by e d theta ** -e less, where e = 2i / width, which is at
    # most d / (2.718 log(theta)).
    theta = settings.rotation.theta
    return model.with_rotary(theta=theta * (1 + math.e * math.log(theta) * FLOAT32))


def _round_bias(u: float, slopes: Tensor, forced: ForcedStage) -> Tensor:
    """Return scores whose bias is rounded as if it were counted from the first or the last key."""
    scores = forced.usual_result()
    draw = torch.Generator().manual_seed(0)
    signs = 2 * torch.randint(2, scores.shape[-2:], generator=draw, dtype=scores.dtype) - 1
    return scores + u * signs * largest_bias(slopes, forced.call.key_positions)


def _name_used_weights(model: AttentionModel, call: RecordedCall, stage: str) -> set[str]:
    names = {*model.stages[stage].tensors}
    for earlier in model.stages[stage].before:
        if earlier not in call.stages:
            names |= _name_used_weights(model, call, earlier)
    return names


# (stage, number of the call, head); the head is -1 for the output, and where shapes differ.
Cell = tuple[str, int, int]
WHOLE = -1


@dataclass(frozen=True)
class Gap:
    """Difference of one head's stage in one call."""

    # Norm of the difference over the norm of the recorded entries; infinite where shapes or hidden
    # keys differ.
    size: float
    share: float  # the largest difference as a share of what rounding explains
    left: float  # the share of entries whose difference rounding does not explain
    largest: float = math.inf  # the largest difference
    bound: float = 0.0  # the smallest difference that rounding does not explain

    @property
    def is_rounding(self) -> bool:
        """True if rounding explains the difference."""
        return self.share <= 1

    def is_explained(self, after: Gap) -> bool:
        """True if rounding explains what a cause leaves, and would not explain all of this gap.

        Rounding explains anything where the scores of a cause are large numbers of a narrow dtype.
        A cause that rounds itself counts there if it leaves little: each entry that it rounds the
        other way moves the output by more than the runs part, and no other cause comes near.
        """
        is_near = after.size <= NEARER * self.size
        return after.is_rounding and (is_near or not self.largest <= after.bound)  # or NaN


@dataclass(frozen=True)
class Gaps:
    """Gaps of every cell that was compared."""

    cells: dict[Cell, Gap] = field(default_factory=dict)

    @cached_property
    def cells_beyond_rounding(self) -> list[Cell]:
        """The cells that rounding does not explain, in the order of the stages."""
        return [cell for cell, gap in self.cells.items() if not gap.is_rounding]

    @property
    def stages_beyond_rounding(self) -> list[str]:
        """The stages with parted cells, in order."""
        return list(dict.fromkeys(stage for stage, _, _ in self.cells_beyond_rounding))

    def total_clipped_size(self, cells: Iterable[Cell]) -> float:
        """Return the sum of the sizes of cells, each at most 1."""
        return sum(min(self.cells[cell].size, 1.0) for cell in cells if cell in self.cells)


def measure_gaps(
    model: AttentionModel, calls: Sequence[RecordedCall], stages: Collection[str] = STAGES
) -> Gaps:
    """Compare recorded stages with those that the model computes from the stages before them.

    Stages that follow one of another shape are not compared.
    """
    cells: dict[Cell, Gap] = {}
    # Stages that cannot be computed from recorded ones of other shapes.
    misshapen = set[str]().union(*[list_misshapen_stages(model, call) for call in calls])
    for stage in model.stages:
        if not misshapen.isdisjoint(model.stages[stage].before):
            misshapen.add(stage)
        if stage not in stages or stage in misshapen:
            continue
        for number, call in enumerate(calls):
            if stage in call.stages:
                gaps = _measure_gaps_by_head(model, call, stage)
                cells |= {(stage, number, head): gap for head, gap in gaps.items()}
                misshapen |= {stage} if WHOLE in gaps else set()
    return Gaps(cells)


def list_misshapen_stages(model: AttentionModel, call: RecordedCall) -> set[str]:
    """Return the stages that follow recorded ones of other heads than the model's.

    Recorded stages before a stage also have the same number of sequences.
    """
    has_other_heads: set[str] = set()
    for stage, recorded in call.stages.items():
        if stage in model.stages and stage != "output":
            count, width = model.heads_and_width(stage)
            is_square = stage in ("scores", "weights")
            if recorded.shape[1] != count or (recorded.shape[3] != width and not is_square):
                has_other_heads.add(stage)
    misshapen: set[str] = set()
    if not has_other_heads and len({len(x) for x in call.stages.values()}) == 1:
        return misshapen
    for record in model.stages.values():
        batches = {len(call.stages[each]) for each in record.before if each in call.stages}
        if len(batches) > 1 or not (misshapen | has_other_heads).isdisjoint(record.before):
            misshapen.add(record.name)
    return misshapen


def all_heads_agree_within_rounding(
    model: AttentionModel,
    call: RecordedCall,
    stage: str,
    heads: Sequence[int],
    *,
    far: float | Tensor = math.inf,
) -> bool:
    """True if what is left in these heads of a stage is rounding, and no more than ``far``."""
    if stage in list_misshapen_stages(model, call):
        return False
    forced, actual = model.prepare_stage(stage, call), call.stages[stage]
    predicted = forced.result
    if predicted.shape != actual.shape:
        return False
    apart = absolute_difference(predicted, actual)
    chosen = apart if WHOLE in heads else apart[:, list(heads)]
    if bool(chosen.amax() > far) or is_far_beyond_rounding(forced, chosen):
        return False
    is_rounding = (apart == 0) | (apart <= _rounding_bound(forced, actual))  # a bound may be NaN
    chosen = is_rounding if WHOLE in heads else is_rounding[:, list(heads)]
    return bool(chosen.all())


def _rounding_bound(forced: ForcedStage, actual: Tensor) -> Tensor:
    bound = allowed_difference(forced)
    return bound if bound.shape == actual.shape else bound.max().expand(actual.shape)


def _compare_stage(
    model: AttentionModel, call: RecordedCall, stage: str
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the difference of a stage, what rounding explains, and the stage, or None."""
    forced, actual = model.prepare_stage(stage, call), call.stages[stage]
    predicted = forced.result
    if predicted.shape != actual.shape:
        return None
    apart, bound = absolute_difference(predicted, actual), _rounding_bound(forced, actual)
    return apart, bound, actual.masked_fill(~actual.isfinite(), 0.0)


def _measure_gaps_by_head(model: AttentionModel, call: RecordedCall, stage: str) -> dict[int, Gap]:
    if (compared := _compare_stage(model, call, stage)) is None:
        return {WHOLE: Gap(math.inf, math.inf, math.inf)}
    is_output = stage == "output"
    heads = [WHOLE] if is_output else list(range(compared[0].shape[1]))
    gap, limit, size = ((x[None] if is_output else x.transpose(0, 1)).flatten(1) for x in compared)
    norms, sizes = gap.norm(dim=1), size.norm(dim=1)
    relative = torch.where(sizes > 0, norms / sizes, (norms > 0).double())
    shares = (gap / limit).masked_fill(gap == 0, 0.0).amax(1)
    left = (gap > limit).double().mean(1)
    finite = gap.isfinite().all(1)[:, None]
    numbers = torch.stack([relative, shares], 1).masked_fill(~finite, math.inf)
    numbers = torch.cat([numbers, left[:, None], gap.amax(1, True), limit.amin(1, True)], 1)
    return {head: Gap(*each) for head, each in zip(heads, numbers.tolist(), strict=True)}


def measure_gaps_by_position(model: AttentionModel, call: RecordedCall, stage: str) -> list[float]:
    """Return the relative difference of a stage at each query or key; 0 where it is rounding.

    Nothing is returned for a stage of another shape.
    """
    if (compared := _compare_stage(model, call, stage)) is None:
        return []
    axis = 1 if stage == "output" else 2
    apart, bound, size = (x.transpose(0, axis).flatten(1) for x in compared)
    parts = ((apart != 0) & ~(apart <= bound)).any(1)
    relative = apart.norm(dim=1) / size.norm(dim=1)
    sizes = torch.where(parts, relative.nan_to_num(math.inf), 0.0)
    numbers: list[float] = sizes.tolist()
    return numbers


def absolute_difference(predicted: Tensor, actual: Tensor) -> Tensor:
    """Return the absolute difference; 0 for equal infinities and two NaNs, else infinite."""
    equal = (predicted == actual) | (predicted.isnan() & actual.isnan())
    return (predicted - actual).abs().nan_to_num(math.inf).masked_fill(equal, 0.0)
