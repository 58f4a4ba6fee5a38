"""Layers of headwise and torch, and the attention modules of a model, as data."""

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from headwise.checkpoints.config import window_sides
from headwise.checkpoints.places import Place, find_model_places, is_same_branch
from headwise.diagnosis.simulation.model import AttentionModel, Inputs, RecordedCall
from headwise.diagnosis.subjects.subject import ModuleSubject
from headwise.errors import HeadwiseError, OptionError
from headwise.function.rounding import is_near
from headwise.function.spec import AttentionSpec, Sides
from headwise.function.stages import mix_values
from headwise.layers import conversion, distance
from headwise.layers.attention import Attention
from headwise.layers.options import POSITIONAL
from headwise.layouts import registry
from headwise.masks.mask import Mask
from headwise.scanning.call import CapturedCall
from headwise.scanning.record import record_attention


def layer_with_adapters(value: Any) -> Any:
    """Return the attention layer that a wrapper of peft holds; anything else as it is.

    torch's layer has no module for each projection, so a copy of it has the adapters merged.
    """
    if not isinstance(value, nn.Module):
        return value
    find_base: Any = getattr(value, "get_base_model", lambda: value)
    base = find_base()
    if isinstance(getattr(base, "base_layer", None), nn.MultiheadAttention):
        return _merged(copy.deepcopy(base))
    return base if isinstance(base, Attention) else value


@torch.no_grad()
def _merged(wrapper: Any) -> nn.Module:
    """Return the module under a wrapper of peft, with the active adapter in its weights."""
    if not (wrapper.merged or wrapper.disable_adapters):
        wrapper.merge()
    if hasattr(wrapper, "unload_and_optionally_merge_module"):
        wrapper.unload_and_optionally_merge_module(
            merge=False, safe_merge=False, adapter_names=None
        )
    base: nn.Module = wrapper.get_base_layer()
    return base


