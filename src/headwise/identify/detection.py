"""`detect`: the layouts that weights may be in, and the evidence for them.

A detection is one layout, or the list of those that the evidence cannot distinguish. The result is
never a guess: names and shapes of two layouts often coincide, and so do the first rows. Values
decide if the same weights are available in a known layout, and a run if a model has them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.checkpoints import config as configs
from headwise.checkpoints import description as descriptions
from headwise.checkpoints.config import Config
from headwise.checkpoints.fields import ConfigFields
from headwise.checkpoints.source import CheckpointSource
from headwise.errors import CheckpointError, OptionError, UndecidedError
from headwise.function.weights import State
from headwise.identify import candidates as grouping
from headwise.identify.candidates import CandidateLayout, LayoutGroup, query_and_kv_head_counts
from headwise.identify.results import shorten_lines
from headwise.layouts._layout import Layout
from headwise.layouts.equality import describe_difference
from headwise.layouts.pattern import Sizes
from headwise.layouts.plan import TensorHeader
from headwise.layouts.registry import Obstacle, find_obstacle, layout
from headwise.support.arguments import RENAMED_COUNTS, explain_arguments
from headwise.support.tensors import convert_to_int_or_none, tensors_of_arrays

NAMED = 3  # of the sizes that fit
SHOWN = 8  # tensors at fault, before the rest is counted


@dataclass(frozen=True)
class Detection:
    """Layouts that the weights of a file may be in.

    Attributes:
        candidates: the possible layouts, with reasons. Layouts that are the same map for these
            sizes and the same function form one group.
        refuted: layouts that fit the names and shapes, each with the reason why it is ruled out.
        unknown: a model_type in the config that is not in the catalogue: such a model may use known
            names for another function, so names and shapes decide nothing.
        contradiction: a sentence: the config names a model type whose layout is no candidate. Names
            and shapes then decide nothing either.
        damaged: if there are no candidates, the layouts in which only some modules are whole; each
            lists the tensors at fault.
        obstacle: if no layout fits, the reason and what to do; None where the reason is not known.
        misplaced: layouts that fit the names and shapes, but whose modules are at another place in
            their models. Only the metadata, the config, values or a run decide for one of them.
        compared: the evidence: "names", "shapes", then "metadata", "config", "values" or
            "behaviour".
    """

    candidates: tuple[tuple[CandidateLayout, ...], ...]
    refuted: Mapping[str, str]
    unknown: str | None = None
    contradiction: str | None = None
    compared: tuple[str, ...] = ("names", "shapes")
    damaged: tuple[tuple[CandidateLayout, ...], ...] = ()
    obstacle: Obstacle | None = None
    misplaced: tuple[LayoutGroup, ...] = ()

    @property
    def fitting(self) -> tuple[LayoutGroup, ...]:
        """The groups of candidates; the misplaced ones where there is no other."""
        return self.candidates or self.misplaced

    @property
    def layout(self) -> Layout | None:
        """The only layout; None for no layout, for several that differ or for a contradiction."""
        is_single = len(self.candidates) == 1 and self.unknown is None
        if self.contradiction is not None and not self.has_seen_values:
            return None
        return self.candidates[0][0].layout if is_single else None

    @property
    def has_seen_values(self) -> bool:
        """True if the values of the tensors, or outputs computed from them, were compared."""
        return not {"values", "behaviour"}.isdisjoint(self.compared)

    def __str__(self) -> str:
        return "\n".join(describe_detection(self, title="the checkpoint"))

    def to_json(self) -> dict[str, Any]:
        """Return the detection for JSON; layouts and sizes are given by name."""
        return {
            "layout": self.layout.name if self.layout else None,
            "candidates": _groups_to_json(self.candidates),
            "misplaced": _groups_to_json(self.misplaced),
            "refuted": dict(self.refuted),
            "unknown": self.unknown,
            "contradiction": self.contradiction,
            "compared": self.compared,
            "damaged": [
                {"layouts": [each.layout.name for each in group], "faults": group[0].faults}
                for group in self.damaged
            ],
        }

    def require_only_layout(self, *, file: str = "the file", parameter: str = "layout") -> Layout:
        """Return the only layout, or raise; a caller names a layout by ``parameter``.

        Raises:
            CheckpointError: only some modules are whole.
            UndecidedError: no layout fits, several fit, or the config contradicts the only one.
        """
        if self.layout is not None:
            return self.layout
        if self.damaged:
            faults = self.damaged[0][0].faults
            more = f", and {len(faults) - 1} more are at fault" if len(faults) > 1 else ""
            raise CheckpointError(
                saw=f"{file}, which would be in the layout "
                f"{' or '.join(_join_names_of_equal_layouts(self.damaged))}, but {faults[0]}{more}",
                needed="every attention tensor of every layer, in the shape of the layout",
                do="download the file again; headwise verify lists differences from another copy",
            )
        names = ", ".join(_join_names_of_equal_layouts(self.fitting))
        do = f"name the layout ({{{parameter}}}), or headwise detect with --against"
        if not self.fitting:
            saw = "which contains no attention layer of a known layout"
            needed = "the names and shapes of a layout that headwise layouts lists"
            do = f"name one of those layouts ({{{parameter}}}), or register your own"
            if self.obstacle is not None:
                saw, do = f"{saw}: {self.obstacle.reason}", self.obstacle.do
        elif self.contradiction is not None:
            saw = f"with the names and shapes of {names}, where {self.contradiction}"
            needed = "a config and tensors of the same model"
        elif self.unknown is not None:
            saw = f"of a {self.unknown} model, with the names and shapes of {names}"
            needed = "a known model_type: others may use the same names for another function"
        elif not self.candidates:
            saw = f"with the names and shapes of {names}, but at another place in the model"
            needed = "a place that a layout has: others may use the same names for other rows"
        else:
            saw = f"which may be in {len(self.candidates)} layouts: {names}"
            needed = "one layout: they are undecidable without a reference or a forward check"
            do = f"name it ({{{parameter}}}), or headwise detect with --reference or --against"
        raise UndecidedError(saw=f"{file}, {saw}", needed=needed, do=do, parameter=parameter)


def detect_by_names_and_shapes(
    headers: Mapping[str, TensorHeader],
    *,
    described: str | Layout | None = None,
    config: Config | None = None,
    **counts: int,
) -> Detection:
    """Detect the layouts that fit the names and shapes of tensors.

    The layout that the files describe decides among those that fit; if ``described`` is None, the
    config does. The config also rules out layouts of another function.

    Raises:
        OptionError: a rotary_width that no head can have.
    """
    described = None if described is None else layout(described)
    candidates = grouping.find_candidates(headers, counts, described)
    width = counts.get("rotary_width")
    head_dims = sorted({fit["head_dim"] for each in candidates for fit in each.fits})
    if width is not None and head_dims and (width % 2 or width > head_dims[-1]):
        shown = " or ".join(map(str, head_dims[-NAMED:]))
        raise OptionError(
            saw=f"rotary_width {width}, in a head_dim of {shown}",
            needed="an even number of channels, at most head_dim: they rotate in pairs",
            do="give {rotary_width} as the model has it, or leave it out",
            parameter="rotary_width",
        )
    detection = _narrow_by_metadata_and_config(candidates, described, config or {})
    if not candidates:
        return replace(detection, obstacle=find_obstacle(headers))

    def with_missing_layers(each: CandidateLayout) -> CandidateLayout:
        missing = descriptions.find_missing_layers(config or {}, each.modules, headers)
        return replace(each, faults=(*each.faults, *missing))

    groups = tuple(tuple(map(with_missing_layers, group)) for group in detection.fitting)
    if any(each.faults for group in groups for each in group):
        return replace(detection, candidates=(), misplaced=(), damaged=groups)
    return detection


def _narrow_by_metadata_and_config(
    candidates: list[CandidateLayout], described: Layout | None, config: Config
) -> Detection:
    by_config = None if described else configs.layout_name(config)
    stated, by = (described.name, "metadata") if described else (by_config, "config")
    reasons = {each.layout.name: _find_refutation(each, candidates, config) for each in candidates}
    refuted = {name: reason for name, reason in reasons.items() if reason}
    groups = grouping.group_equal_layouts(
        ((each,) for each in candidates if each.layout.name not in refuted), operator.eq
    )
    chosen = [g for g in groups if any(each.layout.name == stated for each in g)]
    more = {"metadata": described is not None, "config": bool(config)}
    compared = ("names", "shapes", *(name for name, is_there in more.items() if is_there))
    if not chosen:
        unknown = config.get("model_type") if stated is None else None
        against = None
        if by_config and groups:
            kind = configs.text_config(config).get("model_type", config.get("model_type"))
            why = refuted.get(by_config, f"the names or shapes are not those of {by_config}")
            against = f"the config says model_type {kind}, whose layout is {by_config}, but {why}"
        placed = tuple(g for g in groups if any(each.misplacement is None for each in g))
        misplaced = tuple(
            tuple(replace(e, reasons=(*e.reasons, f"place: {e.misplacement}")) for e in group)
            for group in groups
            if group not in placed
        )
        return Detection(placed, refuted, unknown, against, compared, misplaced=misplaced)
    others = (each for group in groups if group not in chosen for each in group)
    refuted |= {each.layout.name: f"the {by} says {stated}" for each in others}
    group = sorted(chosen[0], key=lambda each: each.layout.name != stated)
    return Detection((tuple(group),), refuted, compared=compared)


def _groups_to_json(groups: Iterable[LayoutGroup]) -> list[list[dict[str, Any]]]:
    return [
        [{"layout": e.layout.name, "sizes": e.sizes, "reasons": e.reasons} for e in group]
        for group in groups
    ]


def narrow_detection(
    detection: Detection, groups: Iterable[LayoutGroup], refuted: Mapping[str, str], *, by: str
) -> Detection:
    """Return the detection with only the groups that agree with more evidence.

    ``by`` is the evidence: "values" or "behaviour". Groups of the same map are joined, unless their
    functions conflict; what a function leaves open is no conflict.
    """
    joined = grouping.group_equal_layouts(groups, lambda a, b: not a.conflicts(b))
    compared, against = (*detection.compared, by), detection.contradiction
    obstacle = detection.obstacle
    return Detection(joined, refuted, None, against, compared, obstacle=obstacle)


def _find_refutation(
    candidate: CandidateLayout, candidates: Iterable[CandidateLayout], config: Config
) -> str | None:
    mine = {module.prefix for module in candidate.modules}
    for other in candidates:
        theirs = {module.prefix for module in other.modules}
        if mine < theirs:
            return f"{other.layout.name} has {len(theirs)} modules here, and it {len(mine)} of them"
    reasons = [
        configs.find_config_contradiction(config, candidate.layout.function, sizes)
        for sizes in candidate.fits
    ]
    return reasons[0] if all(reasons) else None


def describe_detection(detection: Detection, *, title: str) -> list[str]:
    """Return the detection as sentences; ``title`` is the name of the weights."""
    lines: list[str] = []
    names = _join_names_of_equal_layouts(detection.fitting or detection.damaged)
    if detection.layout is not None:
        same = " (the same map and function here)" if len(detection.candidates[0]) > 1 else ""
        lines.append(f"{title} is in the layout {names[0]}{same}")
        lines += [f"  {reason}" for reason in detection.candidates[0][0].reasons]
    elif detection.damaged:
        which = f"the layout {names[0]}" if len(names) == 1 else f"one of {len(names)} layouts"
        lines.append(f"{title} would be in {which}, if every layer were whole:")
        for group, name in zip(detection.damaged, names, strict=True):
            indent = "  " if len(names) == 1 else "    "
            lines += [f"  {name}"] if len(names) > 1 else []
            lines += [f"{indent}{line}" for line in shorten_lines(group[0].faults, SHOWN)]
    elif detection.fitting:
        lines.append(_explain_why_undecided(detection, title))
        for group, name in zip(detection.fitting, names, strict=True):
            lines += [f"  {name}", *(f"    {reason}" for reason in group[0].reasons)]
    elif detection.refuted:
        lines.append(f"{title} is in none of the {len(detection.refuted)} layouts that fit it:")
    else:
        lines.append(f"{title} contains no attention layer of a known layout")
        if detection.obstacle is not None:
            lines += [f"  {line}" for line in detection.obstacle]
    if detection.candidates:
        others = (each for group in detection.misplaced for each in group)
        lines += [f"  not {each.layout.name}: {each.misplacement}" for each in others]
    lines += [f"  not {name}: {why}" for name, why in detection.refuted.items()]
    return lines + _describe_evidence(detection)


def _join_names_of_equal_layouts(groups: Iterable[LayoutGroup]) -> list[str]:
    return [" = ".join(each.layout.name for each in group) for group in groups]


def _explain_why_undecided(detection: Detection, title: str) -> str:
    if (against := detection.contradiction) is not None and not detection.has_seen_values:
        return f"{title} contradicts its config: {against}. Its names and shapes fit:"
    if (kind := detection.unknown) is not None:
        return f"{title} may be in the layout of a {kind} model, which is unknown; its names fit:"
    if not detection.candidates:
        return f"{title} has names and shapes of known layouts, at another place in the model:"
    by = "values" if detection.has_seen_values else "names and shapes"
    return f"{title} may be in {len(detection.candidates)} layouts, which {by} cannot tell apart:"


def _describe_evidence(detection: Detection) -> list[str]:
    if not detection.fitting:
        return []
    if detection.has_seen_values:
        against = detection.contradiction
        return [f"The config contradicts this: {against}."] if against is not None else []
    *most, last = detection.compared
    by = f"{', '.join(most)} and {last}"
    needed = (
        "a reference (--reference, the same weights elsewhere) or a forward check (--against, a "
        "model that runs)"
    )
    if detection.layout is not None:
        return [f"Only {by} were compared, values were not checked: for that, give {needed}."]
    return [f"Only {by} were compared. The layout is undecidable without {needed}."]


Given = str | Path | Mapping[str, Tensor | np.ndarray]
Counts = Mapping[str, int | None]


@dataclass(frozen=True, eq=False)
class GivenWeights:
    """Tensors by name, with the config and the counts of their model."""

    title: str  # the path, or "the state dict"
    tensors: Mapping[str, Tensor]  # tensors by name; those of a file are memory-mapped
    config: dict[str, Any]  # as in config.json; empty if there is none
    known: dict[str, int]  # counts that the config or the caller states: heads, kv_heads and others
    # The metadata of the files; None if they have none.
    description: descriptions.Description | None = None

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Names, shapes and dtypes; no tensor of a file is read."""
        return self.tensors.headers if isinstance(self.tensors, CheckpointSource) else self.tensors

    def detection(self, **counts: int) -> Detection:
        """Detect the layout by names, shapes, config and counts; ``counts`` add to the known."""
        described = None if self.description is None else self.description.layout
        counts = {**counts, **self.known}
        return detect_by_names_and_shapes(
            self.headers, described=described, config=self.config, **counts
        )

    def require_fitting_counts(self, detection: Detection, **counts: int) -> None:
        """Raise OptionError for counts that fit no layout where some would without them."""
        counts = {**counts, **self.known}
        if detection.fitting or detection.damaged or detection.refuted or not counts:
            return
        if fitting := detect_by_names_and_shapes(self.headers).fitting:
            names = [each.layout.name for group in fitting for each in group]
            raise OptionError(
                saw=", ".join(f"{name} {count}" for name, count in counts.items()),
                needed=f"counts that fit the shapes in {self.title}: its names are those of "
                f"{', '.join(names)}",
                do="give the model's own counts, in its config.json or in the call",
            )

    def require_uncontradicted_layout(self, name: str | Layout, parameter: str) -> Layout:
        """Return the layout of this name, unless the metadata or the config contradict it.

        Raises:
            OptionError: no layout has this name, or the weights are in another layout.
        """
        layout = descriptions.layout_with_described_function(name, self.description)
        detection = self.detection()
        why = detection.refuted.get(layout.name)
        fitting = {each.layout.name for group in detection.candidates for each in group}
        if self.description is not None and layout.name not in fitting:
            why = why or f"the metadata says {self.description.layout.name}"
        if why is not None:
            tensors = self.tensors
            path = tensors.folder if isinstance(tensors, CheckpointSource) else self.title
            raise OptionError(
                saw=f"{{{parameter}}} {layout.name}, where in {path} {why}",
                needed="the layout of the file: another one moves rows to wrong positions",
                do=f"leave out {{{parameter}}}" + (", or mend the config" if self.config else ""),
                parameter=parameter,
            )
        return layout

    def layout(self, name: str | None, parameter: str) -> Layout:
        """Return the layout of this name or, if ``name`` is None, the only possible one.

        Raises:
            OptionError: no layout has this name, or the config contradicts it or the counts.
            UndecidedError: no layout fits, or several do.
        """
        if name is not None:
            return self.require_uncontradicted_layout(name, parameter)
        detection = self.detection()
        self.require_fitting_counts(detection)
        return detection.require_only_layout(file=self.title, parameter=parameter)


