"""Model of transformers that holds the stored weights of one attention, and runs up to it.

All other parameters are small: windows on a row of random numbers, shifted by one for each row, so
that a matrix of any size needs the memory of its two sides. The model runs in float64, as far as
its class can; tables that it makes once, such as the frequencies of a rotation, are those of its
class to the last bit, in float32.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.checkpoints.transformers import (
    PURPOSE,
    class_of_config,
    list_load_errors,
    silence_transformers,
)
from headwise.checkpoints.turns import HandedPlaces, Turn
from headwise.errors import OptionError
from headwise.support.lazy import require_package
from headwise.support.wide import default_float64, in_float64

# Attributes of modules that number the layers.
LAYER_NUMBER = re.compile(r"(^|layer_?)(idx|id|index|number)$")
# Attributes of attention modules that count heads.
COUNTED = {
    "heads": ("num_heads", "num_attention_heads", "num_attn_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim", "attention_head_size"),
}
# Attributes of attention modules -> their usual value, and what another one does, as no layer does.
FORMS: Mapping[str, tuple[object, str]] = {
    "use_mask_unit_attn": (False, "cuts its tokens into units, and attends within each"),
    "query_stride": (1, "attends with the largest of several neighbouring queries"),
}
COSTLY = 2**26  # parameters beyond which an attention, and the blocks before it, cost seconds


class NotRunError(Exception):
    """Raised for a class that could not be built or run here; its text is the reason."""


class _ReachedError(Exception):
    """Raised when the attention has its output, so that nothing after it runs."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ClassCall:
    """One call of an attention module of transformers.

    Attributes:
        x: (batch, queries, embed_dim), the input of the queries' projection.
        source: (batch, keys, source_dim), that of the keys' projection; None where it is x.
        value_source: that of the values' projection; None where it is that of keys.
        stages: name -> result of a projection, the merged head outputs, the output.
        is_narrow: True if a step before the output was computed in float32 or narrower.
        turn: the angles that it got, where its tokens have places along several axes.
        images: the number of the image of each token, (queries,); None where it got none.
    """

    x: Tensor
    source: Tensor | None
    value_source: Tensor | None
    stages: Mapping[str, Tensor]
    is_narrow: bool
    turn: Turn | None = None
    images: Tensor | None = None

    def has_inputs_of(self, other: ClassCall) -> bool:
        """True if another call has the same inputs of the projections."""
        return all(
            a is b or (a is not None and b is not None and torch.equal(a, b))
            for a, b in (
                (self.x, other.x),
                (self.source, other.source),
                (self.value_source, other.value_source),
            )
        )


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A model with the weights of one attention.

    Attributes:
        model: the model, in eval mode.
        owners: the models around the attention, the largest first.
        projections: role -> module that projects queries, keys, values or outputs.
        attention: the smallest module that holds all of them; ``path`` is its name.
    """

    model: nn.Module
    owners: Sequence[Any]
    projections: Mapping[str, nn.Module]
    attention: nn.Module
    path: str

    @property
    def config(self) -> dict[str, Any]:
        """The config of the smallest model, or of its part in the path, with all defaults."""
        config = dict(self.owners[-1].config.to_dict())
        parts = {n: x for n, x in config.items() if isinstance(x, Mapping) and x.get("model_type")}
        words = {n: n.removesuffix("_config") for n in parts}
        inner = (n for n, word in words.items() if word != n and word in self.path)
        return dict(config.get(next(inner, ""), config))

    @property
    def counts(self) -> dict[str, int]:
        """Heads, kv_heads and head_dim of the attention, where its class keeps them."""
        settings = [vars(module) for module in self.attention.modules()]
        counts: dict[str, int] = {}
        for name, attributes in COUNTED.items():
            numbers = (each.get(attribute) for each in settings for attribute in attributes)
            if number := next((n for n in numbers if isinstance(n, int) and n > 0), None):
                counts[name] = number
        return counts

    @property
    def is_large(self) -> bool:
        """True if a run of the attention takes long."""
        return sum(p.numel() for p in self.attention.parameters()) > COSTLY

    @torch.no_grad()
    def call(self, run: Callable[..., Any], inputs: Mapping[str, Any]) -> ClassCall:
        """Run one of the owners, or a method of it, up to the output of the attention.

        Raises:
            NotRunError: the class cannot run on these inputs, or does not reach the attention.
        """
        reached: dict[str, tuple[Any, Any]] = {}

        def keep(role: str) -> Callable[..., None]:
            def keep_call(_: nn.Module, given: tuple[Any, ...], output: Any) -> None:
                reached.setdefault(role, (given[0] if given else None, output))
                if role == "o":
                    raise _ReachedError

            return keep_call

        def keep_whole(module: nn.Module, given: tuple[Any, ...], named: Any, output: Any) -> None:
            inputs = inspect.signature(module.forward).bind(*given, **named).arguments
            kept = *(inputs[name] for name in ("query", "key", "value")), output[0]
            q, k, v, o = (x if module.batch_first else x.transpose(0, 1) for x in kept)
            reached.update(q=(q, None), k=(k, None), v=(v, None), o=(None, o))
            raise _ReachedError

        if isinstance(self.attention, nn.MultiheadAttention):  # its projections are no calls
            hooks = [self.attention.register_forward_hook(keep_whole, with_kwargs=True)]
        else:
            hooks = [m.register_forward_hook(keep(role)) for role, m in self.projections.items()]
        kind = type(getattr(run, "__self__", run)).__name__
        given = [x for x in inputs.values() if isinstance(x, Tensor)]
        places = HandedPlaces()
        try:
            with places.keep(self.model, self.attention), in_float64() as narrow:
                run(**inputs)
        except _ReachedError:
            call = self._read_call(reached, given, is_narrow=narrow.is_seen)
            images = places.find_images(call.x.shape[1])
            return replace(call, turn=places.find_turn(), images=images)
        except list_run_errors() as error:
            raise NotRunError(f"{kind} {_first_line(error)}") from error
        finally:
            for hook in hooks:
                hook.remove()
        raise NotRunError(f"{kind} did not call the output projection of its attention")

    def _read_call(
        self, reached: Mapping[str, tuple[Any, Any]], given: Sequence[Tensor], *, is_narrow: bool
    ) -> ClassCall:
        # A layer of torch has no results of its projections.
        whole = isinstance(self.attention, nn.MultiheadAttention)
        tensors = [x for pair in reached.values() for x in pair if not (whole and x is None)]
        is_whole = reached.keys() == self.projections.keys()
        if not is_whole or not all(isinstance(x, Tensor) and x.dim() in (2, 3, 4) for x in tensors):
            kind = type(self.attention).__name__
            raise NotRunError(f"{kind} does not project (batch, tokens, width) by its modules")
        rows = {
            role: tuple(None if x is None else _tokens_in_rows(x, given) for x in pair)
            for role, pair in reached.items()
        }
        x, source, values = (rows[role][0] for role in "qkv")
        assert isinstance(x, Tensor)
        assert isinstance(source, Tensor)
        assert isinstance(values, Tensor)
        every = {role: rows[role][1] for role in "qkv" if self._is_alone(role)}
        every |= {"head outputs": rows["o"][0], "output": rows["o"][1]}
        stages = {name: stage for name, stage in every.items() if stage is not None}
        return ClassCall(
            x=x,
            source=None if torch.equal(source, x) else source,
            value_source=None if torch.equal(values, source) else values,
            stages=stages,
            is_narrow=is_narrow,
        )

    def kind_of(self, stored: Iterable[str]) -> tuple[object, ...] | None:
        """Return what an attention of the model is, by its stored names: equal for one kind.

        None where the model has no place for one of them.

        Those are its path without numbers, its classes, settings and tables, those of its block,
        and its entries in lists of the config with one for each layer. The number of the layer
        itself is left out.
        """
        stored = list(stored)
        names = _rename(self.model, stored)
        if len(names) < len(stored):
            return None
        path = _common_path([name.rpartition(".")[0] for name in names.values()])
        attention, parts = self.model.get_submodule(path), path.split(".")
        block = self.model.get_submodule(".".join(parts[:-1]))
        lists = [x for x in self.config.values() if isinstance(x, list | tuple)]
        entries = []
        for at, part in enumerate(parts):
            blocks = self.model.get_submodule(".".join(parts[:at]))
            if part.isdecimal() and isinstance(blocks, nn.ModuleList):
                entries += [x[int(part)] for x in lists if len(x) == len(blocks)]
        settings = [(name, *_settings_of(each)) for name, each in attention.named_modules()]
        stack = [part for part in parts if not part.isdecimal()]
        return stack, entries, *_settings_of(block), settings

    def drop_parameters(self) -> None:
        """Free the memory of the parameters; the model does not run any more."""
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(parameter.to("meta"), False)

    def _is_alone(self, role: str) -> bool:
        return [*self.projections.values()].count(self.projections[role]) == 1


def _tokens_in_rows(x: Tensor, given: Sequence[Tensor]) -> Tensor:
    """Return (batch, tokens, width) from tokens alone, a map of tokens, or the batch second.

    The batch is second where the first two axes of an input of the model stand the other way.
    """
    if x.dim() == 2:
        return x[None]
    x = x.flatten(1, -2)
    is_turned = any(x.shape[:2] == each.shape[1::-1] != each.shape[:2] for each in given)
    return x.transpose(0, 1) if is_turned else x


RUN_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)


def list_run_errors() -> tuple[type[Exception], ...]:
    """Return the errors that classes of transformers raise at sizes or inputs that do not fit."""
    return (*RUN_ERRORS, *list_load_errors())


def build_skeleton(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    roles: Mapping[str, str],
    code: Path | None = None,
) -> Skeleton:
    """Return the model of a config with the tensors of one attention.

    ``tensors`` has the stored names, and ``roles`` the name of a tensor of each projection, by
    role: q, k, v and o. ``code`` is the folder with the classes, from `find_trusted_code`.

    Raises:
        MissingExtraError: transformers is not installed.
        NotRunError: transformers has no such class, or cannot build it or place the tensors.
    """
    transformers = require_package("transformers", purpose=PURPOSE, pip="'headwise[huggingface]'")
    try:
        with silence_transformers(transformers), default_float64():
            kind, made = class_of_config(transformers, _in_double(config), code)
            made._experts_implementation = "eager"  # the grouped kernel has no float64
            with parameters_on_meta():
                model = kind(made)
            names = _place(model, tensors)
    except OptionError:
        raise
    except list_run_errors() as error:
        raise NotRunError(
            f"the class of {config.get('model_type')} {_first_line(error)}"
        ) from error
    paths = {}
    for role, stored in roles.items():
        if (name := names.get(stored)) is None:
            raise NotRunError(f"{type(model).__name__} has no place for {stored}")
        paths[role] = name.rpartition(".")[0]
    common = _common_path(list(paths.values()))
    modules = {role: model.get_submodule(path) for role, path in paths.items()}
    owners = _find_owners(model, common, transformers)
    _fill(model, modules.values())
    _skip_blocks_before(model, common)
    attention = model.get_submodule(common)
    _require_form_of_a_layer(attention, common)
    return Skeleton(model.eval(), owners, modules, attention, common)


def _require_form_of_a_layer(attention: nn.Module, path: str) -> None:
    for name, (usual, words) in FORMS.items():
        if (value := vars(attention).get(name)) not in (None, usual):
            raise OptionError(
                saw=f"{path}: {type(attention).__name__} {words}, as {name}={value} says",
                needed="attention of each token to all, or by a mask that a call gets",
                do="use the model's own class; headwise scan runs it",
            )


def _in_double(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config whose parts, which models build by their own dtype, are in float64.

    transformers writes infinity as a JSON object.
    """
    parts = {name: _in_double_part(part) for name, part in config.items()}
    stated = {n: "float64" for n in ("dtype", "torch_dtype") if config.get(n) is not None}
    return parts | stated


