"""Simulated attention: recorded calls, weights, settings, and a function for each stage.

The stages are those of `headwise.function.stages`, in float64. q, k, v and head outputs are (batch,
heads, length, channels), keys and values with their own number of heads, and keys without those of
earlier calls; scores and weights are (batch, heads, queries, keys); the output is (batch, queries,
out_dim). A hidden key has a score of -inf.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from headwise.function.records import STAGES, Stage, stages_of
from headwise.function.spec import ABSENT, AlibiRule, AttentionSpec
from headwise.function.stages import visible_by_distance
from headwise.function.weights import KINDS, State, bias_of, sizes_of

Stages = Mapping[str, Tensor]


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call of a layer, or of several calls with one cache.

    Attributes:
        x: (batch, queries, embed_dim).
        source: (batch, keys, source_dim) in cross attention; None where keys come from ``x``.
        mask: broadcasts to (batch, heads, queries, keys); True attends.
        positions: of the queries, (batch, queries); None to count from the keys of earlier calls.
        steps: lengths of the calls with one cache in which the tokens come; () for a single call.
        cache: makes the cache of a module of transformers from its config and the number of tokens;
            None for its ``DynamicCache``.
    """

    x: Tensor
    source: Tensor | None = None
    mask: Tensor | None = None
    positions: Tensor | None = None
    steps: tuple[int, ...] = ()
    cache: Callable[[Any, int], Any] | None = None

    def __post_init__(self) -> None:
        if self.mask is not None and self.mask.dim() < 4:
            mask = self.mask[(None,) * (4 - self.mask.dim())]
            object.__setattr__(self, "mask", mask)

    @property
    def per_call(self) -> list[Inputs]:
        """The inputs of each call."""
        if not self.steps:
            return [self]
        calls = []
        for start, end in pairwise(accumulate(self.steps, initial=0)):
            mask, positions = self.mask, self.positions
            mask = None if mask is None else cut_mask(mask, start, end)
            positions = None if positions is None else positions[:, start:end]
            x = self.x[:, start:end].contiguous()  # as those of a caller mostly are
            calls.append(Inputs(x, mask=mask, positions=positions))
        return calls

    @property
    def way(self) -> str:
        """The way in which the tokens come, in words."""
        if not self.steps:
            return "in one call"
        sizes = "1 token" if {*self.steps} == {1} else f"{', '.join(map(str, self.steps))} tokens"
        padded = "" if self.mask is None else ", under a mask"
        return f"in calls of {sizes}{padded}"

    @property
    def key_source(self) -> Tensor:
        """The input of keys and values."""
        return self.x if self.source is None else self.source

    def map_tokens(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Return the inputs with ``x`` and the source changed."""
        source = None if self.source is None else change(self.source)
        return replace(self, x=change(self.x), source=source)


def has_masks_of_heads(inputs: Inputs) -> bool:
    """True if heads have masks of their own."""
    return inputs.mask is not None and inputs.mask.shape[1] > 1


def cut_mask(mask: Any, start: int, end: int) -> Any:
    """Return the part of a mask, a tensor or an array, that is that of one of several calls."""
    rows = mask[..., start:end, :] if mask.shape[-2] > 1 else mask
    return rows[..., :end]


@dataclass(frozen=True)
class RecordedCall:
    """Stages of one call, as far as they were recorded, in float64."""

    inputs: Inputs
    stages: Stages  # by name
    dtype: torch.dtype = torch.float64  # of the arithmetic that was recorded
    # Calls with the same cache before this one; their keys are keys of this call.
    earlier: tuple[RecordedCall, ...] = field(default=(), repr=False)
    # A function of which nothing but outputs is known, to be run on more inputs.
    runs: Any = field(default=None, repr=False, compare=False)
    # The same object in all copies of the call, also in those whose numbers were changed.
    key: object = field(default_factory=object, repr=False, compare=False)

    @property
    def past_key_count(self) -> int:
        """Number of keys of earlier calls."""
        return sum([call.inputs.x.shape[1] for call in self.earlier])

    @cached_property
    def query_positions(self) -> Tensor:
        """Positions of the queries, (batch, queries)."""
        if self.inputs.positions is not None:
            return self.inputs.positions
        past = self.past_key_count if self.earlier else 0
        return count_positions(past, *self.inputs.x.shape[:2])

    @property
    def new_key_positions(self) -> Tensor:
        """Positions of the keys of this call, (batch, keys)."""
        if self.inputs.source is None:
            return self.query_positions
        return count_positions(0, *self.inputs.source.shape[:2])

    @property
    def key_positions(self) -> Tensor:
        """Positions of all keys, those of earlier calls first, (batch, keys)."""
        if not self.earlier:
            return self.new_key_positions
        earlier = [call.new_key_positions for call in self.earlier]
        return join_positions(*earlier, self.new_key_positions)

    def change(self, change: Callable[[RecordedCall], RecordedCall]) -> RecordedCall:
        """Return the call after a change of it and of the calls before it, each done once."""
        changed: list[RecordedCall] = []
        for call in (*self.earlier, self):
            changed.append(replace(change(call), earlier=tuple(changed)))
        return changed[-1]

    def cast(self, dtype: torch.dtype) -> RecordedCall:
        """Return the call with inputs and stages in a dtype, and so those before it."""

        def cast(call: RecordedCall) -> RecordedCall:
            inputs = call.inputs.map_tokens(lambda x: x.to(dtype))
            return replace(
                call, inputs=inputs, stages={name: x.to(dtype) for name, x in call.stages.items()}
            )

        return self.change(cast)

    def with_stages(self, stages: Stages) -> RecordedCall:
        """Return the call with other stages."""
        return replace(self, stages=stages)


# The same tensors each time, so that a model's memory finds what was computed with them.


@lru_cache(maxsize=256)
def count_positions(start: int, batch: int, length: int) -> Tensor:
    """Return the positions of tokens that follow ``start`` others, (batch, length)."""
    return torch.arange(start, start + length).expand(batch, length)


@lru_cache(maxsize=256)
def join_positions(*parts: Tensor) -> Tensor:
    """Return the positions of several calls, (batch, keys)."""
    return torch.cat(parts, 1)


@lru_cache(maxsize=64)
def subtract_positions(keys: Tensor, queries: Tensor) -> Tensor:
    """Return positions of keys less those of queries, (batch, 1, queries, keys)."""
    return (keys[:, None] - queries[..., None])[:, None]


StageFunction = Callable[["ForcedStage"], Tensor]
MOST_REMEMBERED = 1 << 24  # entries of all results that are kept


class Memory:
    """Results of pure functions of tensors, the last ones that were asked for.

    The models of a search share most weights and stages, so that most stages are computed once for
    all of them. Tensors are the same if they are the same object: none is changed in place.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Any, ...], Tensor] = OrderedDict()
        self._uses = Counter[int]()  # of tensors by id: arguments are kept as results are
        self._entries = 0

    def compute(self, function: Callable[..., Tensor], *arguments: Any, **options: Any) -> Tensor:
        """Return the function of these arguments, which are tensors, None or can be hashed."""
        key = (function, *arguments, *options.values())  # a tensor's hash is its identity
        result = self._kept.get(key)
        if result is not None:
            if 2 * self._entries > MOST_REMEMBERED:  # else none will leave soon
                self._kept.move_to_end(key)
            return result
        result = self._kept[key] = function(*arguments, **options)
        self._count(key, result, 1)
        while self._entries > MOST_REMEMBERED and len(self._kept) > 1:
            self._count(*self._kept.popitem(last=False), -1)
        return result

    def _count(self, key: tuple[Any, ...], result: Tensor, change: int) -> None:
        """Add one use of each tensor, or take one away, and count those that are in use."""
        for each in (*key, result):
            if isinstance(each, Tensor):
                before = self._uses[id(each)]
                self._uses[id(each)] = before + change
                if 0 in (before, before + change):
                    self._entries += change * each.numel()
                if before + change == 0:
                    del self._uses[id(each)]