def open_weights(
    given: Given,
    counts: Counts,
    *,
    config: Config | None = None,
    title: str = "the state dict",
    stored: str | None = None,
) -> GivenWeights:
    """Return weights with their config and counts; no tensor of a file is read.

    A count of None is that in the config, and a config of None that beside the file. ``title`` is
    the name of a state dict in messages, and ``stored`` the layout of shares of tensor-parallel
    processes; that which fits if None.

    Raises:
        CheckpointError: the path leads to no weights.
        OptionError: ``given``, ``config`` or a count has another type, or the config contradicts
            ``counts``.
    """
    counts = require_whole_counts(counts)
    if config is not None and not isinstance(config, Mapping):
        raise OptionError(
            saw=f"config of type {type(config).__name__}",
            needed="a mapping with the names of config.json",
            do="give config.to_dict()",
        )
    if isinstance(given, (str, Path)):
        opened = descriptions.open_checkpoint(Path(given), counts, config=config, stored=stored)
        return GivenWeights(
            str(given), opened.source, opened.config, opened.known, opened.description
        )
    is_mapping = isinstance(given, Mapping)
    if not is_mapping or not given:
        saw, needed = f"{title}, which is empty", "names and tensors of a model"
        if not is_mapping:
            saw = f"weights of type {type(given).__name__}"
            needed = "a path, or a state dict: names and tensors"
        do = "give model.state_dict(), or the path of a file or a folder"
        raise OptionError(saw=saw, needed=needed, do=do)
    state = tensors_of_arrays(given, title=title)
    fields = ConfigFields.wrap(config or {})
    known = configs.merge_counts(fields, counts, origin=Path(title))
    return GivenWeights(title, state, fields, known)


