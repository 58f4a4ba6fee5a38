"""`detect`: detection of the layout of weights by names, shapes, config, values or a run.

Weights are a file, a folder or a state dict, with a config and counts. Values decide if the same
weights are available in a known layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from headwise.checkpoints.config import Config, ConfigFields, merge_counts
from headwise.checkpoints.description import (
    COUNTS,
    Description,
    layout_with_described_function,
    open_checkpoint,
)
from headwise.checkpoints.source import CheckpointSource
from headwise.diagnosis.candidates import CandidateLayout, LayoutGroup, query_and_kv_head_counts
from headwise.diagnosis.detection import Detection, narrow_detection
from headwise.diagnosis.detection import detect_by_names_and_shapes as detect_by_names
from headwise.errors import OptionError
from headwise.function.weights import State
from headwise.layouts._layout import Layout
from headwise.layouts.equality import describe_differing_part, list_differing_tensors
from headwise.layouts.pattern import Sizes
from headwise.layouts.plan import TensorHeader
from headwise.support.arguments import RENAMED_COUNTS, explain_arguments
from headwise.support.tensors import convert_to_int_or_none, tensors_of_arrays

Given = str | Path | Mapping[str, Tensor | np.ndarray]
Counts = Mapping[str, int | None]


@dataclass(frozen=True, eq=False)
class GivenWeights:
    """Tensors by name, with the config and the counts of their model.

    Attributes:
        title: the path, or "the state dict".
        tensors: tensors by name; those of a file are memory-mapped.
        config: as in config.json; empty if there is none.
        known: counts that the config or the caller states: heads, kv_heads and others.
        description: the metadata of the files; None if they have none.
    """

    title: str
    tensors: Mapping[str, Tensor]
    config: dict[str, Any]
    known: dict[str, int]
    description: Description | None = None

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Names, shapes and dtypes; no tensor of a file is read."""
        return self.tensors.headers if isinstance(self.tensors, CheckpointSource) else self.tensors

    def detection(self, **counts: int) -> Detection:
        """Detect the layout by names, shapes, config and counts; ``counts`` add to the known."""
        described = None if self.description is None else self.description.layout
        counts = {**counts, **self.known}
        return detect_by_names(self.headers, described=described, config=self.config, **counts)

    def require_fitting_counts(self, detection: Detection, **counts: int) -> None:
        """Check that the counts fit a layout.

        Raises:
            OptionError: no layout fits, but some would without the counts.
        """
        counts = {**counts, **self.known}
        if detection.fitting or detection.damaged or detection.refuted or not counts:
            return
        fitting = detect_by_names(self.headers).fitting
        if fitting:
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
        layout, detection = layout_with_described_function(name, self.description), self.detection()
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

    Args:
        given: a file, an index, a folder, or name -> tensor.
        counts: of ``COUNTS``; None for those in the config.
        config: as in config.json; that beside the file if None.
        title: the name of a state dict in messages.
        stored: the layout of shares of tensor-parallel processes; that which fits if None.

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
        opened = open_checkpoint(Path(given), counts, config=config, stored=stored)
        return GivenWeights(
            str(given), opened.source, opened.config, opened.known, opened.description
        )
    state = _require_state_dict(given, title)
    fields = ConfigFields.wrap(config or {})
    return GivenWeights(title, state, fields, merge_counts(fields, counts, origin=Path(title)))


def _require_state_dict(given: object, title: str) -> Mapping[str, Tensor]:
    """Return a state dict; raise OptionError unless it has names and tensors."""
    if not isinstance(given, Mapping):
        raise OptionError(
            saw=f"weights of type {type(given).__name__}",
            needed="a path, or a state dict: names and tensors",
            do="give model.state_dict(), or the path of a file or a folder",
        )
    given = tensors_of_arrays(given, title=title)
    if not given:
        raise OptionError(
            saw=f"{title}, which is empty",
            needed="names and tensors of a model",
            do="give model.state_dict(), or the path of a file or a folder",
        )
    return given


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
    references = [
        each for group in reference.fitting for each in split_candidate_by_sizes(group[0])
    ]
    for group in (*detection.candidates, *detection.misplaced):
        match = _find_first_match(
            split_candidate_by_sizes(group[0]), state, references, other, called
        )
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
        x, y = (
            read_canonical_state(mine, number, state),
            read_canonical_state(theirs, number, other),
        )
        if names := list_differing_tensors(x, y):
            parts = "; ".join(
                describe_differing_part(name, x.get(name), y.get(name), names_heads=names_heads)
                for name in names
            )
            before = f"; before it, {number} of {len(mine.modules)} modules agree" if number else ""
            path = f"`{module.prefix}`" if module.prefix else "the module"
            return f"{path} differs from {called} in {parts}{before}"
    return None


def read_canonical_state(
    candidate: CandidateLayout, number: int, state: Mapping[str, Tensor]
) -> State:
    """Return the canonical tensors of a module, read with the first sizes that fit."""
    reading = candidate.layout_reading(candidate.fits[0], module=number)
    return reading.read({name: state[name] for name in reading.names})


LENGTH = 48  # tokens of the input with which a model is run


@explain_arguments(RENAMED_COUNTS)
def detect(
    weights: Given,
    *,
    config: Config | None = None,
    reference: Given | None = None,
    against: str | Path | None = None,
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
    counts = dict(zip(COUNTS, (heads, kv_heads, head_dim, rotary_width), strict=True))
    given = open_weights(weights, counts, config=config)
    other = None if reference is None else open_weights(reference, counts, title="the reference")
    if against is None:
        return _detect_by_values(given, other, {})
    return _detect_by_running(given, other, against, counts)


def _detect_by_running(
    given: GivenWeights, other: GivenWeights | None, against: str | Path, counts: Counts
) -> Detection:
    if not isinstance(against, (str, Path)):
        raise OptionError(
            saw=f"against of type {type(against).__name__}",
            needed="the path of a folder with a transformers model",
            do="save the model with save_pretrained, and give that folder",
        )
    import torch

    from headwise.checkpoints.transformers import load
    from headwise.diagnosis.running import USE_REFERENCE, narrow_by_running
    from headwise.scanning.inputs import explain_failure_on_token_ids

    stored = load(Path(against))
    # The same weights have the same counts, so the counts of the model hold for both files.
    known = merge_counts(stored.config, require_whole_counts(counts), origin=Path(against))
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
