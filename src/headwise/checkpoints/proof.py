"""Proof of a loaded attention: it runs beside its own class of transformers, on several probes.

A probe is an input of the model. The class gets from its model what it always gets: positions,
masks, tables. The layer gets the input of the class's projections, and a mask of its own. Both run
in float64, on the stored weights; those that are constant, such as biases of 0, are random.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.checkpoints.inputs import LONG, list_coordinates, list_inputs, list_runs, read_given
from headwise.checkpoints.skeleton import COSTLY, ClassCall, NotRunError, Skeleton, build_skeleton
from headwise.errors import OptionError
from headwise.function.rotary import Rotary
from headwise.function.rounding import (
    allow_two_runs,
    default_tolerance,
    move_number,
    relative_difference_norm,
)
from headwise.layers.attention import Attention
from headwise.layers.latent import compress_source
from headwise.masks.mask import Mask

# Settings that act far out, with the numbers that they have in a copy of the config.
FAR = re.compile(r"window|chunk|local_attention|original_max_position|floor_scale")
# Numbers of a config that are no part of a function of one layer.
NO_FUNCTION = re.compile(
    r"_ids?$|vocab|cross_attention|layers|init|dropout|cache|version|return|output"
)
NEAR, NEAR_ORIGINAL = 6, 32
FEWEST = 3  # tokens of a caller's input
Run = Callable[[Attention, Tensor], Tensor]


@dataclass(frozen=True)
class Proof:
    """Outcome of a proof.

    Attributes:
        against: the class of transformers.
        probes: the number of inputs.
        tokens: of the longest.
        reason: why there is no proof; "" for a proof.
        has_value_source: True if values had an input of their own: a call needs ``value_source``.
        behind: modules of the class through which inputs of a call have gone before.
    """

    against: str = ""
    probes: int = 0
    tokens: int = 0
    reason: str = ""
    has_value_source: bool = False
    behind: Sequence[str] = ()

    def __str__(self) -> str:
        if self.reason:
            return f"not proved: {self.reason}"
        more = f", on inputs from behind {', '.join(self.behind)}" if self.behind else ""
        more += ", with value_source=" if self.has_value_source else ""
        return (
            f"proved against {self.against}, {self.probes} probes, up to {self.tokens} tokens{more}"
        )


@dataclass(frozen=True, eq=False)
class Probe:
    """One input of a model, with what its attention made of it.

    Attributes:
        name: of the input, in words.
        config: of the model that ran.
        call: that of the attention.
        real: (batch, tokens), False for padding; None for none.
        is_near: True if settings that act far out act near in the config.
        positions: of the tokens, as the model got them; None where it counts them.
    """

    name: str
    config: Mapping[str, Any]
    call: ClassCall
    real: Tensor | None = None
    is_near: bool = False
    positions: Tensor | None = None

    def require_tokens(self) -> None:
        """Raise NotRunError for so few tokens that scores or positions do not show."""
        x, source = self.call.x, self.call.source
        fewest = min(x.shape[1], (x if source is None else source).shape[1])
        if fewest < FEWEST:
            raise NotRunError(
                f"{self.name} have {fewest} tokens where they reach the attention; a proof needs "
                f"{FEWEST} queries and keys"
            )

    def find_parted_stage(self, layer: Attention) -> str | None:
        """Return the first stage in which the layer parts from the class; None if it is equal.

        The layer gets the mask of the class, which hides later keys or not, and padding or not:
        some classes do not hide it, and some are causal only beside padding.
        """
        first: str | None = None
        for mask, positions in product(self._list_masks(), self._list_positions(layer)):
            if (parted := self._find_parted_stage(layer, mask, positions)) is None:
                return None
            first = first or parted
        return first

    def _list_masks(self) -> Iterator[Mask]:
        x, source = self.call.x, self.call.source
        keys = (x if source is None else source).shape[1]
        shown = torch.ones(x.shape[0], x.shape[1], keys, dtype=torch.bool)
        if (images := self.call.images) is not None and source is None:
            shown &= images[:, None] == images  # of one row, which do not see each other
        every = [shown]
        if self.real is not None and self.real.shape[1] == keys:
            every = [shown & self.real[:, None], shown]
        for allowed in every:
            for each in [allowed.tril(), allowed] if source is None else [allowed]:
                yield Mask.may_attend(each, axes="batch queries keys")

    def _list_positions(self, layer: Attention) -> list[Tensor | None]:
        """Return the positions that a layer gets; some classes count columns whatever they got."""
        if layer.rotary is not None and layer.rotary.axis_count > 1 and self.call.turn is not None:
            return [self.call.turn.positions(*self.call.x.shape[:2])]
        if self.positions is None or not layer.takes_positions:
            return [None]
        return [self.positions] if self.positions.dim() == 3 else [self.positions, None]

    @torch.no_grad()
    def _find_parted_stage(
        self, layer: Attention, mask: Mask, positions: Tensor | None
    ) -> str | None:
        sources: Any = {"source": self.call.source, "value_source": self.call.value_source}
        sources = {name: y for name, y in sources.items() if y is not None}

        def give(x: Tensor) -> dict[str, Any]:
            of_x = {name: y.to(x.dtype) for name, y in sources.items()}
            return {"mask": mask, "positions": positions} | of_x

        if self._is_equal("output", layer, lambda m, x: m(x, **give(x))):
            return None

        def run_values(m: Attention, x: Tensor) -> Tensor:
            source = [x, *sources.values()][-1].to(x.dtype)
            values: Tensor = m.v_proj(compress_source(m, source))
            return values

        def run_heads(m: Attention, x: Tensor) -> Tensor:
            return m.head_outputs(x, **give(x)).transpose(1, 2).flatten(2)

        stages = {"v": run_values, "head outputs": run_heads}
        parted = (name for name, run in stages.items() if not self._is_equal(name, layer, run))
        return next(parted, "output")

    def _is_equal(self, stage: str, layer: Attention, run: Run) -> bool:
        theirs = self.call.stages.get(stage)
        if theirs is None:
            return True
        gap = self._measure_gap(stage, theirs, run(layer, self.call.x))
        if gap <= default_tolerance(torch.float64):
            return True
        if layer.rotary is not None:
            wide = self._measure_gap(stage, theirs, run(_with_wide_frequencies(layer), self.call.x))
            if wide <= default_tolerance(torch.float64):
                return True
        allowed = 0.0
        if layer.rotary is not None and layer.rotary.theta not in list_numbers(self.config):
            allowed += _rotation_tolerance(layer, layer.rotary, self.call.x, run)
        if self.call.is_narrow:
            allowed += _narrow_tolerance(layer, self.call.x, run)
        return gap <= allowed

    def _measure_gap(self, stage: str, theirs: Tensor, mine: Tensor) -> float:
        if self.real is not None and stage != "v" and self.real.shape == mine.shape[:2]:
            mine, theirs = mine[self.real], theirs[self.real]
        if not theirs.isfinite().all() or not theirs.any():
            return torch.inf  # zeros, NaN and infinities would be equal whatever the layer is
        return relative_difference_norm(mine, theirs)


def list_numbers(config: Mapping[str, Any]) -> Iterator[float]:
    """Yield the numbers of a config and of its parts."""
    for value in config.values():
        if isinstance(value, Mapping):
            yield from list_numbers(value)
        elif isinstance(value, int | float):
            yield value


class _WideRotary(Rotary):
    """Rotation by frequencies in float64, as those of a class that computes them in each call."""

    def frequencies(
        self, head_dim: int, *, device: torch.device | str = "cpu", length: Tensor | None = None
    ) -> Tensor:
        """Return the angle of each pair for one token, in radians, (pairs,), float64."""
        options: Any = {"device": device, "length": length, "dtype": torch.float64}
        return self._frequencies(head_dim, **options)


def _with_wide_frequencies(layer: Attention) -> Attention:
    wide = copy(layer)
    if layer.rotary is not None:
        wide.rotary = _WideRotary(**vars(layer.rotary))
    return wide


def _rotation_tolerance(layer: Attention, rotary: Rotary, x: Tensor, run: Run) -> float:
    """Return how far float32 moves frequencies of a theta that is computed from the config's."""
    moved = copy(layer)
    moved.rotary = replace(rotary, theta=move_number(rotary.theta, torch.float32))
    return relative_difference_norm(run(moved, x), run(layer, x))


