"""`detect`: the layout that weights are in, by names, shapes, config, values or a run.

Weights are a file, a folder or a state dict, with a config and counts. Values decide where the same
weights lie elsewhere, in a layout that is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.checkpoints.config import Config, ConfigFields, merge_counts
from headwise.checkpoints.description import (
    COUNTS,
    Description,
    described_layout,
    open_checkpoint,
)
from headwise.checkpoints.source import CheckpointSource
from headwise.diagnosis.candidate_layouts import CandidateLayout, heads_of
from headwise.diagnosis.detection_result import Detection, decided
from headwise.diagnosis.detection_result import detect as by_names
from headwise.errors import OptionError
from headwise.layouts.axis_sizes import Sizes
from headwise.layouts.canonical import State
from headwise.layouts.conversion_steps import TensorHeader
from headwise.layouts.equality import differing, differing_part
from headwise.layouts.layout import Layout
from headwise.support.integers import as_count

Given = str | Path | Mapping[str, Tensor]
Counts = Mapping[str, int | None]


@dataclass(frozen=True, eq=False)
class GivenWeights:
    """Tensors by name, with what a config and a caller say of them.

    Attributes:
        title: the path; "the state dict" where there is none.
        tensors: of a file, mapped: read when it is asked for.
        config: as in config.json; empty where there is none.
        known: heads, kv_heads and so on.
        description: what the files state of themselves; None where they state nothing.
    """

    title: str
    tensors: Mapping[str, Tensor]
    config: dict[str, Any]
    known: dict[str, int]
    description: Description | None = None

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Names, shapes and dtypes, without reading a tensor of a file."""
        return self.tensors.headers if isinstance(self.tensors, CheckpointSource) else self.tensors

    def detection(self, **also: int) -> Detection:
        """The layouts that the weights may be in; ``also`` is known of them, too."""
        described = None if self.description is None else self.description.layout
        known = {**also, **self.known}
        return by_names(self.headers, described=described, config=self.config, **known)

    def require_fit(self, found: Detection, **also: int) -> None:
        """Refuse counts with which no layout fits, where layouts do without them.

        Raises:
            OptionError: see above.
        """
        counts = {**also, **self.known}
        if found.candidates or found.damaged or found.refuted or not counts:
            return
        fitting = by_names(self.headers).candidates
        if fitting:
            names = [one.layout.name for group in fitting for one in group]
            raise OptionError(
                saw=", ".join(f"{name} {count}" for name, count in counts.items()),
                needed=f"counts that fit the shapes in {self.title}: by its names it is in "
                f"{', '.join(names)}",
                do="give the model's own counts, in its config.json or in the call",
            )

    def named(self, name: str | Layout, parameter: str) -> Layout:
        """The layout of a name that was given.

        Raises:
            OptionError: there is none, or the metadata or the config says another one.
        """
        found, detection = described_layout(name, self.description), self.detection()
        why = detection.refuted.get(found.name)
        fitting = {one.layout.name for group in detection.candidates for one in group}
        if self.description is not None and found.name not in fitting:
            why = why or f"the metadata says {self.description.layout.name}"
        if why is not None:
            place = (
                self.tensors.folder if isinstance(self.tensors, CheckpointSource) else self.title
            )
            raise OptionError(
                saw=f"{{{parameter}}} {found.name}, where in {place} {why}",
                needed="one layout: read as another one, rows are moved to wrong places",
                do=f"leave out {{{parameter}}}" + (", or mend the config" if self.config else ""),
                parameter=parameter,
            )
        return found

    def layout(self, name: str | None, parameter: str) -> Layout:
        """The layout that the weights are in: as ``parameter`` names it, or the only one possible.

        Raises:
            OptionError: there is none, or what is said contradicts itself.
            UndecidedError: there are several.
        """
        if name is not None:
            return self.named(name, parameter)
        found = self.detection()
        self.require_fit(found)
        return found.require(file=self.title, parameter=parameter)