@dataclass(frozen=True)
class AttentionModel:
    """Attention as data, which computes any stage from the recorded stages before it."""

    settings: AttentionSpec  # sizes, scale, rotation and the other settings, none of them open
    weights: State  # canonical tensors in float64 (`headwise.function.weights`)
    # Stage name -> the function that computes it in place of the usual one. It takes the
    # `ForcedStage` stage, whose ``usual()`` is the usual result.
    replaced: Mapping[str, StageFunction] = field(default_factory=dict)
    # The model of the stored weights, where the modules of a layer do more than multiply by them;
    # None where they do not.
    of_weights: AttentionModel | None = None
    # Results of stages, shared with the models that are made of this one.
    memory: Memory = field(default_factory=Memory, repr=False, compare=False)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The length of each axis of the weights, such as head_dim."""
        return sizes_of(self.weights)

    def projection(self, role: str) -> tuple[Any, Tensor | None]:
        """Return the weight and the bias of a projection, None for one that is absent."""
        name = KINDS[0][role]
        return self.weights.get(name), self.weights.get(bias_of(name))

    @property
    def token_widths(self) -> tuple[int, int]:
        """Widths of the tokens of queries, and of those of keys and values."""
        width = self.sizes["embed_dim"]
        return width, width if self.settings.compressed else self.sizes["source_dim"]

    @cached_property
    def stages(self) -> Mapping[str, Stage]:
        """The stages of the function by name, in order."""
        return stages_of(self.settings)

    def heads_and_width(self, stage: str) -> tuple[int, int]:
        """Return the number of heads of a stage before the output, and its channels."""
        role = self.stages[stage].role
        if self.settings.compressed is None or role in "ovg":
            heads, width = self.weights[KINDS[0][role]].shape[:2]
            return heads, width
        if role in "cr":
            return 1, len(self.weights[f"w{role}"])
        return len(self.weights[f"w{role}"]), self.sizes["head_dim"]

    @property
    def scales_values(self) -> bool:
        """True if more than weights stands between the projection of values and the output's."""
        names = {*STAGES["v"].tensors[2:], *STAGES["head outputs"].tensors}
        settings = self.settings.values, self.settings.output_norm, self.settings.clip
        return not names.isdisjoint(self.weights) or any(x is not ABSENT for x in settings)

    def with_settings(self, **changes: Any) -> AttentionModel:
        """Return the model with other settings; None is ABSENT."""
        stated: dict[str, Any] = {
            name: ABSENT if value is None else value for name, value in changes.items()
        }
        return replace(self, settings=replace(self.settings, **stated))

    def with_slopes(self, slopes: Tensor | None) -> AttentionModel:
        """Return the model with other slopes of ALiBi, (heads,), or None."""
        rule = None if slopes is None else AlibiRule(slopes=tuple(slopes.tolist()))
        return self.with_settings(score_bias=rule)

    def with_rotary(self, **changes: Any) -> AttentionModel:
        """Return the model with fields of its rotation changed."""
        assert self.settings.rotation is not None
        return self.with_settings(rotary=replace(self.settings.rotation, **changes))

    def with_weights(self, **changes: Tensor | None) -> AttentionModel:
        """Return the model with other weights; None removes one."""
        weights = {name: x for name, x in (self.weights | changes).items() if x is not None}
        return replace(self, weights=weights)

    def with_stage_function(self, stage: str, function: StageFunction) -> AttentionModel:
        """Return the model with another function for a stage, which may use the one before."""
        before = self.replaced.get(stage)

        def applied(forced: ForcedStage) -> Tensor:
            return function(forced if before is None else replace(forced, substitute=before))

        return replace(self, replaced={**self.replaced, stage: applied})

    def is_equal(self, other: AttentionModel) -> bool:
        """True if the settings and every tensor are equal, and no stage is replaced."""
        mine, theirs = self.weights, other.weights
        return (
            not self.replaced
            and not other.replaced
            and self.settings == other.settings
            and mine.keys() == theirs.keys()
            and all(torch.equal(x, theirs[name]) for name, x in mine.items())
        )

    def predict_stage(self, stage: str, call: RecordedCall) -> Tensor:
        """Return a stage of the call, computed from the recorded stages before it."""
        return self.prepare_stage(stage, call).result

    def prepare_stage(self, stage: str, call: RecordedCall) -> ForcedStage:
        """Return a stage of the call, to be computed from the recorded stages before it."""
        recorded = {**call.stages}
        recorded.pop(stage, None)
        return ForcedStage(self, call.with_stages(recorded), stage)

    def predict_all_stages(self, call: RecordedCall) -> dict[str, Tensor]:
        """Return every stage of the call, computed from its inputs alone."""
        for stage in self.stages:
            call = call.with_stages({**call.stages, stage: self.predict_stage(stage, call)})
        return dict(call.stages)

    def predict_in_dtype(self, stage: str, call: RecordedCall, dtype: torch.dtype) -> Tensor:
        """Return a stage of the call by plain torch in a dtype, computed from its inputs alone.

        A stage that is replaced is computed in float64, and rounded.
        """
        narrow = replace(self, weights={name: x.to(dtype) for name, x in self.weights.items()})
        call = replace(call, stages={})
        for each in self.stages:
            is_exact = each in self.replaced
            model, kind = (self, torch.float64) if is_exact else (narrow, dtype)
            result = model.predict_stage(each, call.cast(kind)).to(dtype)
            call = call.with_stages({**call.stages, each: result})
            if each == stage:
                break
        return result


