"""`load_attention`: one attention layer from a checkpoint, proved against its class."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from headwise.checkpoints import config as config_json
from headwise.checkpoints import description as descriptions
from headwise.checkpoints.attention import MAX_NAMES
from headwise.checkpoints.description import COUNTS, Checkpoint, open_checkpoint
from headwise.checkpoints.fields import Config
from headwise.checkpoints.inputs import find_field
from headwise.checkpoints.places import has_heads
from headwise.checkpoints.proof import Probe, ProbedClass, Proof, StirredTensors
from headwise.checkpoints.readings import StoredReading
from headwise.checkpoints.skeleton import NotRunError, Skeleton
from headwise.checkpoints.source import CheckpointSource
from headwise.checkpoints.transformers import UntrustedCodeError, find_trusted_code
from headwise.checkpoints.turns import fit_rotation
from headwise.errors import HeadwiseError, MissingExtraError, OptionError
from headwise.function.spec import AttentionSpec, RotaryRule
from headwise.layers.attention import Attention
from headwise.layouts import registry
from headwise.layouts._layout import Layout
from headwise.layouts.modules import (
    NamedModule,
    find_modules,
    find_unlisted_tensors_of_module,
    may_be_of_layout,
)
from headwise.support.arguments import RENAMED_COUNTS, explain_arguments
from headwise.support.memory import available_memory
from headwise.support.text import human_bytes, list_some

ATTENTION = re.compile(r"(?!.*norm).*att[^.]*\..*weight$", re.IGNORECASE)  # names of its weights
COPIES = 4  # of an attention's tensors in float64, that a proof holds at once


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
    inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Attention:
    """Return one attention layer of a stored model, in the dtype of its file.

    The settings that no tensor holds come from the metadata of the file, or from its config.json.
    The mask is an argument of the call: a decoder needs ``Mask.causal()``.
    Where transformers has the model's class, the layer must give its numbers on several inputs, as
    the repr says. A model_type that the catalogue lacks loads if one layout does.
    A vision tower takes ``positions`` as its class gives them to its rotation, (axes, batch,
    tokens), and a mask by which the images of one row do not see each other.

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
        inputs: arguments for a call of the model's class, on which the proof runs as well: for a
            class that does not run on the random inputs that headwise makes up.
        options: arguments of `Attention` that override the file's, such as ``window=(3, None)``.

    Raises:
        CheckpointError: the path leads to no weights, or its metadata does not fit its tensors.
        OptionError: no such layer, a setting is stated nowhere, or other numbers than the class.
    """
    counts = dict(zip(COUNTS, (heads, kv_heads, head_dim, rotary_width), strict=True))
    opened = open_checkpoint(Path(path), counts, config=config, trusts_code=trust_remote_code)
    opened = replace(opened, inputs=inputs or {})
    return StoredLayers(opened, options, layout, proof).load(layer, prefix)


# ---- proof --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StoredLayers:
    """The attention layers of a checkpoint; each kind of layer is proved once.

    Attributes:
        opened: the checkpoint.
        options: arguments of `Attention` that override the file's.
        layout: that of the caller; None for the one that the file names.
        proof: False to load without running the class.
        proved: what was proved, with the function of the layer.
    """

    opened: Checkpoint
    options: Mapping[str, Any] = field(default_factory=dict)
    layout: str | Layout | None = None
    proof: bool = True
    proved: list[tuple[ProvedReading, AttentionSpec]] = field(default_factory=list)

    def load(self, layer: int, prefix: str | None = None) -> Attention:
        """Return one layer; the arguments and the errors are those of `load_attention`."""
        for proved, spec in self.proved:
            alike = proved.of_module(layer, prefix)
            if alike is not None and (loaded := alike.layer(self.options)).spec == spec:
                return loaded
        stored = _select_layout(self.opened, self.layout)
        if stored is None:
            readings = _readings_that_fit(self.opened, layer, prefix) if self.proof else []
            for reading in readings:
                self._require_scores_of_a_layer(reading.module)
            return self._load_unlisted(readings)
        if self.proof and self.layout is None and self.opened.description is None:
            listed = find_modules(stored, self.opened.source.headers)
            if prefix is not None:  # may be that of a tower beside the model
                listed = _match_modules(listed, layer, prefix)
            if not listed and (others := _readings_that_fit(self.opened, layer, prefix)):
                return self._load_unlisted(others)
        module, modules = _select_module(self.opened.source, stored, layer, prefix)
        self._require_scores_of_a_layer(module)
        reading = StoredReading(self.opened, stored, module, modules)
        if not self.proof:
            return reading.layer(self.opened.source, **self.options)
        return self._load_listed(reading)

    def _require_scores_of_a_layer(self, module: NamedModule) -> None:
        """Raise OptionError where a module's tensors add to the scores what no layer has."""
        held = (name for name in self.opened.source.headers if name.startswith(module.prefix))
        form = None if "score_bias" in self.options else registry.find_score_form(held)
        if form is not None:
            raise OptionError(
                saw=f"{module.prefix}: {registry.describe_score_form(*form)}",
                needed="scores of q.k, with a score bias that a layer has",
                do=f"use the model's own class; {registry.AS_DENSE_BIAS}",
            )

    def _load_listed(self, reading: StoredReading) -> Attention:
        """Return the layer that the catalogue names, proved where its class runs here.

        Where only the config names the layout, a tower beside the model may have another.
        """
        source, module = self.opened.source, reading.module
        try:
            trial = LoadTrial.of(reading, self.options)
        except (NotRunError, MissingExtraError, UntrustedCodeError) as error:
            layer = reading.layer(source, **self.options)
            layer.proof = str(Proof(reason=_reason(error)))
            return layer
        if (proved := trial.find_proved(reading)) is not None:
            return self._keep(proved, proved.layer(self.options))
        if self.layout is None and self.opened.description is None:
            with suppress(OptionError):
                fitting = _readings_that_fit(self.opened, module.layer, module.prefix)
                return self._load_unlisted(fitting)
        reading.layer(source, **self.options)  # raises where config and tensors make no layer
        raise trial.unequal_error([reading])

    def _load_unlisted(self, readings: Sequence[StoredReading]) -> Attention:
        """Return the only layer that gives the numbers of the class, of all layouts that fit."""
        if not readings:
            raise _unknown_layout_error(self.opened)
        layers: list[tuple[ProvedReading, Attention]] = []
        trials: dict[tuple[str, ...], LoadTrial] = {}
        for reading in readings:
            try:
                if reading.key not in trials:
                    trials[reading.key] = LoadTrial.of(reading, self.options)
            except (NotRunError, MissingExtraError) as error:
                raise _unknown_layout_error(self.opened, _reason(error)) from None
            if (proved := trials[reading.key].find_proved(reading)) is not None:
                layer = proved.layer(self.options)
                if not any(_is_same_layer(layer, other) for _, other in layers):
                    layers.append((proved, layer))
        if len(layers) == 1:
            return self._keep(*layers[0])
        if not layers and any(reading.before for reading in readings):
            raise _unknown_layout_error(self.opened)
        if not layers:
            raise next(iter(trials.values())).unequal_error(readings)
        names = " and ".join(proved.reading.stored.name for proved, _ in layers)
        raise OptionError(
            saw=f"{self.opened.source.path} gives the numbers of its class as {names}",
            needed="one layout: these layers differ, and no probe shows in what",
            do="pass layout=... with the one that is meant",
        )

    def _keep(self, proved: ProvedReading, layer: Attention) -> Attention:
        self.proved.append((proved, layer.spec))
        return layer


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
        skeleton: the model, without parameters.
        options: the caller's.
        outcomes: name of a reading -> the reading, the probes that it passed, and the reason why it
            is refused.
        parted: readings that part before any setting is nearer, each with its function.
    """

    probed: ProbedClass
    probes: list[Probe]
    state: StirredTensors
    skeleton: Skeleton
    options: Mapping[str, Any]
    outcomes: dict[str, tuple[StoredReading, int, str]]
    parted: list[tuple[str, RotaryRule | None, AttentionSpec]] = field(default_factory=list)

    @property
    def against(self) -> str:
        """The name of the class."""
        return type(self.skeleton.attention).__name__

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
        code = find_trusted_code(source.path, config, trusted=reading.opened.trusts_code)
        headers = source.headers
        needed = COPIES * 8 * sum(prod(headers[name].shape) for name in reading.module.tensors)
        if needed > (free := available_memory()):
            raise NotRunError(
                f"a proof takes {human_bytes(needed)}, and {human_bytes(free)} are left"
            )
        state = StirredTensors(source)
        tensors, roles = reading.of_class(state)
        if broken := next((n for n, x in tensors.items() if not x.isfinite().all()), None):
            raise NotRunError(f"{broken} holds NaN or infinite numbers")
        probed = ProbedClass(tensors, roles, code, {*options}, reading.opened.inputs)
        probes, skeleton = probed.record_all(config)
        usual = {name: x for name, x in options.items() if name not in ("dtype", "device")}
        return cls(probed, probes, state, skeleton, usual, {})

    def find_proved(self, reading: StoredReading) -> ProvedReading | None:
        """Return the first variant of a reading that is proved; None where none is."""
        for variant in reading.vary(self.rotation):
            if (proof := self.prove(variant)) is not None and self._is_whole(variant):
                return ProvedReading(variant, self.probes[0].config, proof, self.skeleton)
        return None

    @cached_property
    def rotation(self) -> RotaryRule | None:
        """The rotation by several axes that the class shows; None for none, or for the caller's."""
        turns = [p.call.turn for p in self.probes if p.call.turn is not None and not p.is_near]
        theta = find_field(self.probes[0].config, "rope_theta") or 10_000.0
        return None if "rotary" in self.options else fit_rotation(turns, float(theta))

    def prove(self, reading: StoredReading) -> Proof | None:
        """Return the proof of a reading; None where it gives other numbers, or makes no layer."""
        built: Config | None = None
        layer: Attention | None = None
        for number, probe in enumerate(self.probes):
            try:
                if probe.config is not built:
                    layer = None  # before another takes as much memory
                    built, layer = probe.config, self._build(reading, probe.config)
                assert layer is not None
                function = reading.stored.name, reading.rotation, layer.spec
                if number == 0 and function in self.parted:  # as another variant has it
                    return None
                parted = probe.find_parted_stage(layer)
            except HeadwiseError as error:
                self.outcomes[reading.name] = reading, number, error.saw
                return None
            if parted is not None:
                words = f"{parted} differ from {self.against} on {probe.name}"
                self.outcomes[reading.name] = reading, number, words
                if probe.config is self.probes[0].config:
                    self.parted.append(function)
                return None
        calls = [probe.call for probe in self.probes]
        names = (re.split(r"\.(?=[^.]*$)", name)[0] for name in reading.before)
        return Proof(
            behind=tuple(dict.fromkeys(names)),
            against=self.against,
            probes=len(calls),
            tokens=max(call.x.shape[1] for call in calls),
            has_value_source=any(call.value_source is not None for call in calls),
        )

    def _is_whole(self, reading: StoredReading) -> bool:
        """True if each tensor that the layout lacks acts on inputs of projections, and only there.

        Each is changed: then such an input changes, and the layer still gives the class's numbers.
        """
        for local in reading.before:
            name = f"{reading.module.prefix}{local}"
            tensors = dict(self.probed.tensors)
            noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(0))
            tensors[name] = tensors[name] + noise
            probes, _ = replace(self.probed, tensors=tensors).record_all(reading.opened.config)
            moved = replace(self, probes=probes)
            pairs = zip(self.probes, probes, strict=True)
            if any(a.call.has_inputs_of(b.call) for a, b in pairs) or moved.prove(reading) is None:
                self.outcomes[reading.name] = reading, 0, f"{name} acts on more than its inputs"
                return False
        return True

    def _build(self, reading: StoredReading, config: Config) -> Attention:
        options = {"dtype": torch.float64, **self.options}
        return reading.layer(self.state, of_class=config, counts=self.skeleton.counts, **options)

    def _list_unread_fields(self, reading: StoredReading, probe: Probe) -> list[str]:
        """Return the fields of the config that act on the class, and not on a reading."""
        config = self.probes[0].config
        spec = self._build(reading, config).spec

        def is_read(changed: Config) -> bool:
            try:
                return self._build(reading, changed).spec != spec
            except HeadwiseError:
                return True

        return self.probed.list_live_fields(config, probe, is_read)

    def unequal_error(self, readings: Sequence[StoredReading]) -> OptionError:
        """Return the error for a module that no reading gives."""
        first, total = readings[0], len(self.probes)
        reading, passed, why = max(self.outcomes.values(), key=lambda each: each[1])
        name, is_layer = reading.name, " differ from " in why
        config, others = first.opened.config, len(self.outcomes) - 1
        rest = f"; {others} other readings part as well" if others else ""
        fields = self._list_unread_fields(reading, self.probes[passed]) if is_layer else []
        if fields:
            rest += f"; the layer does not read {list_some(fields, MAX_NAMES)}, which changes them"
        return OptionError(
            saw=f"{first.module.prefix} of a {config['model_type']} model: as {name}, {why}, after "
            f"{passed} of {total} probes{rest}",
            needed=f"a layout and settings that give the numbers of {self.against}",
            do="use the model's own class"
            + ("; proof=False loads it all the same" if config_json.layout_name(config) else ""),
        )