def require_whole_counts(counts: Counts) -> Counts:
    """Return the counts as Python's integers; NumPy's are accepted."""
    whole = {name: None if n is None else convert_to_int_or_none(n) for name, n in counts.items()}
    for name, count in counts.items():
        if count is not None and (isinstance(count, bool) or whole[name] is None):
            raise OptionError(
                saw=f"{name}={count!r:.40}",
                needed="a whole number",
                do=f"give {{{name}}} as an int, or leave it out if the config has it",
                parameter=name,
            )
    return whole


def narrow_by_reference_values(
    detection: Detection,
    state: Mapping[str, Tensor],
    reference: Detection,
    other: Mapping[str, Tensor],
    *,
    called: str = "the reference",
) -> Detection:
    """Return the detection with the candidates whose canonical tensors are the reference's.

    All rows of all modules are compared: often only the first head is the same in two layouts. If
    the number of heads or the rotary_width is open, every value that fits is tried.

    Tensors are read module by module, so they may be memory-mapped. ``other`` holds the same
    weights elsewhere; it may have several candidates, and reasons name it ``called``.
    """
    groups: list[LayoutGroup] = []
    refuted = dict(detection.refuted)
    split = split_candidate_by_sizes
    references = [each for group in reference.fitting for each in split(group[0])]
    for group in (*detection.candidates, *detection.misplaced):
        match = _find_first_match(split(group[0]), state, references, other, called)
        if isinstance(match, CandidateLayout):
            groups.append(tuple(each.with_sizes(match.fits[0]) for each in group))
        else:
            refuted |= {each.layout.name: match for each in group}
    return narrow_detection(detection, groups, refuted, by="values")