def _in_double_part(value: Any) -> Any:
    if isinstance(value, list):
        return [_in_double_part(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    return float(value["__float__"]) if "__float__" in value else _in_double(value)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Give new parameters no memory; buffers, such as tables of angles, are made as always."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _place(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Put stored tensors in their places; return stored name -> name in the model."""
    loading, renamings, converters = _read_renamings(model)
    names, state = _rename(model, tensors), model.state_dict()
    options = import_module("transformers.modeling_utils").LoadStateDictConfig
    loading.convert_and_load_state_dict_in_model(
        model=model,
        state_dict=dict(tensors),
        load_config=options(weight_mapping=[*renamings, *converters]),
    )
    placed = dict(model.named_parameters())
    for stored, name in names.items():
        if name in placed and placed[name].is_meta:
            shape, wanted = tuple(tensors[stored].shape), tuple(state[name].shape)
            raise ValueError(f"at {stored} of {shape}, where it has {wanted}")
    return names


def _read_renamings(model: Any) -> tuple[Any, list[Any], list[Any]]:
    """Return the module of transformers that renames stored tensors, and its rules for a model."""
    loading = import_module("transformers.core_model_loading")
    mapping = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
    return loading, renamings, [x for x in mapping if isinstance(x, loading.WeightConverter)]


def _rename(model: Any, stored: Iterable[str]) -> dict[str, str]:
    """Return stored name -> name in the model, for those that the model has."""
    loading, *rules = _read_renamings(model)
    state, prefix = model.state_dict(), model.base_model_prefix
    names = {}
    for name in stored:
        renamed = loading.rename_source_key(name, *rules, prefix, state)[0]
        if renamed not in state:
            renamed = loading.rename_source_key(name, [], [], prefix, state)[0]
        if renamed in state:
            names[name] = renamed
    return names


def _settings_of(module: nn.Module) -> tuple[object, ...]:
    """Return the class of a module, its settings without the number of its layer, its tables."""
    usual = (bool, int, float, str, tuple, list, type(None))
    settings = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, usual) and not LAYER_NUMBER.search(name)
    }
    tables = {
        name: bytes(x.reshape(-1).view(torch.uint8).numpy())
        for name, x in module._buffers.items()
        if x is not None and not x.is_meta
    }
    return type(module), settings, tables