@dataclass(frozen=True, eq=False)
class ProvedReading:
    """A reading that is proved for one module, and for all modules of its kind.

    Attributes:
        reading: with the module on which it was tried.
        config: that with which the class ran.
        proof: the outcome.
        skeleton: the model of the class, which tells the kinds of its modules apart.
    """

    reading: StoredReading
    config: Config
    proof: Proof
    skeleton: Skeleton

    def layer(self, options: Mapping[str, Any]) -> Attention:
        """Return the layer, with the words of the proof."""
        source = self.reading.opened.source
        counts = self.skeleton.counts
        layer = self.reading.layer(source, of_class=self.config, counts=counts, **options)
        layer.proof = str(self.proof)
        return layer

    def of_module(self, layer: int, prefix: str | None = None) -> ProvedReading | None:
        """Return this reading of another module; None where it is of another kind, or several."""
        matches = _match_modules(self.reading.modules, layer, prefix)
        return self.of_module_like(matches[0]) if len(matches) == 1 else None

    def of_module_like(self, module: NamedModule) -> ProvedReading | None:
        """Return this reading of a module with equal names, shapes and settings of its class."""
        headers, mine = self.reading.opened.source.headers, self.reading.module
        shapes, others = (
            {local: tuple(headers[name].shape) for name, local in each.tensors.items()}
            for each in (mine, module)
        )
        kind, other = (self.skeleton.kind_of(each.tensors) for each in (mine, module))
        if shapes != others or kind is None or kind != other:
            return None
        return replace(self, reading=replace(self.reading, module=module))


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
    obstacle = registry.find_obstacle(headers := opened.source.headers)
    more = f"; not proved: {reason}" if reason else f": {obstacle.reason}" if obstacle else ""
    names = [f"`{n}`" for n in [n for n in headers if ATTENTION.match(n)] or headers]
    more = more or (f": no layout has {list_some(names)}" if names else "")
    do = "load_attention(path, inputs={...}) with arguments for a call of the class; or "
    return OptionError(
        saw=f"{opened.source.path} has {stated}{more}",
        needed="the layout of the weights",
        do=(do if reason else "")
        + "headwise.checkpoints.load_attention(path, layer=0, layout=...); headwise detect lists "
        "the layouts that fit",
    )