def _find_first_match(
    candidates: list[CandidateLayout],
    state: Mapping[str, Tensor],
    references: list[CandidateLayout],
    other: Mapping[str, Tensor],
    called: str,
) -> CandidateLayout | str:
    """Return the first candidate that equals a reference; else the reason why none does."""
    if not references:
        return f"{called} has no attention layer of a known layout"
    reasons = []
    names_heads = len({query_and_kv_head_counts(mine.fits[0]) for mine in candidates}) == 1
    for mine in candidates:
        for theirs in references:
            if query_and_kv_head_counts(mine.fits[0]) == query_and_kv_head_counts(theirs.fits[0]):
                reason = describe_difference_from_reference(
                    mine, state, theirs, other, called, names_heads=names_heads
                )
                if reason is None:
                    return mine
                reasons.append(reason)
    return reasons[0] if reasons else f"no number of heads fits both it and {called}"


def split_candidate_by_sizes(candidate: CandidateLayout) -> list[CandidateLayout]:
    """Return a candidate for each of its sizes and for every rotary_width that it may have.

    The largest width comes first. Widths end at 4: the two pairings of two channels are the same.
    """
    layout, candidates = candidate.layout, []
    is_open = layout.rows == "interleaved" and layout.function.is_rotary_width_open
    for sizes in candidate.fits:
        widths: list[Sizes] = [{}]
        if is_open and "rotary_width" not in sizes:
            whole = sizes["head_dim"] - sizes["head_dim"] % 2
            widths = [{"rotary_width": width} for width in range(whole, 2, -2)]
        candidates += [replace(candidate, fits=(sizes | width,)) for width in widths]
    return candidates