class NativeSubject(ModuleSubject):
    """An `Attention`, without dropout."""

    module: Attention
    float64_layer: Attention

    def __init__(self, layer: Attention) -> None:
        super().__init__(layer, "headwise.Attention")
        self.takes_source = all(getattr(layer, name) is None for name in POSITIONAL)
        self.step_arguments = frozenset({"mask"})

    @cached_property
    def model(self) -> AttentionModel:
        """The layer as data; OptionError for a score bias whose formula is not known."""
        merged = copy.deepcopy(self.float64_layer)
        for parent in list(merged.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(getattr(child, "base_layer", None), nn.Module):
                    setattr(parent, name, _merged(child))
        weights = conversion.state_per_head(self.float64_layer, merged.state_dict())
        bias = self.module.score_bias
        if not isinstance(bias, distance.AlibiSlopes | distance.T5BucketTable | None):
            raise OptionError(
                saw=f"a score bias of {type(bias).__name__}",
                needed="Alibi, T5Bias or none, whose formula is known",
                do="compare the layers without it, or as functions: compare(lambda x: a(x), b)",
            )
        return AttentionModel(self.float64_layer.spec, weights)

    def run_module(self, module: nn.Module, inputs: Inputs) -> Tensor:
        """Return the output of a layer in its dtype."""
        dtype = next(module.parameters()).dtype
        given = inputs.map_tokens(lambda x: x.to(dtype))
        if inputs.steps:
            return run_in_steps(module, given)
        output: Tensor = module(given.x, given.source, mask=mask_from_inputs(inputs))
        return output

    @torch.no_grad()
    def record_in_steps(self, inputs: Inputs) -> list[RecordedCall]:
        """Return the stages of calls with one cache, recorded as they run."""
        layer = self.float64_layer
        given = inputs.map_tokens(Tensor.double)
        # Positions count from the keys of the cache, which moves no score.
        chunks = replace(inputs, positions=None)
        return record_steps(layer, lambda: run_in_steps(layer, given), chunks, torch.float64)

    @torch.no_grad()
    def record(self, inputs: Inputs) -> RecordedCall:
        """Return all stages but the scores, each computed by the modules of the layer."""
        wide, mask = inputs.map_tokens(Tensor.double), mask_from_inputs(inputs)
        stages = self.float64_layer.stages(wide.x, wide.source, mask=mask)
        del stages["scores"]  # computed from q and k, and not by the layer
        return RecordedCall(inputs, stages)


def run_in_steps(layer: nn.Module, inputs: Inputs) -> Tensor:
    """Return the outputs of calls of a layer with one cache, behind each other."""
    assert isinstance(layer, Attention)
    cache = layer.cache(batch=len(inputs.x), length=sum(inputs.steps))
    outputs = []
    for given in inputs.per_call:
        keys = cache.key_count_after(given.x.shape[1])  # without those that left the window
        if given.mask is not None:
            given = replace(given, mask=given.mask[..., -keys:])
        mask = mask_from_inputs(given, keys=keys)
        outputs.append(layer(given.x, mask=mask, cache=cache))
    return torch.cat(outputs, 1)


def record_steps(
    model: nn.Module,
    run: Callable[[], Tensor],
    inputs: Inputs,
    dtype: torch.dtype,
    data: AttentionModel | None = None,
) -> list[RecordedCall]:
    """Return the calls with one cache that a run of one attention makes; ``run`` returns outputs.

    None are returned where not each of them is seen.

    ``dtype`` is that of the arithmetic, ``data`` the attention by its weights, where it is known.
    """
    recorded: list[dict[str, Tensor]] = []

    def read(call: CapturedCall) -> None:  # at once: a cache may change in place
        stages = read_captured_call(call, sum(inputs.steps[: len(recorded)]))
        # A layer may multiply its queries by the scale, and these are no stage of their own.
        if data is not None and call.matrix.scale == 1 != data.settings.factor:
            del stages["q after rotary"]
        recorded.append(without_other_order(stages, data))

    with record_attention(model, on_complete=read, keep_implementation=True) as recorder:
        recorder.begin_input()
        outputs = run().double().split(inputs.steps, 1)
    if len(recorded) != len(inputs.steps):
        return []
    # A cause shows in the same stage of all calls.
    shared = set[str].intersection(*map(set, recorded))
    calls: list[RecordedCall] = []
    for given, stages, output in zip(inputs.per_call, recorded, outputs, strict=True):
        kept = {name: x for name, x in stages.items() if name in shared}
        calls.append(RecordedCall(given, {**kept, "output": output}, dtype, tuple(calls)))
    return calls


def without_other_order(
    stages: dict[str, Tensor], data: AttentionModel | None
) -> dict[str, Tensor]:
    """Return the stages of a class in whose heads channels have the order of the known attention.

    Classes with a latent put rotated channels last, in the order of either pairing.
    """
    if data is None or data.settings.compressed is None:
        return stages
    return {name: x for name, x in stages.items() if not name.endswith("after rotary")}


def read_captured_call(call: CapturedCall, past: int | None) -> dict[str, Tensor]:
    """Return the stages of a call after ``past`` tokens of a cache; None for one without a cache.

    Keys that a cache dropped have no weight. A cache may also have room behind its last key.
    """
    queries, keys = call.matrix.shape[2:]
    new, missing = slice(None), 0
    if past is not None:
        start, missing = min(past, keys - queries), past + queries - keys
        new = slice(start, start + queries)
    stages = {"q after rotary": call.matrix.q, "k after rotary": call.matrix.k[:, :, new]}
    mixed = call.outputs if call.mixed is None else call.mixed
    # Where head outputs are not those of the operands, the weights are not known.
    if call.values is None or mixed is None or is_near(call.matrix @ call.values, mixed):
        weights = call.matrix.dense()
        stages["weights"] = weights[..., :missing] if missing < 0 else pad(weights, (missing, 0))
    if call.values is not None:
        stages["v"] = call.values[:, :, new]
    if call.outputs is not None:
        stages["head outputs"] = call.outputs
    return {name: x.to(torch.float64, copy=True) for name, x in stages.items()}


def mask_from_inputs(inputs: Inputs, keys: int | None = None) -> Mask | None:
    """Return the mask of a call."""
    if inputs.mask is None:
        return None
    batch, queries = inputs.x.shape[:2]
    allowed = inputs.mask.expand(batch, -1, queries, keys or inputs.key_source.shape[1])
    if allowed.shape[1] == 1:
        return Mask.may_attend(allowed.squeeze(1), axes="batch queries keys")
    return Mask.may_attend(allowed, axes="batch heads queries keys")


class TorchSubject(ModuleSubject):
    """`torch.nn.MultiheadAttention` or the drop-in.

    The stages are q, k and v from its weights, its returned weights, their products with v, and
    its output.
    """

    module: nn.MultiheadAttention
    float64_layer: nn.MultiheadAttention
    takes_source = True

    def __init__(self, layer: nn.MultiheadAttention) -> None:
        if layer.bias_k is not None or layer.add_zero_attn:
            raise OptionError(
                saw="a layer with add_bias_kv or add_zero_attn",
                needed="keys and values that come from tokens alone",
                do="compare its outputs on an input: compare(a, lambda x: layer(x, x, x)[0], x)",
            )
        super().__init__(layer, f"{type(layer).__module__.split('.')[0]}.{type(layer).__name__}")

    @cached_property
    def model(self) -> AttentionModel:
        """The layer as data."""
        layer, heads = self.float64_layer, self.float64_layer.num_heads
        is_packed = layer.in_proj_weight is not None
        stored = registry.layout("torch-packed" if is_packed else "torch-separate")
        spec = AttentionSpec(num_heads=heads, num_kv_heads=heads, head_dim=layer.head_dim)
        return AttentionModel(spec, stored.unpack(layer.state_dict(), heads=heads))

    def run_module(self, module: nn.Module, inputs: Inputs) -> Tensor:
        """Return the output of a layer in its dtype."""
        assert isinstance(module, nn.MultiheadAttention)
        return self._run_torch_layer(module, inputs)[0]

    @torch.no_grad()
    def record(self, inputs: Inputs) -> RecordedCall:
        """Return the projections, weights, head outputs and output, in float64."""
        call = RecordedCall(inputs, {})
        output, weights = self._run_torch_layer(self.float64_layer, inputs)
        stages = {role: self.model.predict_stage(role, call) for role in ("q", "k", "v")}
        heads = mix_values(weights, stages["v"])
        stages |= {"weights": weights, "head outputs": heads, "output": output}
        return call.with_stages(stages)

    def _run_torch_layer(
        self, layer: nn.MultiheadAttention, inputs: Inputs
    ) -> tuple[Tensor, Tensor]:
        dtype = layer.out_proj.weight.dtype
        x, source = inputs.x.to(dtype), inputs.key_source.to(dtype)
        if not layer.batch_first:
            x, source = x.transpose(0, 1), source.transpose(0, 1)
        hidden = None
        if inputs.mask is not None:
            shape = (len(inputs.x), layer.num_heads, inputs.x.shape[1], inputs.key_source.shape[1])
            hidden = ~inputs.mask.expand(shape).flatten(0, 1)
        options = {"attn_mask": hidden, "need_weights": True, "average_attn_weights": False}
        output, weights = layer(x, source, source, **options)
        return output if layer.batch_first else output.transpose(0, 1), weights


@dataclass(frozen=True, eq=False)
class ModuleData:
    """An attention module of a model as data."""

    prefix: str  # the name of the module, or of the module around it that has the output projection
    model: AttentionModel | None  # the attention; None where the weights or settings cannot be read
    # Role -> name of the submodule that projects it; only submodules of their own.
    projections: Mapping[str, str]
    window: Sides | None = None  # by the config; None for none

    def matches(self, label: str) -> bool:
        """True if a name is that of this module, of a part of it, or of what it is a part of."""
        return is_same_branch(self.prefix, label)


def read_attention_modules(model: nn.Module) -> list[ModuleData]:
    """Return the attention modules of a model whose weights and settings can be read."""
    layers = (_read_native_or_torch_layer(name, x) for name, x in model.named_modules())
    return [*filter(None, layers)] or _read_transformers_modules(model)


def _read_native_or_torch_layer(name: str, module: nn.Module) -> ModuleData | None:
    prefix = f"{name}." if name else ""
    if isinstance(module, Attention):
        parts = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
        projections = {role: prefix + part for role, part in parts.items()}
        with suppress(HeadwiseError):
            return ModuleData(prefix, NativeSubject(module).model, projections)
        return ModuleData(prefix, None, projections)
    if isinstance(module, nn.MultiheadAttention):
        with suppress(HeadwiseError):
            # Its output projection is no call of a module: the output is that of the layer.
            return ModuleData(prefix, TorchSubject(module).model, {"o": name})
    return None


def _read_transformers_modules(model: nn.Module) -> list[ModuleData]:
    state = model.state_dict()
    return [_read_place(place, state) for place in find_model_places(model)]


def _read_place(place: Place, state: Mapping[str, Tensor]) -> ModuleData:
    data = None
    with suppress(HeadwiseError):
        data = NativeSubject(place.layer(state, window=None)).model
    window = None
    with suppress(HeadwiseError):
        window = window_sides(place.config, place.module.layer)
    return ModuleData(place.name, data, place.projections, window)
