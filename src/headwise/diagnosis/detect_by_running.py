"""Detection of a layout by running a model that has the same weights.

What the model computes is watched, layer by layer: its scores, its values, and each head's part of
the output projection. A layout is the right one if a layer made with it, from the model's own
inputs, computes the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.attention_matrix import AttentionMatrix
from headwise.checkpoints.config import rotary_config
from headwise.checkpoints.config_check import attention_options, layout_in_layer
from headwise.diagnosis.candidate_layouts import CandidateLayout, heads_of
from headwise.diagnosis.detection_result import Detection, decided
from headwise.error_budget.budget import Budget
from headwise.errors import HeadwiseError, OptionError, UndecidedError
from headwise.layers.native.attention import Attention
from headwise.layouts.attention_spec import AttentionSpec
from headwise.layouts.axis_sizes import Sizes
from headwise.layouts.layout import Layout
from headwise.layouts.module_names import NamedModule
from headwise.reference import share_heads, split_heads
from headwise.scanning.capture import capture_attention
from headwise.scanning.captured_call import CapturedCall
from headwise.support.module_modes import evaluating


@dataclass(frozen=True, eq=False)
class FirstCall:
    """The first attention call of one module of a model.

    Attributes:
        module: which.
        name: of it in the model.
        x: what it was given.
        scores: (batch, heads, queries, keys): scale * q.k in float64, before masks and softcaps.
        values: what is attended to, in float64.
        out_proj: each head's part of the output projection; None where it was not found.
        is_capped: whether the scores have a softcap.
    """

    module: nn.Module
    name: str
    x: Tensor
    scores: Tensor
    values: Tensor
    out_proj: Tensor | None
    is_capped: bool

    @property
    def is_of_sequences(self) -> bool:
        """Whether it was given the (batch, length, embed_dim) that attends to itself.

        Layers that cut pictures into windows, or join sequences, are given something else.
        """
        batch, _, queries, keys = self.scores.shape
        return self.x.dim() == 3 and self.x.shape[:2] == (batch, queries) and queries == keys


def seen_in(model: nn.Module, inputs: Mapping[str, Any]) -> list[FirstCall]:
    """The modules of a model that attend to what they are given, in the order in which they run."""
    found: dict[nn.Module, FirstCall] = {}

    def on_complete(call: CapturedCall) -> None:
        if call.module is None or call.is_cross or call.module in found:
            return
        if call.state is None or call.values is None:
            return
        found[call.module] = FirstCall(
            module=call.module,
            name=call.layer,
            x=call.state,
            scores=scores_of(call.matrix),
            values=call.values.double(),
            out_proj=call.out_proj,
            is_capped=call.matrix.softcap is not None,
        )

    with (
        torch.no_grad(),
        evaluating(model),
        capture_attention(model, on_complete=on_complete) as reach,
    ):
        reach.begin()
        model(**inputs)
    return list(found.values())


def scores_of(matrix: AttentionMatrix) -> Tensor:
    """scale * q.k in float64."""
    q, k = matrix.q.double(), matrix.k.double()
    return matrix.scale * q @ share_heads(k, heads=q.shape[1]).mT


def paired(
    modules: Iterable[NamedModule], seen: Iterable[FirstCall], state: Mapping[str, Tensor]
) -> list[tuple[NamedModule, FirstCall]]:
    """The modules of a checkpoint with those of the model that hold the same matrices.

    Where none does, the weights are others or in another layout: then the names tell, and else the
    order, if there are as many of both. What attends to something else has no pair, and neither
    have the parts of a model that did not run.
    """
    left, waiting, pairs = list(seen), [], []
    for module in modules:
        own = _that_holds([state[name] for name in module.tensors], left)
        if own is None:
            waiting.append(module)
        else:
            left.remove(own)
            pairs.append((module, own))
    for module in list(waiting):
        own = next((one for one in left if _is_named(one, module)), None)
        if own is not None:
            left.remove(own)
            waiting.remove(module)
            pairs.append((module, own))
    if not pairs and len(waiting) == len(left):
        return list(zip(waiting, left, strict=True))
    return pairs


def _that_holds(tensors: Iterable[Tensor], among: Iterable[FirstCall]) -> FirstCall | None:
    """The one that shares most matrices with these tensors: some may be the same everywhere."""
    matrices = [x for x in tensors if x.dim() > 1]
    shared = {
        one: sum(any(_is_equal(x, own) for own in one.module.parameters()) for x in matrices)
        for one in among
    }
    most = max(shared.values(), default=0)
    return next((one for one, count in shared.items() if count == most), None) if most else None


def _is_equal(x: Tensor, parameter: Tensor) -> bool:
    if x.shape != parameter.shape:
        return False
    # Most differ in the first row; the whole of a large file is read once only.
    return torch.equal(x[0].to(parameter.dtype), parameter[0]) and torch.equal(
        x.to(parameter.dtype), parameter
    )


def _is_named(seen: FirstCall, module: NamedModule) -> bool:
    """Whether one's name is within the other's: a base model's lack what stands in front."""
    one, other = f".{seen.name}.", "." + module.prefix.rstrip("./") + "."
    return module.prefix != "" and (one in other or other in one)