def describe_difference_from_reference(
    mine: CandidateLayout,
    state: Mapping[str, Tensor],
    theirs: CandidateLayout,
    other: Mapping[str, Tensor],
    called: str,
    *,
    names_heads: bool,
) -> str | None:
    """Return the first difference in attention of two readings, each of one size; None if equal."""
    if len(mine.modules) != len(theirs.modules):
        return f"it has {len(mine.modules)} modules, {called} {len(theirs.modules)}"
    conflicts = mine.layout.function.conflicts(theirs.layout.function)
    for name, (a, b) in conflicts.items():
        return f"{name}: {a}; {theirs.layout.name}, {called}'s layout, has {b}"
    for number, module in enumerate(mine.modules):
        x = read_canonical_state(mine, number, state)
        y = read_canonical_state(theirs, number, other)
        if parts := describe_difference(x, y, names_heads=names_heads):
            before = f"; before it, {number} of {len(mine.modules)} modules agree" if number else ""
            path = f"`{module.prefix}`" if module.prefix else "the module"
            return f"{path} differs from {called} in {parts}{before}"
    return None


def read_canonical_state(
    candidate: CandidateLayout, number: int, state: Mapping[str, Tensor]
) -> State:
    """Return the canonical tensors of a module, read with the first head counts that fit."""
    sizes, names = candidate.fits[0], candidate.modules[number].tensors
    known = {k: sizes[k] for k in ("heads", "kv_heads", "rotary_width") if k in sizes}
    return candidate.layout.unpack({local: state[n] for n, local in names.items()}, **known)