def _common_path(paths: list[str]) -> str:
    common: list[str] = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    if len(set(paths)) == 1 and common:  # one module projects all
        common.pop()
    return ".".join(common)


def _find_owners(model: nn.Module, path: str, transformers: Any) -> list[nn.Module]:
    """Return the models of transformers around a module, the largest first."""
    parts = path.split(".") if path else []
    around = [".".join(parts[:length]) for length in range(len(parts) + 1)]
    modules = [model.get_submodule(name) for name in around]
    return [m for m in modules if isinstance(m, transformers.PreTrainedModel)]


def _fill(model: nn.Module, projections: Iterable[nn.Module]) -> None:
    """Give all other parameters small values; a bias that a file leaves out is 0 in its class."""
    generator = torch.Generator().manual_seed(0)
    for module in projections:
        bias = module._parameters.get("bias")
        if bias is not None and bias.is_meta:
            module.bias = nn.Parameter(torch.zeros(bias.shape), requires_grad=False)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                values = make_small(parameter.shape, generator)
                module._parameters[name] = nn.Parameter(values, requires_grad=False)
        for buffer in module.buffers(recurse=False):
            # A book of codes is zeros until a file fills it. One on meta has no numbers to read.
            is_table = buffer.dim() > 1 and buffer.is_floating_point() and not buffer.is_meta
            if is_table and not buffer.any():
                buffer.copy_(torch.randn(buffer.shape, generator=generator))


def make_small(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return random numbers of a shape, in the memory of the sum of its sides."""
    row = torch.randn(sum(shape) + 1, generator=generator, dtype=torch.float64)
    # An output of a matrix, or of a convolution, is a sum over all axes but the first.
    row = row / max(1, prod(shape[1:])) ** 0.5 if len(shape) > 1 else 1 + row / 8
    return row.as_strided(tuple(shape), (1,) * len(shape))


def _skip_blocks_before(model: nn.Module, path: str) -> None:
    """Let blocks before the attention pass their input on, where running them is costly."""
    parts = path.split(".")
    for at, part in enumerate(parts):
        blocks = model.get_submodule(".".join(parts[:at]))
        if isinstance(blocks, nn.ModuleList) and part.isdecimal():
            before = list(blocks)[: int(part)]
            if sum(p.numel() for block in before for p in block.parameters()) > COSTLY:
                for block in before:
                    block.forward = _pass_on


def _pass_on(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states


def _first_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:160]
    return f"raises {type(error).__name__}: {text}"