@dataclass(frozen=True)
class ForcedStage:
    """A stage of a model that is computed from the recorded stages of a call.

    Recorded stages come from the layer that is examined. A stage that was not recorded is computed
    by the model.
    """

    model: AttentionModel
    call: RecordedCall
    stage: str
    substitute: StageFunction | None = None

    @cached_property
    def settings(self) -> AttentionSpec:
        """The settings of the model."""
        return self.model.settings

    # ---- what the formula of the stage reads (`headwise.function.records.Given`) ----------------

    @cached_property
    def record(self) -> Stage:
        """The record of the stage."""
        return self.model.stages[self.stage]

    @property
    def role(self) -> str:
        """Whose heads the stage has."""
        return self.record.role

    @property
    def tensors(self) -> list[Tensor | None]:
        """The weights of the stage, None for one that is absent."""
        return [*map(self.model.weights.get, self.record.tensors)]

    @property
    def parts(self) -> list[Tensor]:
        """The stages before it; keys and values of all calls."""
        record = self.record
        parts = [*map(self.__getitem__, record.before)]
        if record.cached and self.call.earlier:
            parts[record.before.index(record.cached)] = self.of_all_calls(record.cached)
        return parts

    @property
    def tokens(self) -> Tensor:
        """The input of the heads."""
        inputs = self.call.inputs
        return inputs.key_source if self.record.role in "kvcr" else inputs.x

    @property
    def positions(self) -> Tensor:
        """Positions of the tokens, (batch, length)."""
        return (
            self.call.new_key_positions if self.record.role in "kvcr" else self.call.query_positions
        )

    @property
    def key_positions(self) -> Tensor:
        """Positions of all keys, (batch, keys)."""
        return self.call.key_positions

    @property
    def distances(self) -> Tensor:
        """Positions of keys less those of queries, (batch, 1, queries, keys)."""
        return key_query_distances(self.call)

    @property
    def mask(self) -> Tensor | None:
        """The caller's mask."""
        return self.call.inputs.mask

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the arithmetic that was recorded."""
        return self.call.dtype

    @property
    def compute(self) -> Callable[..., Tensor]:
        """The memory of the model."""
        return self.model.memory.compute

    def at(self, stage: str) -> ForcedStage:
        """Return another stage of the call."""
        return replace(self, stage=stage)

    def with_inputs(self, **changes: Any) -> ForcedStage:
        """Return the stage of a call with other inputs."""
        inputs = replace(self.call.inputs, **changes)
        return replace(self, call=replace(self.call, inputs=inputs))

    @cached_property
    def result(self) -> Tensor:
        """The stage."""
        function = self.model.replaced.get(self.stage)
        return self.usual_result() if function is None else function(self)

    def usual_result(self) -> Tensor:
        """Return the stage by the usual function."""
        if self.substitute is not None:
            return self.substitute(replace(self, substitute=None))
        return self.record.compute(self)

    def __getitem__(self, stage: str) -> Tensor:
        """Return an earlier stage: as recorded, or else computed by the model."""
        if stage in self.call.stages:
            return self.call.stages[stage]
        return ForcedStage(self.model, self.call, stage).result

    def of_all_calls(self, stage: str) -> Tensor:
        """Return keys or values of earlier calls and of this one, (batch, kv_heads, keys, ...)."""
        if not self.call.earlier:
            return self[stage]
        calls = [*self.call.earlier, self.call]
        parts = tuple(ForcedStage(self.model, call, stage)[stage] for call in calls)
        return self.model.memory.compute(torch.cat, parts, 2)


def visible_keys(forced: ForcedStage) -> Tensor:
    """Return True where a query may attend, (batch, 1 or heads, queries, keys)."""
    call = forced.call
    return visible_by_distance(forced.settings, key_query_distances(call), call.inputs.mask)


def key_query_distances(call: RecordedCall) -> Tensor:
    """Return position of the key less that of the query, (batch, 1, queries, keys)."""
    return subtract_positions(call.key_positions, call.query_positions)