def narrow_by_running(detection: Detection, state: Mapping[str, Tensor], *run: Any) -> Detection:
    """Return the detection with the candidates that compute the same: see `compare_by_running`."""
    from headwise.identify.running import compare_by_running

    candidates = (*detection.candidates, *detection.misplaced)
    groups, refuted = compare_by_running(candidates, state, *run)
    return narrow_detection(detection, groups, {**detection.refuted, **refuted}, by="behaviour")


LENGTH = 48  # tokens of the input with which a model is run


@explain_arguments(RENAMED_COUNTS)
def detect(
    weights: Given,
    *,
    config: Config | None = None,
    reference: Given | None = None,
    against: str | Path | None = None,
    trust_remote_code: bool = False,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rotary_width: int | None = None,
) -> Detection:
    """Detect the layout that weights are in, or the layouts that they may be in.

    Names, shapes and the place of the modules often leave several layouts; then a reference or a
    model that runs decides. The result is never a guess: `layout` is None if nothing decides, if
    layers are missing, or if the config contradicts the names and shapes. The printed result is a
    list of sentences.

    Args:
        weights: a file of weights, a folder with them, or a state dict.
        config: as in config.json; that beside the file if None.
        reference: the same weights in a known layout; their values decide.
        against: a folder with a transformers model that has the same weights; its computation
            decides.
        trust_remote_code: True to run code in the folder of ``against``.
        heads: query heads, if no config has it.
        kv_heads: heads of keys and values.
        head_dim: channels of a head, in place of ``heads``.
        rotary_width: channels of a head that are rotated.

    Raises:
        CheckpointError: a path leads to no weights.
        OptionError: no weights, such as an empty state dict or another type; counts that the
            config contradicts, or that fit no layout.
        UndecidedError: no layout agrees with the model of ``against``, and at least one layout
            could not be compared with it.
    """
    counts = dict(zip(descriptions.COUNTS, (heads, kv_heads, head_dim, rotary_width), strict=True))
    given = open_weights(weights, counts, config=config)
    other = None if reference is None else open_weights(reference, counts, title="the reference")
    if against is None:
        return _detect_by_values(given, other, {})
    return _detect_by_running(given, other, against, counts, trusted=trust_remote_code)


