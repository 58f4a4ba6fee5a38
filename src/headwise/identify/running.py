"""Detection of a layout by running a model that has the same weights.

The scores, the values and each head's part of the output projection are captured in every layer of
the model. A layout fits if a layer made with it computes the same from the same inputs.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.checkpoints.config import layout_in_layer, resolve, rotary_section_of_layer
from headwise.errors import HeadwiseError, OptionError, UndecidedError
from headwise.function.budget import Budget
from headwise.function.spec import ABSENT, FROM_CONFIG, AttentionSpec
from headwise.function.stages import repeat_kv_heads, scaled_products, split_heads
from headwise.identify.candidates import CandidateLayout, LayoutGroup, query_and_kv_head_counts
from headwise.layers.attention import Attention
from headwise.layers.conversion import options_of_spec
from headwise.layers.latent import compress_source
from headwise.layouts._layout import Layout
from headwise.layouts.modules import NamedModule
from headwise.layouts.pattern import Sizes
from headwise.matrix.operator import AttentionMatrix
from headwise.scanning.call import CapturedCall
from headwise.scanning.inputs import require_finite_parameters
from headwise.scanning.record import record_attention


def record_first_calls(model: nn.Module, inputs: Mapping[str, Any]) -> list[CapturedCall]:
    """Return the first call of each self-attention module of a model, in the order of the run."""
    calls: dict[nn.Module, CapturedCall] = {}

    def on_complete(call: CapturedCall) -> None:
        is_known = call.state is not None and call.values is not None
        if call.module is not None and not call.is_cross and is_known:
            calls.setdefault(call.module, call)

    require_finite_parameters(model)  # NaN agrees with nothing
    with record_attention(model, on_complete=on_complete) as recorder:
        recorder.begin_input()
        model(**inputs)
    return list(calls.values())


def is_over_sequences(call: CapturedCall) -> bool:
    """True if the input is (batch, length, embed_dim) and its tokens attend to each other.

    Layers that cut pictures into windows, or join sequences, have other inputs.
    """
    assert call.state is not None
    batch, _, queries, keys = call.matrix.shape
    is_of_tokens = call.state.dim() == 3 and call.state.shape[:2] == (batch, queries)
    return is_of_tokens and queries == keys


def compute_scaled_scores(matrix: AttentionMatrix) -> Tensor:
    """Return scale * q.k in float64, before masks and softcaps."""
    q, k = matrix.q.double(), matrix.k.double()
    return scaled_products(q, k, scale=matrix.scale, softcap=None)


def pair_modules(
    modules: Iterable[NamedModule], calls: Iterable[CapturedCall], state: Mapping[str, Tensor]
) -> list[tuple[NamedModule, CapturedCall]]:
    """Pair the modules of a checkpoint with the calls of modules that hold the same matrices.

    A module with no equal matrices (other weights, or another layout) is paired by name. If there
    are no pairs at all, all are paired by order if there are as many modules as calls. Cross
    attention and modules that did not run have no pair.
    """
    unpaired, waiting, pairs = list(calls), [], []
    for module in modules:
        call = _find_call_sharing_most_matrices([state[name] for name in module.tensors], unpaired)
        if call is None:
            waiting.append(module)
        else:
            unpaired.remove(call)
            pairs.append((module, call))
    for module in list(waiting):
        name = f".{module.prefix.rstrip('./')}."
        # One name is part of the other: base models omit a prefix.
        similar = (c for c in unpaired if name in f".{c.layer}." or f".{c.layer}." in name)
        if module.prefix and (call := next(similar, None)) is not None:
            unpaired.remove(call)
            waiting.remove(module)
            pairs.append((module, call))
    if not pairs and len(waiting) == len(unpaired):
        return list(zip(waiting, unpaired, strict=True))
    return pairs


def _find_call_sharing_most_matrices(
    tensors: Iterable[Tensor], calls: Iterable[CapturedCall]
) -> CapturedCall | None:
    """Return the call whose module shares most matrices: some may be the same in all modules."""
    matrices = [x for x in tensors if x.dim() > 1]
    shared: dict[CapturedCall, int] = {}
    for call in calls:
        assert call.module is not None
        held = [*call.module.parameters()]
        shared[call] = sum(any(_is_equal_after_cast(x, p) for p in held) for x in matrices)
    most = max(shared.values(), default=0)
    return next((call for call, count in shared.items() if count == most), None) if most else None


def _is_equal_after_cast(x: Tensor, parameter: Tensor) -> bool:
    # Most matrices differ in the first row, so a large file is read as a whole only once.
    parts = ((x[0], parameter[0]), (x, parameter)) if x.shape == parameter.shape else ()
    return bool(parts) and all(torch.equal(mine.to(other.dtype), other) for mine, other in parts)


SCORES, VALUES = "scores", "values"
USE_REFERENCE = "compare values instead: --reference, the same weights in a known layout"


class NotComparedError(NamedTuple):
    """Reason why a candidate and the model cannot be compared, with the fields of an error."""

    saw: str
    needed: str


def compare_by_running(
    candidates: Iterable[LayoutGroup],
    state: Mapping[str, Tensor],
    model: nn.Module,
    inputs: Mapping[str, Any],
    config: Mapping[str, Any],
) -> tuple[list[LayoutGroup], dict[str, str]]:
    """Return the candidates whose layers compute the same as the model's, and why others do not.

    ``state`` holds the tensors of the checkpoint. The model has the same weights; its inputs hold
    at least some tens of tokens, and its config the numbers of rotations and norms.

    Raises:
        OptionError: no self-attention of the model could be captured.
        UndecidedError: no candidate agrees, and at least one could not be compared: none of its
            modules was captured, or headwise does not support the model's rotation.
    """
    if not (calls := record_first_calls(model, inputs)):
        raise OptionError(
            saw="a model in which no self-attention was seen",
            needed="a model whose attention headwise scan can capture",
            do=USE_REFERENCE,
        )
    groups: list[LayoutGroup] = []
    refuted: dict[str, str] = {}
    uncompared: list[tuple[LayoutGroup, NotComparedError]] = []
    for group in candidates:
        trial = _Trial(group[0], state, calls, config)
        verdict = trial.find_agreeing_sizes()
        if isinstance(verdict, NotComparedError):
            uncompared.append((group, verdict))
        elif isinstance(verdict, str):
            refuted |= {each.layout.name: verdict for each in group}
        else:
            count, modules = len(trial.pair_modules_with_calls), group[0].modules
            reason = f"behaviour: {count} of {len(modules)} modules compared, alike"
            sized = (each.with_sizes(verdict) for each in group)
            groups.append(tuple(replace(x, reasons=(*x.reasons, reason)) for x in sized))
    for group, why in uncompared:
        if not groups:
            raise UndecidedError(
                saw=f"{' = '.join(each.layout.name for each in group)}, which could not be "
                f"compared with the model: {why.saw}",
                needed=why.needed,
                do=USE_REFERENCE,
            )
        refuted |= {each.layout.name: f"not compared: {why.saw}" for each in group}
    return groups, refuted


@dataclass(frozen=True, eq=False)
class _Trial:
    candidate: CandidateLayout
    state: Mapping[str, Tensor]
    calls: list[CapturedCall]
    config: Mapping[str, Any]

    @cached_property
    def pair_modules_with_calls(self) -> list[tuple[NamedModule, CapturedCall]]:
        modules = [each for each in self.candidate.modules if each.place.role != "cross"]
        pairs = pair_modules(modules, self.calls, self.state)
        return [(module, call) for module, call in pairs if is_over_sequences(call)]

    def find_agreeing_sizes(self) -> Sizes | str | NotComparedError:
        first = self.candidate.modules[0]
        pairs = self.pair_modules_with_calls
        heads = next((call.matrix.shape[1] for module, call in pairs if module is first), None)
        fits = [fit for fit in self.candidate.fits if heads in (None, fit["heads"])]
        outcomes = [self._compare_with_sizes(fit) for fit in fits]
        if None in outcomes:
            return fits[outcomes.index(None)]
        differences = [outcome for outcome in outcomes if outcome is not None]
        uncompared = (each for each in differences if isinstance(each, NotComparedError))
        return next(uncompared, differences[0] if differences else f"the model has {heads} heads")

    def _compare_with_sizes(self, sizes: Sizes) -> str | NotComparedError | None:
        if not self.pair_modules_with_calls:
            number = sum(is_over_sequences(call) for call in self.calls)
            return NotComparedError(
                saw=f"none of its {len(self.candidate.modules)} modules is one of the {number} "
                "that attend to whole sequences",
                needed="the same weights, in layers whose input is (batch, length, embed_dim)",
            )
        try:
            outcomes = (
                self._find_difference(module, call, sizes)
                for module, call in self.pair_modules_with_calls
            )
            return next((outcome for outcome in outcomes if outcome is not None), None)
        except HeadwiseError as error:
            return NotComparedError(error.saw, error.needed)

    def _find_difference(
        self, module: NamedModule, call: CapturedCall, sizes: Sizes
    ) -> str | NotComparedError | None:
        layout = layout_in_layer(self.candidate.layout, self.config, module.layer)
        # Without the operations on finished scores.
        dropped: dict[str, Any] = dict.fromkeys(("score_bias", "softcap", "window", "clip"), ABSENT)
        layout = replace(layout, function=replace(layout.function, **dropped))
        # Head counts may differ between towers of a model.
        call_heads, (heads, kv_heads) = call.matrix.shape[1], query_and_kv_head_counts(sizes)
        counts = {"heads": call_heads, "kv_heads": max(1, kv_heads * call_heads // heads)}
        layer = self._build_layer(layout, module, counts)
        part = _find_differing_stage(layer, self.candidate.layout.function, call)
        why = self._describe_unknown_rotation(layout, module) if part == SCORES else None
        if part is None or why is not None:
            return why
        return f"{module.prefix}: {part} differ from the model's"

    def _describe_unknown_rotation(
        self, layout: Layout, module: NamedModule
    ) -> NotComparedError | None:
        rotary = layout.function.rotary
        rotation = rotary_section_of_layer(self.config, module.layer)
        if rotary is FROM_CONFIG:
            return NotComparedError(
                saw="different scores: neither the layout nor the config says whether it rotates",
                needed="a layout with a rotation, or rope_parameters in the config",
            )
        if rotary is not ABSENT and ("patch_size" in self.config or "mrope_section" in rotation):
            return NotComparedError(
                saw="different scores of a vision model that rotates",
                needed="a rotation by token position: this model may rotate by row and column",
            )
        return None

    def _build_layer(self, layout: Layout, module: NamedModule, heads: Sizes) -> Attention:
        spec = resolve(layout.function, self.config, layer=module.layer)
        return Attention.from_layout(
            {
                local: self.state[name].double()
                for name, local in module.tensors.items()
                # A distance bias is added to the scores, which are compared without it.
                if layout.patterns[local].tensors != ("distances",)
            },
            layout=layout,
            num_heads=heads["heads"],
            num_kv_heads=heads["kv_heads"],
            **options_of_spec(spec),
        )


@torch.no_grad()
def _find_differing_stage(layer: Attention, spec: AttentionSpec, call: CapturedCall) -> str | None:
    if spec.softcap is not FROM_CONFIG and (spec.softcap is not ABSENT) != (
        call.matrix.softcap is not None
    ):
        return "softcaps"
    if call.out_proj is not None:
        heads = layer.out_proj.weight.mT.unflatten(0, (layer.num_heads, layer.value_dim))
        if not torch.equal(heads.to(call.out_proj.dtype), call.out_proj):
            return "output projections"
    # transformers rotates and normalises in float32, even if all else is float64.
    assert call.state is not None
    assert call.values is not None
    x = call.state.float() if call.state.dtype == torch.float64 else call.state
    rounded = deepcopy(layer).to(x.dtype)

    theirs = {SCORES: compute_scaled_scores(call.matrix), VALUES: call.values.double()}

    def compute(stage: str, x: Tensor) -> Tensor:
        run = layer if x.dtype == torch.float64 else rounded
        if stage == SCORES:
            return compute_scaled_scores(run.matrix(x))
        v = split_heads(run.v_proj(compress_source(run, x)), heads=layer.num_kv_heads)
        return repeat_kv_heads(v, heads=theirs[VALUES].shape[1])  # some models repeat theirs first

    for stage, recorded in theirs.items():
        budget = Budget.for_function(partial(compute, stage), x)
        if budget.exact.shape != recorded.shape or not budget.check(recorded):
            return stage
    return None