def _narrow_tolerance(layer: Attention, x: Tensor, run: Run) -> float:
    """Return how far two runs may part of which one has steps in float32, as `allow_two_runs`."""
    names, weights = zip(*layer.named_parameters(), strict=True)

    def compute(x: Tensor, *weights: Tensor) -> Tensor:
        state = {f"layer.{n}": w for n, w in zip(names, weights, strict=True)}
        result: Tensor = torch.func.functional_call(_Run(layer, run), state, (x,))
        return result

    exact, allowed = allow_two_runs(compute, x, *weights, dtype=torch.float32)
    return float(allowed.norm() / exact.norm())


class _Run(nn.Module):
    def __init__(self, layer: Attention, run: Run) -> None:
        super().__init__()
        self.layer, self.run = layer, run

    def forward(self, x: Tensor) -> Tensor:
        """Return a stage of the layer."""
        return self.run(self.layer, x)


# ---- probes -------------------------------------------------------------------------------------


def shrink_far_settings(values: Mapping[str, Any], given: Collection[str] = ()) -> dict[str, Any]:
    """Return a config in which settings that act far out act within a few tokens, in their order.

    Those of the options that a caller has ``given`` stay: "rotary" or "window". The smallest one
    has `NEAR`, larger ones four times that: a class may divide one by another. The window of a
    tower may be in pixels: it then has two patches on each side, as merged.
    """
    return _shrink(values, given, min(_list_far_windows(values), default=0))