def _detect_by_running(
    given: GivenWeights,
    other: GivenWeights | None,
    against: str | Path,
    counts: Counts,
    *,
    trusted: bool,
) -> Detection:
    if not isinstance(against, (str, Path)):
        raise OptionError(
            saw=f"against of type {type(against).__name__}",
            needed="the path of a folder with a transformers model",
            do="save the model with save_pretrained, and give that folder",
        )
    from headwise.checkpoints.transformers import load
    from headwise.identify.running import USE_REFERENCE
    from headwise.scanning.inputs import explain_failure_on_token_ids

    stored = load(Path(against), trust_remote_code=trusted)
    # The same weights have the same counts, so the counts of the model hold for both files.
    known = configs.merge_counts(stored.config, require_whole_counts(counts), origin=Path(against))
    detection = _detect_by_values(given, other, known)
    length = min(LENGTH, stored.positions or LENGTH)
    ids = torch.randint(stored.vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    inputs = stored.inputs(ids)
    with explain_failure_on_token_ids(str(against), length, do=USE_REFERENCE), torch.no_grad():
        stored.model(**inputs)
    return narrow_by_running(detection, given.tensors, stored.model, inputs, stored.config)


def _detect_by_values(
    given: GivenWeights, other: GivenWeights | None, known: dict[str, int]
) -> Detection:
    shared = known if other is None else known | other.known
    detection = given.detection(**shared)
    given.require_fitting_counts(detection, **shared)
    if other is None:
        return detection
    theirs = other.detection(**{**shared, **given.known})
    return narrow_by_reference_values(detection, given.tensors, theirs, other.tensors)