SCORES, VALUES = "scores", "values"
INSTEAD = "compare values instead: --reference, the same weights in a layout that is known"


class NotComparedError(NamedTuple):
    """Why a candidate and the model could not be compared: as in an error."""

    saw: str
    needed: str


def by_behaviour(
    detection: Detection,
    state: Mapping[str, Tensor],
    model: nn.Module,
    inputs: Mapping[str, Any],
    config: Mapping[str, Any],
) -> Detection:
    """The candidates whose layers compute what the model's do.

    Args:
        detection: by names and shapes.
        state: the tensors of the checkpoint.
        model: with the same weights.
        inputs: what it is called with; at least some tens of tokens.
        config: of the model: the numbers of rotations and norms.

    Raises:
        OptionError: the model has no self-attention that could be seen.
        UndecidedError: no candidate agrees, and one could not be compared: none of its modules was
            seen, or there is no counterpart here of how the model rotates.
    """
    seen = seen_in(model, inputs)
    if not seen:
        raise OptionError(
            saw="a model in which no self-attention was seen",
            needed="one that headwise scan can look into",
            do=INSTEAD,
        )
    kept, refuted = [], dict(detection.refuted)
    uncompared: list[tuple[tuple[CandidateLayout, ...], NotComparedError]] = []
    for group in detection.candidates:
        trial = _Trial(group[0], state, seen, config)
        found = trial.verdict()
        if isinstance(found, NotComparedError):
            uncompared.append((group, found))
        elif isinstance(found, str):
            refuted |= {one.layout.name: found for one in group}
        else:
            kept.append(tuple(trial.confirmed(one.narrowed(found)) for one in group))
    for group, why in uncompared:
        if not kept:
            raise UndecidedError(
                saw=f"{' = '.join(one.layout.name for one in group)}, which could not be compared "
                f"with the model: {why.saw}",
                needed=why.needed,
                do=INSTEAD,
            )
        refuted |= {one.layout.name: f"not compared: {why.saw}" for one in group}
    return decided(detection, kept, refuted, by="behaviour")


