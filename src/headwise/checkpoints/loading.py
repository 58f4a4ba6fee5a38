"""`load_attention`: one attention layer from a checkpoint, proved against its class."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.checkpoints import config as config_json
from headwise.checkpoints import description as descriptions
from headwise.checkpoints.attention import (
    MAX_NAMES,
    attention_from_state,
    find_shared_tables,
)
from headwise.checkpoints.config import Config, layout_in_layer, resolve
from headwise.checkpoints.description import COUNTS, Checkpoint, open_checkpoint
from headwise.checkpoints.proof import (
    Probe,
    ProbedClass,
    Proof,
    StirredTensors,
    shrink_far_settings,
)
from headwise.checkpoints.skeleton import NotRunError
from headwise.checkpoints.source import CheckpointSource
from headwise.checkpoints.transformers import UntrustedCodeError, find_trusted_code
from headwise.errors import HeadwiseError, MissingExtraError, OptionError
from headwise.function.spec import ABSENT, FROM_CONFIG
from headwise.layers.attention import Attention
from headwise.layouts import registry
from headwise.layouts._layout import Layout
from headwise.layouts.modules import NamedModule, find_modules, find_unlisted_tensors_of_module
from headwise.support.arguments import RENAMED_COUNTS, explain_arguments
from headwise.support.memory import available_memory
from headwise.support.text import human_bytes, list_some

ROUNDED = (
    " rounds its distance bias to bfloat16 at each position; the layer does not:"
    " the two part from position 257 on, earlier for 16 or more heads"
)
# What classes decide for each layer in code, where their config alone does not say it.
NO_ROTATION, NO_WINDOW = "no rotation", "no window"
# Windows of w: w keys up to the query, w / 2 to both sides, or w to both sides.
WINDOWS: dict[str, Callable[[int], tuple[int, int | None]]] = {
    "a window": lambda w: (w - 1, None),
    "a two-sided window": lambda w: (w // 2, w // 2),
    "a window to each side": lambda w: (w, w),
}
COPIES = 4  # of an attention's tensors in float64, that a proof holds at once
_MAY_LACK = ("rotary", "score_bias", "qk_norm", "clip")  # parts that a layer may lack
_WORDS: tuple[tuple[str, ...], ...] = ((), (NO_WINDOW,), *((word,) for word in WINDOWS))
VARIANTS = (*_WORDS, *((NO_ROTATION, *words) for words in _WORDS))


@explain_arguments(RENAMED_COUNTS)
def load_attention(
    path: str | Path,
    *,
    layer: int = 0,
    prefix: str | None = None,
    layout: str | Layout | None = None,
    config: Config | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rotary_width: int | None = None,
    proof: bool = True,
    trust_remote_code: bool = False,
    **options: Any,
) -> Attention:
    """Return one attention layer of a stored model, in the dtype of its file.

    The settings that no tensor holds come from the metadata of the file, or from its config.json.
    The mask is an argument of the call: a decoder needs ``Mask.causal()``.
    Where transformers has the model's class, the layer must give its numbers on several inputs, as
    the repr says. A model_type that the catalogue lacks loads if one layout does.

    Args:
        path: a file of weights, an index, or a folder with them.
        layer: the number of the layer, from 0, as in the names of the tensors.
        prefix: the start of the module's tensor names, where a layer has several modules.
        layout: the layout of the file, where neither metadata nor config.json names it.
        config: the fields of config.json; those of the file if None.
        heads: query heads, where the file does not state them.
        kv_heads: key and value heads.
        head_dim: channels of a head, in place of ``heads``.
        rotary_width: channels of a head that are rotated.
        proof: False to load without running the class.
        trust_remote_code: True to prove the layer against code that is in the folder.
        options: arguments of `Attention` that override the file's, such as ``window=(3, None)``.

    Raises:
        CheckpointError: the path leads to no weights, or its metadata does not fit its tensors.
        OptionError: no such layer, a setting is stated nowhere, or other numbers than the class.
    """
    counts = dict(zip(COUNTS, (heads, kv_heads, head_dim, rotary_width), strict=True))
    opened = open_checkpoint(Path(path), counts, config=config, trusts_code=trust_remote_code)
    if (stored := _select_layout(opened, layout)) is not None:
        module, modules = _select_module(opened.source, stored, layer, prefix)
        reading = StoredReading(opened, stored, module, modules, opened.config)
        if not proof:
            return reading.layer(opened.source, **options)
        return _load_listed(reading, options, is_named=layout is not None)
    readings = _readings_that_fit(opened, layer, prefix) if proof else []
    return _load_unlisted(opened, readings, options)


@dataclass(frozen=True, eq=False)
class StoredReading:
    """One way to read an attention module of a checkpoint.

    Attributes:
        opened: the checkpoint.
        stored: the layout of its tensors.
        module: the module; ``modules`` are all of this layout.
        config: the fields of config.json; None for those of the model that runs in the proof.
        variant: words of `VARIANTS`.
    """

    opened: Checkpoint
    stored: Layout
    module: NamedModule
    modules: Sequence[NamedModule]
    config: Config | None
    variant: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The layout and the variant, in words."""
        return ", ".join((self.stored.name, *self.variant))

    @cached_property
    def roles(self) -> dict[str, str]:
        """The name of a stored tensor of each projection, by role."""
        roles = {
            role: full
            for full, local in self.module.tensors.items()
            for role in "qkvo"
            if f"w{role}" in self.stored.patterns[local].tensors
        }
        return {"v": roles["k"], **roles} if "k" in roles else roles  # values may be keys

    def tensors(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the layer is made of, with tables that several modules share."""
        shared = find_shared_tables(self.stored, self.module, self.modules, state)
        return {name: state[name] for name in (*self.module.tensors, *shared)}

    def config_of(self, probe: Probe, given: Collection[str] = ()) -> Config:
        """Return the fields of config.json for the model of a probe."""
        if self.config is None:
            return probe.config
        return shrink_far_settings(self.config, given) if probe.is_near else self.config

    def layer(
        self, state: Mapping[str, Tensor], *, config: Config | None = None, **options: Any
    ) -> Attention:
        """Return the layer; raise an OptionError where config and tensors do not make one."""
        if config is None:
            config = self.config or {}
        headers, module = self.opened.source.headers, self.module
        shapes = {local: headers[name].shape for name, local in module.tensors.items()}
        known = self.opened.known
        if self.config is None:
            known = config_json.read_stated_counts(config)
        sizes = self.stored.sizes(shapes, known)
        described = layout_in_layer(self.stored, config, module.layer)
        given: dict[str, Any] = {}
        if NO_ROTATION in self.variant:
            described = replace(described, function=replace(described.function, rotary=ABSENT))
        if NO_WINDOW in self.variant:
            given["window"] = None
        size, sides = config_json.find_window_field(config), {*WINDOWS} & {*self.variant}
        if size and sides:
            given["window"] = WINDOWS[sides.pop()](size)
        if self.config is None:  # a field that nothing states: the proof tells if it is absent
            function = replace(described.function, window=ABSENT)
            stated = vars(resolve(function, config, layer=module.layer))
            given |= {n: None for n in _MAY_LACK if stated[n] is FROM_CONFIG}
        if described.function.rotary and "rotary" not in {*options, *given}:
            _check_stated_rotation(self.opened.source, described, config)
        if getattr(described.function.score_bias, "before_scale", False):
            warnings.warn(f"{module.prefix}{ROUNDED}", stacklevel=4)
        return attention_from_state(
            module, self.modules, state, described, config, sizes, **{**given, **options}
        )


# ---- proof --------------------------------------------------------------------------------------


def _load_listed(
    reading: StoredReading, options: Mapping[str, Any], *, is_named: bool
) -> Attention:
    """Return the layer that the catalogue names, proved where its class runs here.

    Where only the config names the layout, a tower beside the model may have another.
    """
    source = reading.opened.source
    try:
        layer, problem = reading.layer(source, **options), None
    except OptionError as error:
        problem = error
    try:
        trial = LoadTrial.of(reading, options)
    except (NotRunError, MissingExtraError, UntrustedCodeError) as error:
        if problem is not None:
            raise problem from None
        layer.proof = str(Proof(reason=_reason(error)))
        return layer
    usual = [] if problem is not None else [reading]
    proved = trial.find_layer([*usual, *_vary(replace(reading, config=None))], options)
    if proved is not None:
        return proved
    refusal = problem or trial.unequal_error([reading])
    if is_named or reading.opened.description is not None:
        raise refusal
    fitting = _readings_that_fit(reading.opened, reading.module.layer, reading.module.prefix)
    try:
        return _load_unlisted(reading.opened, fitting, options)
    except OptionError:
        raise refusal from None


def _load_unlisted(
    opened: Checkpoint, readings: Sequence[StoredReading], options: Mapping[str, Any]
) -> Attention:
    """Return the only layer that gives the numbers of the class, of all layouts that fit."""
    if not readings:
        raise _unknown_layout_error(opened)
    proved: dict[str, Attention] = {}
    trials: dict[tuple[str, ...], LoadTrial] = {}
    for reading in readings:
        key = (*reading.roles.values(), *reading.module.tensors)
        try:
            if key not in trials:
                trials[key] = LoadTrial.of(reading, options)
        except (NotRunError, MissingExtraError) as error:
            raise _unknown_layout_error(opened, _reason(error)) from None
        layer = trials[key].find_layer(_vary(reading), options)
        if layer and not any(_is_same_layer(layer, other) for other in proved.values()):
            proved[reading.stored.name] = layer
    if len(proved) == 1:
        return next(iter(proved.values()))
    if not proved:
        raise next(iter(trials.values())).unequal_error(readings)
    raise OptionError(
        saw=f"{opened.source.path} gives the numbers of its class as {' and '.join(proved)}",
        needed="one layout: these layers differ, and no probe shows in what",
        do="pass layout=... with the one that is meant",
    )


def _vary(reading: StoredReading) -> Iterator[StoredReading]:
    """Yield a reading in all variants that may be another function."""
    for words in VARIANTS:
        # Without a rotation, interleaved rows are the same function as those of another layout.
        if NO_ROTATION not in words or reading.stored.rows != "interleaved":
            yield replace(reading, variant=words)


def _is_same_layer(first: Attention, second: Attention) -> bool:
    mine, theirs = first.state_dict(), second.state_dict()
    return (
        first.spec == second.spec
        and mine.keys() == theirs.keys()
        and all(torch.equal(x, theirs[name]) for name, x in mine.items())
    )


def _reason(error: Exception) -> str:
    if isinstance(error, UntrustedCodeError):
        return f"{error.saw}=True"
    return error.saw if isinstance(error, MissingExtraError) else str(error)


@dataclass(frozen=True, eq=False)
class LoadTrial:
    """Probes of one module's class, on which readings of its tensors are tried.

    Attributes:
        probed: the class, with the tensors of the module.
        probes: what it gave.
        state: the tensors on which it ran.
        against: the name of its class.
        options: the caller's.
        outcomes: name of a reading -> the reading, the probes that it passed, and the reason why it
            is refused.
    """

    probed: ProbedClass
    probes: list[Probe]
    state: StirredTensors
    against: str
    options: Mapping[str, Any]
    outcomes: dict[str, tuple[StoredReading, int, str]]

    @classmethod
    def of(cls, reading: StoredReading, options: Mapping[str, Any]) -> LoadTrial:
        """Run the class of a module.

        Raises:
            MissingExtraError: transformers is not installed.
            NotRunError: transformers has no class, or it does not run here.
            OptionError: the class is code that may not run, see `find_trusted_code`.
        """
        config, source = reading.opened.config, reading.opened.source
        if not config.get("model_type"):
            raise NotRunError("no config.json names a model_type")
        stored, listed = reading.stored.name, config_json.layout_name(config)
        if reading.opened.description is not None and listed not in (None, stored):
            raise NotRunError(f"transformers reads these weights as {listed}, and not as {stored}")
        code = find_trusted_code(source.path, config, trusted=reading.opened.trusts_code)
        headers = source.headers
        needed = COPIES * 8 * sum(prod(headers[name].shape) for name in reading.module.tensors)
        if needed > (free := available_memory()):
            raise NotRunError(
                f"a proof takes {human_bytes(needed)}, and {human_bytes(free)} are left"
            )
        state = StirredTensors(source)
        probed = ProbedClass(reading.tensors(state), reading.roles, code, {*options})
        probes, kind = probed.record_all(config)
        usual = {name: x for name, x in options.items() if name not in ("dtype", "device")}
        return cls(probed, probes, state, kind, usual, {})

    def find_layer(
        self, readings: Iterable[StoredReading], options: Mapping[str, Any]
    ) -> Attention | None:
        """Return the layer of the first reading that is proved; None where none is."""
        for reading in readings:
            if (proof := self.prove(reading)) is not None:
                config = reading.config_of(self.probes[0])
                layer = reading.layer(reading.opened.source, config=config, **options)
                layer.proof = str(proof)
                return layer
        return None

    def prove(self, reading: StoredReading) -> Proof | None:
        """Return the proof of a reading; None where it gives other numbers, or makes no layer."""
        built: Config | None = None
        layer: Attention | None = None
        for number, probe in enumerate(self.probes):
            try:
                if probe.config is not built:
                    layer = None  # before another takes as much memory
                    built, config = probe.config, reading.config_of(probe, self.options)
                    layer = self._build(reading, config)
                assert layer is not None
                parted = probe.find_parted_stage(layer)
            except HeadwiseError as error:
                self.outcomes[reading.name] = reading, number, error.saw
                return None
            if parted is not None:
                words = f"{parted} differ from {self.against} on {probe.name}"
                self.outcomes[reading.name] = reading, number, words
                return None
        tokens = max(probe.call.x.shape[1] for probe in self.probes)
        return Proof(against=self.against, probes=len(self.probes), tokens=tokens)

    def _build(self, reading: StoredReading, config: Config) -> Attention:
        options = {"dtype": torch.float64, **self.options}
        return reading.layer(self.state, config=config, **options)

    def _list_unread_fields(self, reading: StoredReading, probe: Probe) -> list[str]:
        """Return the fields of the config that act on the class, and not on a reading."""
        is_open = reading.config is None
        spec = self._build(reading, reading.config_of(self.probes[0])).spec

        def is_read(changed: Config) -> bool:
            try:
                return self._build(reading, changed).spec != spec
            except HeadwiseError:
                return True

        config = self.probes[0].config if is_open else reading.config
        return self.probed.list_live_fields(config or {}, probe, is_read)

    def unequal_error(self, readings: Sequence[StoredReading]) -> OptionError:
        """Return the error for a module that no reading gives."""
        first, total = readings[0], len(self.probes)
        reading, passed, why = max(self.outcomes.values(), key=lambda each: each[1])
        name, is_layer = reading.name, " differ from " in why
        kind, others = first.opened.config.get("model_type"), len(self.outcomes) - 1
        rest = f"; {others} other readings part as well" if others else ""
        fields = self._list_unread_fields(reading, self.probes[passed]) if is_layer else []
        if fields:
            rest += f"; the layer does not read {list_some(fields, MAX_NAMES)}, which changes them"
        return OptionError(
            saw=f"{first.module.prefix} of a {kind} model: as {name}, {why}, after {passed} of "
            f"{total} probes{rest}",
            needed=f"a layout and settings that give the numbers of {self.against}",
            do="use the model's own class"
            + ("; proof=False loads it all the same" if first.config is not None else ""),
        )


# ---- what to read -------------------------------------------------------------------------------


def _select_layout(opened: Checkpoint, layout: str | Layout | None) -> Layout | None:
    """Return the layout of the caller, the description or the config; None where none says."""
    description = opened.description
    if layout is not None:
        named = descriptions.layout_with_described_function(layout, description)
        if description is not None and description.layout.name != named.name:
            raise OptionError(
                saw=f"layout {named.name}, but {description.origin} says {description.layout.name}",
                needed="the layout of the file: another one puts rows into wrong places",
                do="leave out layout=...",
            )
        return named
    if description is not None:
        return description.layout
    name = config_json.layout_name(opened.config)
    return None if name is None else registry.layout(name)


def _unknown_layout_error(opened: Checkpoint, reason: str = "") -> OptionError:
    kind = opened.config.get("model_type")
    stated = f"the model_type {kind}, which the catalogue lacks" if kind else "no model_type"
    obstacle = registry.find_obstacle(opened.source.headers)
    more = f"; not proved: {reason}" if reason else f": {obstacle.reason}" if obstacle else ""
    return OptionError(
        saw=f"{opened.source.path} has {stated}{more}",
        needed="the layout of the weights",
        do="headwise.checkpoints.load_attention(path, layer=0, layout=...); headwise detect "
        "lists the layouts that fit",
    )


def _readings_that_fit(opened: Checkpoint, layer: int, prefix: str | None) -> list[StoredReading]:
    """Return the readings of a module whose layout has all of its tensors."""
    headers = opened.source.headers
    readings = []
    for stored in registry.layouts_by_name().values():
        if not stored.required:
            continue
        modules = [m for m in find_modules(stored, headers) if m.tensors]
        chosen = [
            m for m in modules if (m.layer == layer if prefix is None else m.prefix == prefix)
        ]
        for module in chosen:
            is_whole = stored.required <= {*module.tensors.values()}
            is_marked = {module.prefix + mark for mark in stored.marks}.issubset(module.beside)
            if is_whole and is_marked and not find_unlisted_tensors_of_module(module, stored):
                readings.append(StoredReading(opened, stored, module, modules, None))
    if len(names := dict.fromkeys(reading.module.prefix for reading in readings)) > 1:
        raise OptionError(
            saw=f"layer {layer} of {opened.source.path}, which {len(names)} modules have",
            needed=f"one module, among {list_some([*map(repr, names)], MAX_NAMES)}",
            do=f"load_attention(path, prefix={next(iter(names))!r}) in Python, or another of them",
        )
    return readings


def _select_module(
    source: CheckpointSource, layout: Layout, layer: int, prefix: str | None
) -> tuple[NamedModule, list[NamedModule]]:
    """Return the module of a layer or of a prefix, and all modules of the layout."""
    modules = find_modules(layout, source.headers)
    if not modules:
        obstacle = registry.find_obstacle(source.headers)
        why = "" if obstacle is None else f": {obstacle.reason}"
        raise OptionError(
            saw=f"{source.path} holds no attention in the layout {layout.name}{why}",
            needed=f"modules with {', '.join(sorted(layout.required))}",
            do="headwise detect names the layout of weights: pass it as layout=..."
            if obstacle is None
            else obstacle.do,
        )
    matches = [module for module in modules if module.layer == layer]
    if prefix is not None:
        matches = [module for module in modules if module.prefix == prefix]
    if len(matches) == 1:
        return matches[0], modules
    shown = matches or modules
    selection = f"layer {layer}" if prefix is None else f"prefix {prefix!r}"
    fault = f"where {layout.name} has {len(matches)} modules"
    numbers = sorted({module.layer for module in modules if module.layer is not None})
    if prefix is None and not matches and numbers:
        is_whole = len(numbers) == numbers[-1] - numbers[0] + 1
        span = f"{numbers[0]} to {numbers[-1]}" if is_whole else ", ".join(map(str, numbers))
        fault = f"which has the layers {span}"
    raise OptionError(
        saw=f"{selection} of {source.path}, {fault}",
        needed=f"one module, among {list_some([repr(m.prefix) for m in shown], MAX_NAMES)}",
        do=f"load_attention(path, prefix={matches[0].prefix!r}) in Python, or another of them"
        if matches
        else "change layer or prefix",
    )


def _check_stated_rotation(source: CheckpointSource, layout: Layout, config: Config) -> None:
    """Raise OptionError without a config."""
    if not config:
        raise OptionError(
            saw=f"{source.path} has rotary {layout.name} attention and no config",
            needed="the theta of the rotation, which no tensor holds",
            do="pass rotary=Rotary(theta=...) with the model's theta, or config=...",
        )
