"""Causes in the number of heads: some are gone, give nothing, or were merged."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.diagnosis.causes.evidence import Evidence, Variant, Variants
from headwise.diagnosis.causes.parts import contributions, solve_heads
from headwise.diagnosis.simulation import gaps
from headwise.diagnosis.simulation.model import AttentionModel, RecordedCall
from headwise.function.distance import slopes_of
from headwise.function.spec import AlibiRule
from headwise.function.weights import AXES, State, take_heads
from headwise.identify.catalogue import NORMED

BY_HEAD = ("scores", "weights", "head outputs")  # stages of as many heads as there are queries'


def _heads_gone(evidence: Evidence) -> Variants:
    """Yield the model without the heads that are gone, with another bias where that is all else.

    Where heads were taken out, the recorded queries and keys tell which are left. Where rows of the
    output projection are 0, the output is without what these heads add.
    """
    for model, gone in _models_without_heads(evidence):
        parameters: dict[str, object] = {"without heads": gone}
        repair = "put these heads back, from the weights of the other one"
        shifted = _with_mean_gap_in_bias(model, evidence.calls)
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
        return [(_take(model, heads, kv_heads), tuple(sorted({*total} - {*heads})))]
    off = _find_silent_heads(evidence)
    if not off or len(off) == len(total):
        return []
    wo = model.weights["wo"].clone()
    wo[list(off)] = 0
    return [(model.with_weights(wo=wo), off)]


def _take(
    model: AttentionModel, heads: tuple[int, ...], kv_heads: tuple[int, ...]
) -> AttentionModel:
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
    call = _find_smallest_call(evidence, stages)
    if call is None or call.stages[stages[0]].shape[1] >= model.settings.num_heads:
        return None
    heads, kv_heads = (_match_heads(model, call, stage) for stage in stages)
    if heads is None or kv_heads is None or len(heads) % len(kv_heads):
        return None
    group = len(heads) // len(kv_heads)
    sources = [kv_heads[place // group] for place in range(len(heads))]
    belongs = all(
        head // model.settings.group == kv for head, kv in zip(heads, sources, strict=True)
    )
    return (heads, kv_heads) if belongs else None


def _find_smallest_call(evidence: Evidence, stages: Sequence[str]) -> RecordedCall | None:
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


def _match_heads(model: AttentionModel, call: RecordedCall, stage: str) -> tuple[int, ...] | None:
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


def _with_mean_gap_in_bias(
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


@dataclass(frozen=True)
class _Merged:
    """Recorded heads, by the numbers of the model's.

    Attributes:
        heads: the model's head that each one is.
        groups: the model's kv heads that each different kv head is the mean of.
        copies: the number of equal kv heads that stand side by side.
    """

    heads: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    copies: int

    def apply(self, model: AttentionModel) -> AttentionModel:
        first = [group[0] for group in self.groups for _ in range(self.copies)]
        taken, dtype = _take(model, self.heads, tuple(first)), _narrowest_dtype(model.weights)
        merged = {
            name: torch.stack([x[list(group)].mean(0) for group in self.groups])
            for name, x in model.weights.items()
            if AXES[name][0] == "kv_heads"
        }
        return taken.with_weights(
            **{n: x.to(dtype).to(x).repeat_interleave(self.copies, 0) for n, x in merged.items()}
        )

    def parameters(self, num_heads: int) -> dict[str, object]:
        stated: dict[str, object] = {
            "kv heads": ", ".join("+".join(map(str, group)) for group in self.groups)
        }
        if gone := sorted({*range(num_heads)} - {*self.heads}):
            stated["without heads"] = tuple(gone)
        if list(self.heads) != sorted(self.heads):
            stated["heads in the order"] = self.heads
        return stated


def _narrowest_dtype(weights: State) -> torch.dtype:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if all(torch.equal(x.to(dtype).to(x), x) for x in weights.values()):
            return dtype
    return torch.float64


def _kv_heads_merged(evidence: Evidence) -> Variants:
    stages = [evidence.shown_stages[role] for role in "qkv"]
    if not evidence.parted_calls_and_heads(*stages[1:]):
        return
    merged = _find_merged_heads(evidence, stages)
    if merged is None:
        return
    model = merged.apply(evidence.model)
    # All of them, or none: keys alone may be anything, where values are not their means too.
    if not gaps.measure_gaps(model, evidence.calls, stages).cells_beyond_rounding:
        repair = "put these kv heads back, from the weights of the other one: a mean does not tell"
        parameters = merged.parameters(evidence.model.settings.num_heads)
        yield Variant(model, parameters, f"{repair} what it was made of")


def _find_merged_heads(evidence: Evidence, stages: Sequence[str]) -> _Merged | None:
    """Return the heads with kv heads that stand for several of the model's; None for no such.

    Recorded queries tell which of the model's heads each one is, and so which of its kv heads a
    recorded kv head stands for.
    """
    settings, call = evidence.model.settings, _find_smallest_call(evidence, stages)
    if call is None:
        return None
    copies = _count_copies(evidence.model, call)
    different = call.stages["v"].shape[1] // copies
    if different >= settings.num_kv_heads:
        return None
    heads = _match_heads(evidence.model, call, stages[0])
    if heads is None or len(heads) % different:
        return None
    sources = torch.tensor(heads).div(settings.group, rounding_mode="floor")
    groups = tuple(tuple(sorted({*run})) for run in sources.reshape(different, -1).tolist())
    if all(len(group) == 1 for group in groups):  # heads are gone, and no kv heads were merged
        return None
    return _Merged(heads, groups, copies)


def _count_copies(model: AttentionModel, call: RecordedCall) -> int:
    values, bound = call.stages["v"], gaps.allowed_difference(model.prepare_stage("v", call)).amax()
    count = values.shape[1]
    for copies in range(count, 1, -1):
        if count % copies == 0:
            runs = values.unflatten(1, (-1, copies))
            if bool(((runs - runs[:, :, :1]).abs() <= bound).all()):
                return copies
    return 1