def _list_far_windows(values: Mapping[str, Any]) -> Iterator[int]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _list_far_windows(value)
        elif _is_far(name, value) and "original" not in str(name):
            yield value


def _is_far(name: str, value: Any) -> bool:
    return isinstance(value, int) and value > LONG // 2 and FAR.search(str(name)) is not None


def _shrink(values: Mapping[str, Any], given: Collection[str], smallest: int) -> dict[str, Any]:
    near: dict[str, Any] = {}
    patch, merged = values.get("patch_size"), values.get("spatial_merge_size")
    for name, value in values.items():
        number, option = NEAR if value == smallest else 4 * NEAR, "window"
        if "original" in str(name):
            number, option = NEAR_ORIGINAL, "rotary"
        elif isinstance(patch, int):
            number = 2 * patch * (merged if isinstance(merged, int) else 1)
        if isinstance(value, Mapping):
            near[name] = _shrink(value, given, smallest)
        elif _is_far(name, value):
            near[name] = value if option in given else min(value, number)
        else:
            near[name] = value
    return near


@dataclass(frozen=True, eq=False)
class ProbedClass:
    """A class of transformers with the tensors of one attention; see `build_skeleton`.

    Attributes:
        tensors: by their stored names.
        roles: the name of a tensor of each projection.
        code: the folder of the class, None for one of transformers.
        given: options of the caller, see `shrink_far_settings`.
        inputs: the caller's for the model, one more probe; none if empty.
    """

    tensors: Mapping[str, Tensor]
    roles: Mapping[str, str]
    code: Path | None
    given: Collection[str]
    inputs: Mapping[str, Any] = field(default_factory=dict)

    def record_all(self, config: Mapping[str, Any]) -> tuple[list[Probe], Skeleton]:
        """Run the class on all probes; return them with the model, without its parameters.

        Raises:
            NotRunError: the class cannot be built here, or runs on no probe.
        """
        skeleton = build_skeleton(config, self.tensors, self.roles, self.code)
        probes = self._record(skeleton, is_near=False)
        skeleton.drop_parameters()  # before another model takes as much memory
        if (near := shrink_far_settings(config, self.given)) != dict(config):
            changed = build_skeleton(near, self.tensors, self.roles, self.code)
            probes += self._record(changed, is_near=True)
        return probes, skeleton

    def list_live_fields(
        self, config: Mapping[str, Any], probe: Probe, is_read: Callable[[Mapping[str, Any]], bool]
    ) -> list[str]:
        """Return the fields of a config that change the output of a probe, and that nobody reads.

        A field that changes the input of the attention says nothing of the attention.
        """
        fields = []
        if sum(x.numel() for x in self.tensors.values()) > COSTLY:
            return []
        for name, changed in _vary_fields(config):
            if is_read(changed):
                continue
            near = shrink_far_settings(changed, self.given) if probe.is_near else changed
            try:
                skeleton = build_skeleton(near, self.tensors, self.roles, self.code)
                others = self._record(skeleton, is_near=probe.is_near, only=probe.name)
            except (NotRunError, OptionError):
                continue
            x, y = probe.call.x, probe.call.stages["output"]
            calls = [other.call for other in others if torch.equal(other.call.x, x)]
            fields += [name for call in calls if not torch.equal(call.stages["output"], y)]
        return fields

    def _record(self, skeleton: Skeleton, *, is_near: bool, only: str = "") -> list[Probe]:
        """Return the probes of the caller's inputs, and of the first run that made-up ones fit."""
        suffix = ", with far settings near" if is_near else ""
        reasons: list[NotRunError] = []
        config = skeleton.config

        def record(run: Any, name: str, inputs: Mapping[str, Any], real: Tensor | None) -> Probe:
            call = skeleton.call(run, inputs)
            positions = inputs.get("position_ids")
            if "pixel_values" in inputs:
                positions = list_coordinates(config, inputs["pixel_values"], call.x)
            return Probe(f"{name}{suffix}", config, call, real, is_near, positions)

        given = [record(skeleton.owners[0], *read_given(self.inputs))] if self.inputs else []
        for each in given:
            each.require_tokens()
        given = [each for each in given if only in ("", each.name)]
        for run, is_mixed in list_runs(skeleton.owners):
            probes: list[Probe] = []
            failures: list[NotRunError] = []
            for group in list_inputs(run, is_large=skeleton.is_large, is_mixed=is_mixed):
                for name, inputs, real in () if probes and not failures else group:
                    if only not in ("", f"{name}{suffix}"):
                        continue
                    try:
                        probes.append(record(run, name, inputs, real))
                    except NotRunError as error:
                        failures += [] if "encoder_hidden_states" in inputs else [error]
            if probes:
                return given + probes
            reasons += failures
        kind = type(skeleton.model).__name__
        if not given:
            reason = reasons[0] if reasons else f"{kind} takes no input that headwise makes up"
            raise NotRunError(f"no made-up input runs: {reason}")
        return given


def _vary_fields(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each number of a config, with a config in which it is another one."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            for inner, changed in _vary_fields(value):
                yield f"{name}.{inner}", {**config, name: changed}
        elif NO_FUNCTION.search(str(name)):
            continue
        elif isinstance(value, bool):
            yield name, {**config, name: not value}
        elif isinstance(value, int | float):
            yield name, {**config, name: type(value)(2 * value) or 3}


# ---- tensors ------------------------------------------------------------------------------------


@dataclass(eq=False)
class StirredTensors(Mapping[str, Tensor]):
    """Tensors in float64 as they are read; those of one value, such as biases of 0, are random."""

    source: Mapping[str, Tensor]
    read: dict[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.read:
            x = self.source[name].double()
            if x.numel() > 1 and bool((x == x.flatten()[0]).all()):
                generator = torch.Generator().manual_seed(len(self.read))
                x = x + torch.randn(x.shape, generator=generator, dtype=x.dtype) / 8
            self.read[name] = x
        return self.read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)
