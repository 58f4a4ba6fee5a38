"""Places of the attention modules in a model's tensors: their layout, sizes and function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from headwise.checkpoints import config as configs
from headwise.checkpoints.attention import attention_from_state
from headwise.checkpoints.fields import Config
from headwise.errors import OptionError, ShapeError
from headwise.function.weights import State
from headwise.layers.attention import Attention
from headwise.layouts import registry
from headwise.layouts._layout import Layout
from headwise.layouts.modules import NamedModule, find_modules, find_unlisted_tensors_of_module
from headwise.layouts.pattern import Sizes
from headwise.layouts.plan import TensorHeader


@dataclass(frozen=True, eq=False)
class Place:
    """Place of one attention module in a model's tensors, and the way to read them.

    Attributes:
        module: its position, and the names of its tensors.
        modules: all attention modules of the model.
        layout: that of its tensors, with the function of its layer.
        config: the model's config.json.
        head_dim: that of the module in memory, None where it states none. A module that lost heads
            has other numbers of them than its config says.
    """

    module: NamedModule
    modules: Sequence[NamedModule]
    layout: Layout
    config: Config
    head_dim: int | None = None

    @property
    def name(self) -> str:
        """The prefix of its tensors' names."""
        return self.module.prefix

    @property
    def projections(self) -> dict[str, str]:
        """The name of the module that projects q, k, v and o, by role."""
        return {
            role: full.rpartition(".")[0]
            for full, local in self.module.tensors.items()
            for role in "qkvo"
            if f"w{role}" in self.layout.patterns[local].tensors
        }

    def sizes(self, state: Mapping[str, TensorHeader]) -> Sizes:
        """Return the size of every axis.

        Raises:
            OptionError, ShapeError: tensors that do not fit the layout and the config.
        """
        shapes = {local: tuple(state[name].shape) for name, local in self.module.tensors.items()}
        try:
            sizes = self.layout.sizes(shapes, self._counts)
        except (OptionError, ShapeError):
            if self.head_dim is None:
                raise
            sizes = {}
        if self.head_dim in (None, sizes.get("head_dim")):
            return sizes
        counts = {name: n for name, n in self._counts.items() if name not in ("heads", "kv_heads")}
        return self.layout.sizes(shapes, {**counts, "head_dim": self.head_dim})

    def read(self, state: Mapping[str, Tensor]) -> State:
        """Return the canonical tensors that this module stores by itself."""
        stored = {local: state[name] for name, local in self.module.tensors.items()}
        return self.layout.read(stored, sizes=self.sizes(state))

    def layer(self, state: Mapping[str, Tensor], **options: Any) -> Attention:
        """Return the attention as a layer; see `headwise.checkpoints.attention`."""
        sizes = self.sizes(state)
        return attention_from_state(
            self.module, self.modules, state, self.layout, self.config, sizes, **options
        )

    @property
    def _counts(self) -> dict[str, int]:
        sides = [side for side in ("encoder", "decoder") if side in self.name.split(".")]
        count = self.config.get(f"{sides[0]}_attention_heads") if sides else None
        stated = configs.read_stated_counts(self.config)
        if (cut := self.config.get(configs.CUT)) is not None:
            same = (x for n, x in cut["heads"].items() if f".{self.name}".endswith(f".{n}"))
            return stated | dict(
                zip(("heads", "kv_heads", "head_dim"), next(same, ()), strict=False)
            )
        return stated | ({"heads": count} if isinstance(count, int) else {})


def is_same_branch(first: str, second: str) -> bool:
    """True if two names are of one module, or of a module and of a part of it.

    Labels of a scan may have the number of a run behind the name. A second name of "", which is a
    whole model, is none of a part.
    """
    mine, theirs = (
        [x for x in name.partition(" (")[0].split(".") if x] for name in (first, second)
    )
    shorter = min(len(mine), len(theirs))
    return mine[:shorter] == theirs[:shorter] and (bool(theirs) or not mine)


HEAD_DIMS = (
    "head_dim",
    "attention_head_size",
    "head_size",
    "key_value_proj_dim",
)  # of modules in memory


def has_heads(module: NamedModule, state: Mapping[str, TensorHeader]) -> bool:
    """False for attention of which a bias is left, in the form "code" of a cut."""
    return not any(0 in state[name].shape for name in module.tensors)


def find_model_places(model: nn.Module) -> list[Place]:
    """Return the attention modules of a model of transformers in memory; see `find_places`."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", dict[str, Any])
    places = find_places(model.state_dict(), to_dict())
    return [replace(place, head_dim=_stated_head_dim(model, place)) for place in places]


def _stated_head_dim(model: nn.Module, place: Place) -> int | None:
    owners = [name.rpartition(".")[0].rpartition(".")[0] for name in place.module.tensors]
    for path in dict.fromkeys([place.name.rstrip("."), *owners]):
        stated = vars(model.get_submodule(path))
        if (width := next((stated[n] for n in HEAD_DIMS if n in stated), None)) is not None:
            return int(width)
    return None


def find_places(state: Mapping[str, TensorHeader], config: Config) -> list[Place]:
    """Return the attention modules of a model; none where no layout of the catalogue fits."""
    name = configs.layout_name(config) if config else None
    if name is None:
        return []
    layout = registry.layout(name)
    modules = [m for m in find_modules(layout, state) if m.tensors and has_heads(m, state)]
    if not modules:
        layout, modules = _find_modules_by_other_names(layout, state)
    # GPT-2's cross attention has the names of its self attention, and q_attn beside them.
    known = [m for m in modules if m.place.role or not find_unlisted_tensors_of_module(m, layout)]
    return [
        Place(module, modules, configs.layout_in_layer(layout, config, module.layer), config)
        for module in known
    ]


def _find_modules_by_other_names(
    layout: Layout, state: Mapping[str, TensorHeader]
) -> tuple[Layout, list[NamedModule]]:
    """Return the modules by the names of another layout, with the function of this one.

    transformers 5 gives the modules of some models other names than their files have.
    """
    readings = [
        (sum(len(module.tensors) for module in modules), other, modules)
        for other in registry.layouts_by_name().values()
        if other.required
        and (
            modules := [m for m in find_modules(other, state) if m.tensors and has_heads(m, state)]
        )
    ]
    _, other, modules = max(readings, key=lambda each: each[0], default=(0, layout, []))
    return replace(other, function=layout.function), modules
