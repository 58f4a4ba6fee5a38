"""Weights as a caller gives them: a file, a folder or a state dict, with a config and counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.checkpoints.config import Config, Fields, known_counts, read_config
from headwise.checkpoints.detect import Detection
from headwise.checkpoints.detect import detect as by_names
from headwise.checkpoints.source import Source, open_source
from headwise.errors import OptionError
from headwise.layouts.layout import Layout
from headwise.layouts.registry import layout
from headwise.layouts.steps import Header
from headwise.support.integers import as_count

COUNTS = ("heads", "kv_heads", "head_dim", "rotary_width")
Given = str | Path | Mapping[str, Tensor]
Counts = Mapping[str, int | None]


@dataclass(frozen=True, eq=False)
class Weights:
    """Tensors by name, with what a config and a caller say of them.

    Attributes:
        title: the path; "the state dict" where there is none.
        tensors: of a file, mapped: read when it is asked for.
        config: as in config.json; empty where there is none.
        known: heads, kv_heads and so on.
    """

    title: str
    tensors: Mapping[str, Tensor]
    config: dict[str, Any]
    known: dict[str, int]

    @property
    def headers(self) -> Mapping[str, Header]:
        """Names, shapes and dtypes, without reading a tensor of a file."""
        return self.tensors.headers if isinstance(self.tensors, Source) else self.tensors

    @property
    def source(self) -> Source:
        """The file or folder.

        Raises:
            OptionError: these weights are in memory.
        """
        if isinstance(self.tensors, Source):
            return self.tensors
        raise OptionError(saw=self.title, needed="a file or a folder", do="save it first")

    def detection(self, **also: int) -> Detection:
        """The layouts that the weights may be in; ``also`` is known of them, too."""
        return by_names(self.headers, said=None, config=self.config, **{**also, **self.known})

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
            OptionError: there is none, or the config says another one, which fits the tensors.
        """
        found = layout(name)
        if (why := self.detection().refuted.get(found.name)) is not None:
            raise OptionError(
                saw=f"{{{parameter}}} {found.name}, where in {self._place} {why}",
                needed="one layout: read as another one, rows are moved to wrong places",
                do=f"leave out {{{parameter}}}, or mend the config",
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

    @property
    def _place(self) -> str:
        return str(self.tensors.folder) if isinstance(self.tensors, Source) else self.title


def weights_of(
    given: Given, counts: Counts, *, config: Config | None = None, title: str = "the state dict"
) -> Weights:
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
        source = open_source(Path(given))
        said = read_config(source.folder) if config is None else Fields.of(config)
        return Weights(str(given), source, said, known_counts(said, counts, place=source.folder))
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
    said = Fields.of(config or {})
    return Weights(title, given, said, known_counts(said, counts, place=Path(title)))


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
