"""Changes of a model that are joined with others, and those that hold in some heads alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headwise.diagnosis.simulation.gaps import WHOLE
from headwise.diagnosis.simulation.model import AttentionModel, ForcedStage
from headwise.function.rotary import has_frequencies


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


def replace_stage_in_heads(
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