def _readings_that_fit(opened: Checkpoint, layer: int, prefix: str | None) -> list[StoredReading]:
    """Return the readings of a module whose layout has all of its tensors."""
    readings = []
    for stored, every in registry.find_modules_of_each(opened.source.headers):
        if stored.required:
            modules = [m for m in every if m.tensors]
            for module in _match_modules(modules, layer, prefix):
                lacking = find_unlisted_tensors_of_module(module, stored)
                before = tuple(name.removeprefix(module.prefix) for name in lacking)
                others = replace(module, beside=tuple(n for n in module.beside if n not in lacking))
                is_whole = stored.required <= {*module.tensors.values()}
                if is_whole and may_be_of_layout(others, stored):
                    readings.append(StoredReading(opened, stored, module, modules, before=before))
    readings = [each for each in readings if not each.before] or readings
    if len(names := dict.fromkeys(reading.module.prefix for reading in readings)) > 1:
        raise OptionError(
            saw=f"layer {layer} of {opened.source.path}, which {len(names)} modules have",
            needed=f"one module, among {list_some([*map(repr, names)], MAX_NAMES)}",
            do=f"load_attention(path, prefix={next(iter(names))!r}) in Python, or another of them",
        )
    return readings


def _match_modules(
    modules: Iterable[NamedModule], layer: int, prefix: str | None
) -> list[NamedModule]:
    return [m for m in modules if (m.layer == layer if prefix is None else m.prefix == prefix)]


def _select_module(
    source: CheckpointSource, layout: Layout, layer: int, prefix: str | None
) -> tuple[NamedModule, list[NamedModule]]:
    """Return the module of a layer or of a prefix, and all modules of the layout."""
    modules = [m for m in find_modules(layout, source.headers) if has_heads(m, source.headers)]
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
    matches = _match_modules(modules, layer, prefix)
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
