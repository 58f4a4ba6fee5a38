"""An attention module of transformers as the subject of a comparison."""

import inspect
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from headwise.checkpoints.config import window_sides
from headwise.diagnosis.simulation.model import (
    AttentionModel,
    Inputs,
    RecordedCall,
    key_query_distances,
)
from headwise.diagnosis.subjects.function import BlackBox
from headwise.diagnosis.subjects.layers import (
    ModuleData,
    read_attention_modules,
    record_steps,
    without_other_order,
)
from headwise.diagnosis.subjects.run import find_main_tensor, record_layers
from headwise.diagnosis.subjects.subject import FAILURES, ModuleSubject, describe_error
from headwise.errors import HeadwiseError, OptionError
from headwise.function.spec import ABSENT, AttentionSpec
from headwise.function.stages import visible_by_distance
from headwise.layers.hooks import record_modules
from headwise.scanning.record import MASKS, SOURCES

FILES = "transformers.models."
CACHES = ("past_key_values", "past_key_value", "layer_past")  # arguments of modules


def is_transformers_attention(value: object) -> TypeGuard[nn.Module]:
    """True for a module of transformers that is not a whole model."""
    return (
        isinstance(value, nn.Module)
        and not hasattr(value, "get_input_embeddings")
        and _class_in_transformers(value) is not nn.Module
        and _find_attribute_in_submodules(value, "config") is not None
    )


def _class_in_transformers(module: nn.Module) -> type[nn.Module]:
    """Return the class of transformers that a module has or derives from; nn.Module for none.

    Its model calls a module by the arguments of this class, whatever its ``forward`` is now.
    """
    places = (each for each in type(module).__mro__ if each.__module__.startswith(FILES))
    return next(places, nn.Module)


def _arguments_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(_class_in_transformers(module).forward).parameters


def _names_in_file_of(module: nn.Module) -> Mapping[str, Any]:
    return vars(sys.modules[_class_in_transformers(module).__module__])


def _find_attribute_in_submodules(module: nn.Module, name: str) -> Any:
    """Return an attribute of a module or of the first part that has it; None if none has."""
    owners = (part for part in module.modules() if getattr(part, name, None) is not None)
    return next((getattr(owner, name) for owner in owners), None)


def stated_layer_index(module: nn.Module) -> int | None:
    """Return the number of the layer that an attention module states; None if it states none."""
    index: int | None = _find_attribute_in_submodules(module, "layer_idx")
    return index


def is_causal_in_its_model(module: nn.Module) -> bool:
    """True if the model of an attention module hides later keys from its queries.

    Where no part of the module states it, its file does, if it makes no other mask.
    """
    stated = _find_attribute_in_submodules(module, "is_causal")
    if stated is not None:
        return bool(stated)
    made = _names_in_file_of(module)
    return "create_causal_mask" in made and "create_bidirectional_mask" not in made