def weights_of(
    given: Given, counts: Counts, *, config: Config | None = None, title: str = "the state dict"
) -> GivenWeights:
    """Weights with their config and counts; of a file, no tensor is read.

    Args:
        given: a file, an index, a folder, or name -> tensor.
        counts: of ``COUNTS``; None where the config is to say it.
        config: as in config.json; that beside the file if None.
        title: what a state dict is called in messages.

    Raises:
        CheckpointError: the path leads to no weights.
        OptionError: ``given``, ``config`` or a count has another type, or the config contradicts
            ``counts``.
    """
    counts = whole_numbers(counts)
    if config is not None and not isinstance(config, Mapping):
        raise OptionError(
            saw=f"config of type {type(config).__name__}",
            needed="a mapping with the names of config.json",
            do="give config.to_dict()",
        )
    if isinstance(given, (str, Path)):
        opened = open_checkpoint(Path(given), counts, config=config)
        return GivenWeights(
            str(given), opened.source, opened.config, opened.known, opened.description
        )
    if not isinstance(given, Mapping):
        raise OptionError(
            saw=f"weights of type {type(given).__name__}",
            needed="a path, or a state dict: names and tensors",
            do="give model.state_dict(), or the path of a file or a folder",
        )
    for name, tensor in given.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise OptionError(
                saw=f"{title} with {name!r}, a {type(tensor).__name__}",
                needed="names and tensors",
                do="give the part that holds the tensors, or leave this entry out",
            )
    if not given:
        raise OptionError(
            saw=f"{title}, which is empty",
            needed="names and tensors of a model",
            do="give model.state_dict(), or the path of a file or a folder",
        )
    said = ConfigFields.of(config or {})
    return GivenWeights(title, given, said, merge_counts(said, counts, origin=Path(title)))


def whole_numbers(counts: Counts) -> Counts:
    """The same as Python's integers: NumPy's are taken, too."""
    whole = {name: None if n is None else as_count(n) for name, n in counts.items()}
    for name, count in counts.items():
        if count is not None and (isinstance(count, bool) or whole[name] is None):
            raise OptionError(
                saw=f"{name}={count!r:.40}",
                needed="a whole number",
                do=f"give {{{name}}} as an int, or leave it out where the config says it",
                parameter=name,
            )
    return whole


def by_values(
    detection: Detection,
    state: Mapping[str, Tensor],
    reference: Detection,
    other: Mapping[str, Tensor],
    *,
    called: str = "the reference",
) -> Detection:
    """The candidates whose canonical tensors are the reference's, all rows of all modules.

    The first head is often the same in several layouts; the others are not. Where nobody said how
    many heads there are, or how much of them turns, every number that fits is tried.

    Tensors are read module by module, so they may be memory-mapped. The reference is of the same
    weights elsewhere, which reasons call ``called``; of several candidates any may agree.
    """
    kept, refuted = [], dict(detection.refuted)
    known = [one for group in reference.candidates for one in _one_by_one(group[0])]
    for group in detection.candidates:
        found = _agreeing(_one_by_one(group[0]), state, known, other, called)
        if isinstance(found, CandidateLayout):
            kept.append(tuple(one.narrowed(found.fits[0]) for one in group))
        else:
            refuted |= {one.layout.name: found for one in group}
    return decided(detection, kept, refuted, by="values")


def _agreeing(
    read: list[CandidateLayout],
    state: Mapping[str, Tensor],
    known: list[CandidateLayout],
    other: Mapping[str, Tensor],
    called: str,
) -> CandidateLayout | str:
    """The first of the readings that one of the reference's agrees with; else why none does."""
    if not known:
        return f"{called} has no attention that is known"
    why = f"no number of heads fits both it and {called}"
    pairs = [
        (one, two)
        for one in read
        for two in known
        if heads_of(one.fits[0]) == heads_of(two.fits[0])
    ]
    for number, (one, two) in enumerate(pairs):
        found = _disagreement(one, state, two, other, called)
        if found is None:
            return one
        why = why if number else found
    return why


def _one_by_one(one: CandidateLayout) -> list[CandidateLayout]:
    """A candidate for each of its sizes, and for every rotary_width that it may have.

    All of the head comes first. Of two channels both pairings are one, so two decide nothing.
    """
    function, found = one.layout.function, []
    is_open = function.rotary == "interleaved" and function.rotary_width is None
    for sizes in one.fits:
        widths: list[Sizes] = [{}]
        if is_open and "rotary_width" not in sizes:
            whole = sizes["head_dim"] - sizes["head_dim"] % 2
            widths = [{"rotary_width": width} for width in range(whole, 2, -2)]
        found += [replace(one, fits=(sizes | width,)) for width in widths]
    return found