@dataclass(frozen=True, eq=False)
class _Trial:
    """One candidate beside what was seen of the model."""

    candidate: CandidateLayout
    state: Mapping[str, Tensor]
    seen: list[FirstCall]
    config: Mapping[str, Any]

    @cached_property
    def pairs(self) -> list[tuple[NamedModule, FirstCall]]:
        modules = [one for one in self.candidate.modules if one.place.role != "cross"]
        pairs = paired(modules, self.seen, self.state)
        return [(module, own) for module, own in pairs if own.is_of_sequences]

    def verdict(self) -> Sizes | str | NotComparedError:
        """The sizes with which it agrees; else why it differs, or why it cannot be compared."""
        first = self.candidate.modules[0]
        heads = next((own.scores.shape[1] for module, own in self.pairs if module is first), None)
        fits = [fit for fit in self.candidate.fits if heads in (None, fit["heads"])]
        found = [(fit, self._outcome(fit)) for fit in fits]
        agreeing = [fit for fit, outcome in found if outcome is None]
        if agreeing:
            return agreeing[0]
        others = [outcome for _, outcome in found if outcome is not None]
        uncompared = (outcome for outcome in others if isinstance(outcome, NotComparedError))
        return next(uncompared, others[0] if others else f"the model has {heads} heads")

    def confirmed(self, one: CandidateLayout) -> CandidateLayout:
        """The candidate, or another one of the same map, with what speaks for it."""
        compared = f"behaviour: {len(self.pairs)} of {len(one.modules)} modules compared, alike"
        return replace(one, reasons=(*one.reasons, compared))

    def _outcome(self, sizes: Sizes) -> str | NotComparedError | None:
        """What the first layer that differs differs in, or why one cannot be compared."""
        if not self.pairs:
            return NotComparedError(
                saw=f"none of its {len(self.candidate.modules)} modules is one of the "
                f"{sum(one.is_of_sequences for one in self.seen)} that attend to whole sequences",
                needed="the same weights, in layers that are given (batch, length, embed_dim)",
            )
        try:
            found = (self._difference(module, seen, sizes) for module, seen in self.pairs)
            return next((why for why in found if why is not None), None)
        except HeadwiseError as error:
            return NotComparedError(error.saw, error.needed)

    def _difference(
        self, module: NamedModule, seen: FirstCall, sizes: Sizes
    ) -> str | NotComparedError | None:
        layout = _asked(self.candidate.layout, self.config, module.layer)
        layer = self._layer(layout, module, _heads(seen, sizes))
        part = _part(layer, self.candidate.layout.function, seen)
        why = self._unknown_places(layout, module) if part == SCORES else None
        if part is None or why is not None:
            return why
        return f"{module.prefix}: {part} are others than the model's"

    def _unknown_places(self, layout: Layout, module: NamedModule) -> NotComparedError | None:
        """Other scores say nothing where nobody says how places are told apart."""
        rotary, said = layout.function.rotary, rotary_config(self.config, module.layer)
        if rotary is None:
            return NotComparedError(
                saw="other scores, where neither the layout nor the config says whether it rotates",
                needed="a layout that says it, or rope_parameters in the config",
            )
        if rotary != "none" and ("patch_size" in self.config or "mrope_section" in said):
            return NotComparedError(
                saw="other scores of a model that sees pictures, and rotates",
                needed="a rotation by the place in a sequence: this may go by row and column",
            )
        return None

    def _layer(self, layout: Layout, module: NamedModule, heads: Sizes) -> Attention:
        return Attention.from_layout(
            {
                local: self.state[name].double()
                for name, local in module.tensors.items()
                if layout.patterns[local].tensors != ("distances",)  # added to scores: see _asked
            },
            layout=layout,
            num_heads=heads["heads"],
            num_kv_heads=heads["kv_heads"],
            **attention_options(self.config, layout.function, layer=module.layer),
        )


def _heads(seen: FirstCall, sizes: Sizes) -> Sizes:
    """As many as were seen: another tower may have others than the first module."""
    found, (heads, kv_heads) = seen.scores.shape[1], heads_of(sizes)
    return {"heads": found, "kv_heads": max(1, kv_heads * found // heads)}


def _asked(layout: Layout, config: Mapping[str, Any], number: int) -> Layout:
    """The layout as one layer has it, less what is done to scores that are there."""
    layout = layout_in_layer(layout, config, number)
    bare = replace(layout.function, score_bias="none", softcap="none", window="none", clip="none")
    return replace(layout, function=bare)


@torch.no_grad()
def _part(layer: Attention, said: AttentionSpec, seen: FirstCall) -> str | None:
    """Which part of a layer differs by more than rounding in the model's own dtype."""
    if said.softcap is not None and (said.softcap != "none") != seen.is_capped:
        return "softcaps"
    if seen.out_proj is not None:
        heads = layer.out_proj.weight.mT.unflatten(0, (layer.num_heads, layer.value_dim))
        if not torch.equal(heads.to(seen.out_proj.dtype), seen.out_proj):
            return "output projections"
    # transformers rotates and normalises in float32, also where all else is float64.
    x = seen.x.float() if seen.x.dtype == torch.float64 else seen.x
    rounded = deepcopy(layer).to(x.dtype)

    def in_dtype_of(x: Tensor) -> Attention:
        return layer if x.dtype == torch.float64 else rounded

    def scores(x: Tensor) -> Tensor:
        return scores_of(in_dtype_of(x).matrix(x))

    def values(x: Tensor) -> Tensor:
        found = split_heads(in_dtype_of(x).v_proj(x), heads=layer.num_kv_heads)
        return share_heads(found, heads=seen.values.shape[1])  # some models repeat theirs first

    for part, ours, theirs in ((SCORES, scores, seen.scores), (VALUES, values, seen.values)):
        budget = Budget.of(ours, x)
        if budget.exact.shape != theirs.shape or not budget.check(theirs):
            return part
    return None
