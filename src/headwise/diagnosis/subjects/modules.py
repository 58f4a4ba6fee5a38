"""Attention modules of a running model, read as data."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from headwise.checkpoints.attention import attention_from_state
from headwise.checkpoints.config import (
    attention_window,
    layout_in_layer,
    layout_name,
    read_stated_counts,
)
from headwise.diagnosis.simulation.model import AttentionModel
from headwise.diagnosis.subjects.native import NativeSubject
from headwise.diagnosis.subjects.torch_layer import TorchSubject
from headwise.errors import HeadwiseError
from headwise.layers.attention import Attention
from headwise.layouts import registry
from headwise.layouts._layout import Layout
from headwise.layouts.modules import NamedModule, find_modules


@dataclass(frozen=True, eq=False)
class ModuleData:
    """An attention module of a model as data.

    Attributes:
        prefix: the name of the module, or of the module around it that has the output projection.
        model: the attention; None where the weights or settings cannot be read.
        projections: role -> name of the submodule that projects it; only submodules of their own.
        window: the number of keys in its window by the config; None for none.
    """

    prefix: str
    model: AttentionModel | None
    projections: Mapping[str, str]
    window: int | None = None

    def covers_module(self, name: str) -> bool:
        """True if a module's name is that of this one, or of a part of it."""
        return f"{name}.".startswith(self.prefix) or self.prefix.startswith(f"{name}.")


def read_attention_modules(model: nn.Module) -> list[ModuleData]:
    """Return the attention modules of a model whose weights and settings can be read."""
    modules = [
        data
        for name, module in model.named_modules()
        if (data := _read_native_or_torch_layer(name, module))
    ]
    return modules or _read_transformers_modules(model)


def _read_native_or_torch_layer(name: str, module: nn.Module) -> ModuleData | None:
    """Return a layer of headwise or torch as data."""
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
    """Return the attention of a model of transformers, by its config and its layout."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", dict[str, Any])
    fields: dict[str, Any] = to_dict()
    name = layout_name(fields) if fields else None
    if name is None:
        return []
    layout, state = registry.layout(name), model.state_dict()
    modules = [m for m in find_modules(layout, state) if m.tensors]
    return [_read_module_by_layout(module, modules, state, layout, fields) for module in modules]


def _read_module_by_layout(
    module: NamedModule,
    modules: list[NamedModule],
    state: Mapping[str, Tensor],
    layout: Layout,
    config: dict[str, Any],
) -> ModuleData:
    described = layout_in_layer(layout, config, module.layer)
    data = None
    with suppress(HeadwiseError):
        shapes = {local: tuple(state[full].shape) for full, local in module.tensors.items()}
        sizes = described.sizes(shapes, read_stated_counts(config))
        layer = attention_from_state(module, modules, state, described, config, sizes, window=None)
        data = NativeSubject(layer).model
    owners = {
        role: full.rpartition(".")[0]
        for full, local in module.tensors.items()
        for role in "qkvo"
        if f"w{role}" in layout.patterns[local].tensors
    }
    window = None
    with suppress(HeadwiseError):
        window = attention_window(config, module.layer)
    return ModuleData(module.prefix, data, owners, window)