def _disagreement(
    one: CandidateLayout,
    state: Mapping[str, Tensor],
    known: CandidateLayout,
    other: Mapping[str, Tensor],
    called: str,
) -> str | None:
    """What is the first to differ; None where nothing does."""
    if len(one.modules) != len(known.modules):
        return f"it has {len(one.modules)} modules, {called} {len(known.modules)}"
    conflicts = one.layout.function.conflicts(known.layout.function)
    for name, (mine, theirs) in conflicts.items():
        return f"{name}: {mine}; {known.layout.name}, {called}'s layout, has {theirs}"
    for number, module in enumerate(one.modules):
        x, y = _canonical(one, number, state), _canonical(known, number, other)
        if found := differing(x, y):
            parts = "; ".join(differing_part(name, x.get(name), y.get(name)) for name in found)
            before = f"; before it, {number} of {len(one.modules)} modules agree" if number else ""
            place = f"`{module.prefix}`" if module.prefix else "the module"
            return f"{place} differs from {called} in {parts}{before}"
    return None


def _canonical(one: CandidateLayout, number: int, state: Mapping[str, Tensor]) -> State:
    reading = one.reading(one.fits[0], module=number)
    return reading.read({name: state[name] for name in reading.names})


LENGTH = 48  # tokens that a model is run with


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
    """Find the layout that weights are in, or the layouts that they may be in.

    Names and shapes often leave several; then a reference or a model that runs decides. The answer
    is never a guess: its `layout` is None where nothing decides, or where the config contradicts
    the names and shapes. Printed, the answer is a list of sentences.

    Args:
        weights: a file of weights, a folder with them, or a state dict.
        config: as in config.json; that beside the file if None.
        reference: the same weights elsewhere: their values decide.
        against: a folder with a model of transformers that has the same weights: what it computes
            decides.
        heads: query heads, where no config says it.
        kv_heads: heads of keys and values.
        head_dim: channels of a head, in place of ``heads``.
        rotary_width: channels of a head that are rotated.

    Raises:
        CheckpointError: a path leads to no weights.
        OptionError: counts that the config contradicts, or that fit no layout.
        UndecidedError: no layout agrees with the model of ``against``, and one could not be
            compared with it.
    """
    counts = dict(zip(COUNTS, (heads, kv_heads, head_dim, rotary_width), strict=True))
    given = weights_of(weights, counts, config=config)
    other = None if reference is None else weights_of(reference, counts, title="the reference")
    if against is None:
        return _by_values(given, other, {})
    return _by_run(given, other, against, counts)


def _by_run(
    given: GivenWeights, other: GivenWeights | None, against: str | Path, counts: Counts
) -> Detection:
    if not isinstance(against, (str, Path)):
        raise OptionError(
            saw=f"against of type {type(against).__name__}",
            needed="the path of a folder with a model of transformers",
            do="save the model with save_pretrained, and give that folder",
        )
    import torch

    from headwise.checkpoints.stored_model import load
    from headwise.diagnosis.detect_by_running import INSTEAD, by_behaviour
    from headwise.scanning.model_inputs import explain_token_failure

    stored = load(Path(against))
    # The same weights have the same counts: what is known of one is known of all.
    known = merge_counts(stored.config, whole_numbers(counts), origin=Path(against))
    found = _by_values(given, other, known)
    length = min(LENGTH, stored.positions or LENGTH)
    ids = torch.randint(stored.vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    inputs = stored.inputs(ids)
    with explain_token_failure(str(against), length, do=INSTEAD), torch.no_grad():
        stored.model(**inputs)
    return by_behaviour(found, given.tensors, stored.model, inputs, stored.config)


def _by_values(given: GivenWeights, other: GivenWeights | None, known: dict[str, int]) -> Detection:
    shared = known if other is None else known | other.known
    found = given.detection(**shared)
    given.require_fit(found, **shared)
    if other is None:
        return found
    theirs = other.detection(**{**shared, **given.known})
    return by_values(found, given.tensors, theirs, other.tensors)
