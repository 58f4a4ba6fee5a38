"""Ways to read an attention module of a checkpoint, and the layer that each one gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

from torch import Tensor

from headwise.checkpoints import config as config_json
from headwise.checkpoints.attention import ROUNDED, attention_from_state, find_shared_tables
from headwise.checkpoints.config import layout_in_layer, resolve
from headwise.checkpoints.description import Checkpoint
from headwise.checkpoints.fields import Config, ConfigFields
from headwise.checkpoints.skeleton import NotRunError
from headwise.checkpoints.source import CheckpointSource
from headwise.errors import HeadwiseError, OptionError
from headwise.function.rotary import Rotary
from headwise.function.spec import ABSENT, FROM_CONFIG, NormRule, Pairing, RotaryRule
from headwise.function.weights import FIRST, NORMS, bias_of
from headwise.layers.attention import Attention
from headwise.layouts import registry
from headwise.layouts._layout import Layout
from headwise.layouts.modules import NamedModule, find_modules
from headwise.layouts.plan import convert

# What classes decide for each layer in code, where their config alone does not say it.
NO_ROTATION, NO_WINDOW, TURNED = "no rotation", "no window", "turned by several places"
# Windows of w: w keys up to the query, or around it, w / 2 to both sides, or w to both sides.
WINDOWS: dict[str, Callable[[int], tuple[int, int | None]]] = {
    "a window": lambda w: (w - 1, None),
    "a window around each token": lambda w: ((w - 1) // 2, w // 2),
    "a two-sided window": lambda w: (w // 2, w // 2),
    "a window to each side": lambda w: (w, w),
}
_MAY_LACK = ("rotary", "score_bias", "qk_norm", "clip")  # parts that a layer may lack
_WORDS: tuple[tuple[str, ...], ...] = ((), (NO_WINDOW,), *((word,) for word in WINDOWS))
VARIANTS = (*_WORDS, *((NO_ROTATION, *words) for words in _WORDS))


@dataclass(frozen=True, eq=False)
class StoredReading:
    """One way to read an attention module of a checkpoint.

    Attributes:
        opened: the checkpoint.
        stored: the layout of its tensors.
        module: the module; ``modules`` are all of this layout.
        variant: words of `VARIANTS`.
        rotation: that of the class, where its angles show it; None for that of the config.
        before: tensors of the module that the layout lacks, without its prefix. The class may use
            them on the way to the inputs of its projections, as PVT reduces keys.
    """

    opened: Checkpoint
    stored: Layout
    module: NamedModule
    modules: Sequence[NamedModule]
    variant: tuple[str, ...] = ()
    rotation: RotaryRule | None = None
    before: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The layout and the variant, in words."""
        return ", ".join((self.stored.name, *self.variant))

    @property
    def key(self) -> tuple[str, ...]:
        """The names of the tensors, by which readings of the same ones share a trial."""
        return (*self.roles.values(), *self.module.tensors, *self.before)

    def vary(self, rotation: RotaryRule | None = None) -> Iterator[StoredReading]:
        """Yield this reading in all variants that may be another function."""
        if rotation is not None:
            for pairing in get_args(Pairing):  # of stored rows
                turned = (TURNED, f"{pairing} rows", NO_WINDOW)  # a window would be one of rows
                yield replace(self, variant=turned, rotation=replace(rotation, pairing=pairing))
        for words in VARIANTS:
            # Without a rotation, interleaved rows are the same function as those of another layout.
            if NO_ROTATION not in words or self.stored.rows != "interleaved":
                yield replace(self, variant=words)

    @cached_property
    def roles(self) -> dict[str, str]:
        """The name of a stored tensor of what each role is projected from its input by."""
        names = {
            tensor: full
            for full, local in self.module.tensors.items()
            for tensor in self.stored.patterns[local].tensors
        }
        held = {role: [names[x] for x in first if x in names] for role, first in FIRST.items()}
        roles = {role: of_role[0] for role, of_role in held.items() if of_role}
        return {"v": roles["k"], **roles} if "k" in roles else roles  # values may be keys

    def tensors(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the layer is made of, with tables that several modules share."""
        shared = find_shared_tables(self.stored, self.module, self.modules, state)
        before = (f"{self.module.prefix}{name}" for name in self.before)
        return {name: state[name] for name in (*self.module.tensors, *shared, *before)}

    def of_class(self, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the tensors as files of the class have them, and their `roles`.

        Raises:
            NotRunError: a description names another layout, which cannot be converted.
        """
        tensors, listed = self.tensors(state), config_json.layout_name(self.opened.config)
        if self.opened.description is None or listed in (None, self.stored.name):
            return tensors, self.roles
        target = registry.layout(listed)
        try:
            converted = convert(
                tensors, self.stored, target, accept=(), root=None, **self.opened.known
            )
        except HeadwiseError as error:
            raise NotRunError(
                f"transformers reads these weights as {listed}: {error.saw}"
            ) from None
        modules = [m for m in find_modules(target, converted) if m.layer == self.module.layer]
        return converted, replace(self, stored=target, module=modules[0]).roles

    def list_open_fields(self, config: Config) -> list[str]:
        """Return the parts of the function that neither the layout nor a config states."""
        function = replace(self.describe(config).function, window=ABSENT)
        if self.rotation is not None:
            function = replace(function, rotary=ABSENT)
        stated = vars(resolve(function, config, layer=self.module.layer))
        return [name for name in _MAY_LACK if stated[name] is FROM_CONFIG]

    def describe(self, config: Config) -> Layout:
        """Return the layout as this layer has it, without a rotation where the variant has none."""
        described = layout_in_layer(self.stored, config, self.module.layer)
        if self.rotation is not None:
            rotary = replace(self.rotation, theta=FROM_CONFIG, width=FROM_CONFIG)
            function = replace(described.function, rotary=rotary)
            return replace(described, function=function, rows=rotary.pairing)
        if NO_ROTATION in self.variant:
            described = replace(described, function=replace(described.function, rotary=ABSENT))
        return described

    def layer(
        self,
        state: Mapping[str, Tensor],
        *,
        of_class: Config | None = None,
        counts: Mapping[str, int] | None = None,
        **options: Any,
    ) -> Attention:
        """Return the layer; raise an OptionError where config and tensors do not make one.

        ``of_class`` is the config with which the class ran, and states all fields; without it,
        config.json has to state what the layout leaves open. ``counts`` are those of the class,
        for what the config does not state.
        """
        config, known = self.opened.config, self.opened.known
        if of_class is not None:
            config = ConfigFields.wrap(of_class)
            stated, counted = config_json.read_stated_counts(config), dict(counts or {})
            if "heads" in {**stated, **counted}:  # from which the width of a head follows
                counted.pop("head_dim", None)
            known = {**counted, **stated}
        headers, module = self.opened.source.headers, self.module
        before = {f"{module.prefix}{name}" for name in self.before}
        module = replace(module, beside=tuple(n for n in module.beside if n not in before))
        shapes = {local: headers[name].shape for name, local in module.tensors.items()}
        sizes = self.stored.sizes(shapes, known)
        described = self.describe(config)
        given: dict[str, Any] = {}
        if self.rotation is not None:
            given["rotary"] = Rotary.of(self.rotation)
        if NO_WINDOW in self.variant:
            given["window"] = None
        size, sides = config_json.find_window_field(config), {*WINDOWS} & {*self.variant}
        if size and sides:
            given["window"] = WINDOWS[sides.pop()](size)
        if of_class is not None:  # a field that nothing states: the proof tells if it is absent
            lacking = {*self.list_open_fields(config)}
            parts = {n for local in shapes for n in self.stored.patterns[local].tensors}
            if "qk_norm" in lacking and parts.intersection(NORMS):
                norm = NormRule("layer" if parts.intersection(map(bias_of, NORMS)) else "rms")
                described = replace(described, function=replace(described.function, qk_norm=norm))
                lacking.remove("qk_norm")
            given |= dict.fromkeys(lacking)
        if described.function.rotary and "rotary" not in {*options, *given}:
            _check_stated_rotation(self.opened.source, described, config)
        if getattr(described.function.score_bias, "before_scale", False):
            warnings.warn(f"{module.prefix}{ROUNDED}", stacklevel=4)
        return attention_from_state(
            module, self.modules, state, described, config, sizes, **{**given, **options}
        )


def _check_stated_rotation(source: CheckpointSource, layout: Layout, config: Config) -> None:
    """Raise OptionError without a config."""
    if not config:
        raise OptionError(
            saw=f"{source.path} has rotary {layout.name} attention and no config",
            needed="the theta of the rotation, which no tensor holds",
            do="pass rotary=Rotary(theta=...) with the model's theta, or config=...",
        )