class TransformersSubject(ModuleSubject):
    """An attention module of transformers, or of a class that derives from one.

    The stages come from a float64 copy, the output from the module itself, with its own attention
    implementation. Its model makes a mask of causality and window, so calls have that mask, and
    that of the caller.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, type(module).__name__)
        names = _arguments_of(module)
        self.is_causal = is_causal_in_its_model(module)
        self.takes_mask = any(name in names for name in MASKS)
        # Some take encoder_hidden_states in self-attention too, and ignore them there.
        sources = [name for name in SOURCES if name in names and name != "encoder_hidden_states"]
        self.takes_source = bool(sources) and not self.is_causal
        if any(name in names for name in CACHES) and stated_layer_index(module) is not None:
            self.step_arguments = frozenset({"mask", "positions"} if self.takes_mask else ())
            self.decodes = self.is_causal

    @cached_property
    def _data(self) -> ModuleData | None:
        modules = read_attention_modules(_OneModuleModel(self.module))
        return modules[0] if len(modules) == 1 else None

    @cached_property
    def model(self) -> AttentionModel | None:
        """The module as data; None where its class has no layout in the catalogue."""
        alone = _OneModuleModel(self.module)
        if self._data is None or self._data.model is None:
            return None
        return self._data.model.with_settings(causal=alone.is_causal, window=alone.window)

    @property
    def token_width(self) -> int | None:
        """The width that its first projection takes, also where it has no data."""
        linear = (part for part in self.module.modules() if isinstance(part, nn.Linear))
        return next((part.in_features for part in linear), None)

    @cached_property
    def function(self) -> BlackBox:
        """The module as a function of tokens, a source and a mask."""

        def run(x: Tensor, source: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
            return self._run(Inputs(x, source, mask), x.dtype)

        return BlackBox(run, self.kind)

    def run_module(self, module: nn.Module, inputs: Inputs) -> Tensor:
        """Return the output of a module in its dtype.

        That is the output of its projection, where that lies in another part: such a part may have
        a residual and a norm, as BERT's.
        """
        alone = _OneModuleModel(module)
        parts = () if self._data is None else filter(None, [self._data.projections.get("o")])
        inner = [x for name in parts if (x := alone.get_submodule(name)) not in module.children()]
        with record_modules(inner) as passes:
            output: Tensor = alone(inputs, next(module.parameters()).dtype)
        outputs = [each.output for part in inner for each in passes[part]]
        return torch.cat(outputs, 1) if outputs else output

    def record_in_steps(self, inputs: Inputs) -> list[RecordedCall]:
        """Return the stages of calls with one cache, recorded as they run."""
        wide = _OneModuleModel(self.float64_layer)
        with torch.no_grad():
            run = partial(wide, inputs, torch.float64)
            return record_steps(wide, run, inputs, torch.float32, self.model)

    def record(self, inputs: Inputs) -> RecordedCall:
        """Return the stages that can be reached, computed in float64; at least the output."""
        alone, stages = _OneModuleModel(self.float64_layer), dict[str, Tensor]()
        with suppress(OptionError):  # of a module in which no attention is seen
            layers, _ = record_layers(alone, ((inputs, torch.float64), {}))
            stages = dict(layers[0].call.stages) if len(layers) == 1 else {}
        stages = without_other_order(stages, self.model)
        stages["output"] = self._run(inputs, torch.float64)
        return RecordedCall(inputs, stages, torch.float32)


class _OneModuleModel(nn.Module):
    """A model that holds one attention module, under the number of its layer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.config = _find_attribute_in_submodules(module, "config")
        self.number = _find_attribute_in_submodules(module, "layer_idx") or 0
        self.layers = nn.ModuleDict({str(self.number): module})
        self.is_causal, self.window = is_causal_in_its_model(module), None
        with suppress(HeadwiseError):  # of a config that does not say which layers have its window
            self.window = window_sides(self.config.to_dict(), self.number)

    def forward(self, inputs: Inputs, dtype: torch.dtype) -> Tensor:
        if not inputs.steps:
            return self._call(RecordedCall(inputs, {}), dtype)
        cache = self._make_cache(inputs)
        outputs: list[Tensor] = []
        calls: list[RecordedCall] = []
        for given in inputs.per_call:
            calls.append(RecordedCall(given, {}, earlier=tuple(calls)))
            outputs.append(self._call(calls[-1], dtype, cache))
        if not cache.get_seq_length(self.number):
            [name] = {type(module).__name__ for module in self.layers.values()}
            raise _unsupported_module_error(f"{name}, whose forward leaves its cache empty")
        return torch.cat(outputs, 1)

    def _make_cache(self, inputs: Inputs) -> Any:
        """Return the cache of the caller, or the one that transformers makes for the config."""
        if inputs.cache is not None:
            return inputs.cache(self.config, sum(inputs.steps))
        return sys.modules["transformers"].DynamicCache(config=self.config)

    def _call(self, call: RecordedCall, dtype: torch.dtype, cache: Any = None) -> Tensor:
        [module], inputs = self.layers.values(), call.inputs
        names = _arguments_of(module)
        x = inputs.x.to(dtype)
        arguments: dict[str, Any] = {}
        if inputs.source is not None:
            name = next((name for name in SOURCES if name in names), None)
            if name is None:
                raise _unsupported_module_error(f"inputs with a source for {type(module).__name__}")
            arguments[name] = inputs.source.to(dtype)
        if mask_name := next((name for name in MASKS if name in names), None):
            mask = self._mask_as_added_numbers(call, dtype)
            if cache is not None:  # which may have room behind the last key, or drop keys
                keys, first = cache.get_mask_sizes(x.shape[1], self.number)
                lowest, room = torch.finfo(dtype).min, max(0, first + keys - mask.shape[-1])
                mask = pad(mask, (0, room), value=lowest)[..., first : first + keys]
            arguments[mask_name] = mask
        if cache is not None:
            arguments[next(name for name in CACHES if name in names)] = cache
        if "position_embeddings" in names:
            arguments["position_embeddings"] = self._compute_rotation(module, x, call)
        if "position_ids" in names:
            arguments["position_ids"] = call.query_positions
        for name in [*names][2:]:  # after self and the tokens; what its config turns off
            if names[name].default is inspect.Parameter.empty and not getattr(self.config, name, 1):
                arguments.setdefault(name, None)
        try:
            return find_main_tensor(module(x, **arguments))
        except HeadwiseError:
            raise
        except FAILURES as error:
            given = ", ".join(["tokens", *arguments])
            raise _unsupported_module_error(
                f"{type(module).__name__}, which fails on {given}: {describe_error(error)}"
            ) from error

    def _mask_as_added_numbers(self, call: RecordedCall, dtype: torch.dtype) -> Tensor:
        """Return the masks of model and caller as numbers (batch, heads or 1, queries, keys)."""
        inputs, ahead = call.inputs, key_query_distances(call)
        spec = AttentionSpec(causal=self.is_causal, window=self.window or ABSENT)
        seen = visible_by_distance(spec, ahead)
        seen = seen if inputs.mask is None else seen & inputs.mask
        shape = (len(inputs.x), -1, inputs.x.shape[1], ahead.shape[-1])
        lowest = torch.finfo(dtype).min
        return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, lowest).expand(shape)

    def _compute_rotation(self, module: nn.Module, x: Tensor, call: RecordedCall) -> Any:
        """Return cos and sin, by the class in the module's file that computes them."""
        classes = _names_in_file_of(module).items()
        rotary = next((c for name, c in classes if name.endswith("RotaryEmbedding")), None)
        if rotary is None:
            raise _unsupported_module_error(
                f"{type(module).__name__}, whose rotation has no class in its file"
            )
        embedding = rotary(config=self.config)
        kinds = getattr(self.config, "layer_types", None)
        has_kinds = "layer_type" in inspect.signature(embedding.forward).parameters
        more = (kinds[self.number],) if has_kinds and kinds else ()
        return embedding(x, call.query_positions, *more)


def _unsupported_module_error(saw: str) -> OptionError:
    return OptionError(
        saw=saw,
        needed="an attention module that takes tokens, a mask and a rotation",
        do="compare the models that hold the two: compare(model_a, model_b, tokens)",
    )
