"""The classes that are tried: one for each model type that transformers knows."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import configuration_auto, modeling_auto


def model_types() -> list[str]:
    """All of the installed version."""
    return sorted(configuration_auto.CONFIG_MAPPING.keys())


def config_class(model_type: str) -> type[PreTrainedConfig]:
    return configuration_auto.CONFIG_MAPPING[model_type]


def model_class(model_type: str) -> type[PreTrainedModel] | None:
    """The base class; where there is none, the first task's; else the first that takes its config.

    None where no class takes the configuration of this type, which is part of another's.
    """
    listed = _listed(model_type)
    config = config_class(model_type)
    kind = _named(listed, config) if listed else None
    if kind is not None and (is_stand_in(kind) or kind.config_class in (config, None)):
        return kind
    return _first_of_its_module(config) or kind


def is_stand_in(kind: type) -> bool:
    """Whether transformers has no more than the name, for want of a package."""
    return bool(getattr(kind, "is_dummy", False))


def _listed(model_type: str) -> str | None:
    mappings = [
        getattr(modeling_auto, name)
        for name in sorted(dir(modeling_auto))
        if name.endswith("MAPPING_NAMES") and name not in ("CONFIG_MAPPING_NAMES",)
    ]
    for mapping in [modeling_auto.MODEL_MAPPING_NAMES, *mappings]:
        if model_type in mapping:
            name = mapping[model_type]
            return name if isinstance(name, str) else str(name[0])
    return None


def _named(name: str, config: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    kind: type[PreTrainedModel] | None = getattr(transformers, name, None)
    if kind is None:  # not all are exported
        kind = next(getattr(m, name) for m in _modeling(config) if hasattr(m, name))
    return kind


def _first_of_its_module(config: type[PreTrainedConfig]) -> type[PreTrainedModel] | None:
    for module in _modeling(config):
        found: list[type[PreTrainedModel]] = [
            kind for kind in vars(module).values() if _takes(kind, config, module)
        ]
        if found:
            return min(found, key=_preference)
    return None


def _modeling(config: type[PreTrainedConfig]) -> Iterator[ModuleType]:
    package = importlib.import_module(config.__module__.rpartition(".")[0])
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("modeling_"):
            yield importlib.import_module(f"{package.__name__}.{module.name}")


def _preference(kind: type) -> tuple[bool, bool, int]:
    """A model before an encoder of it, both before what has a head; else as they are written."""
    name = kind.__name__
    return "For" in name, not name.endswith("Model"), inspect.getsourcelines(kind)[1]


def _takes(kind: Any, config: type[PreTrainedConfig], source: Any) -> bool:
    return (
        inspect.isclass(kind)
        and issubclass(kind, PreTrainedModel)
        and kind.__module__ == source.__name__
        and kind.config_class is config
        and "forward" in vars(kind)
    )
