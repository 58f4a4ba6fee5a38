"""`verify`: whether two sets of weights are the same function, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headwise.checkpoints.config import Config
from headwise.checkpoints.verify import Verification, lines_of
from headwise.checkpoints.verify import verify as compare
from headwise.diagnosis.outputs import Outputs, outputs_of_both
from headwise.diagnosis.readings import Named, readings
from headwise.diagnosis.weights import Counts, Given, Weights, weights_of
from headwise.errors import OptionError
from headwise.layouts.layout import Layout

SHOWN = 8  # differences of a kind, before the rest is counted


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Two sets of weights beside each other. True if they are the same function.

    Attributes:
        layouts: in which they were read; None where their configs contradict each other.
        notes: how that was decided, or why they are not the same.
        tensors: the comparison, tensor by tensor; None where ``layouts`` is.
        outputs: of each layer of both, where that was asked for.
    """

    layouts: tuple[Layout, Layout] | None
    notes: tuple[str, ...]
    tensors: Verification | None
    outputs: tuple[Outputs, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tensors) and all(layer.is_same for layer in self.outputs)

    @property
    def lines(self) -> list[str]:
        """The verdict in sentences, its reasons first."""
        lines = [] if self.layouts is None else [" against ".join(n.name for n in self.layouts)]
        notes = [*self.notes[:SHOWN]]
        if len(self.notes) > SHOWN:
            notes.append(f"and {len(self.notes) - SHOWN} more")
        notes += lines_of(self.tensors, most=SHOWN) if self.tensors is not None else []
        lines += [f"  {note}" for note in [*notes, *map(str, self.outputs)]]
        return [*lines, self._answer]

    @property
    def _answer(self) -> str:
        if self.tensors is None:
            return "Not the same: the configs contradict each other; no tensor was compared."
        if self:
            return f"The same function, byte for byte: {self.tensors}."
        if not self.tensors:
            return f"Not the same: {self.tensors}."
        others = sum(not layer.is_same for layer in self.outputs)
        return (
            f"Not the same: {self.tensors}, but {others} of {len(self.outputs)} layers have other "
            "outputs."
        )

    def __str__(self) -> str:
        return "\n".join(self.lines)


def verify(
    first: Given,
    second: Given,
    *,
    first_layout: str | Layout | None = None,
    second_layout: str | Layout | None = None,
    config: Config | None = None,
    outputs: bool = False,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rotary_width: int | None = None,
    progress: Callable[[str, int, int], None] = lambda _stage, _done, _total: None,
) -> Verdict:
    """Compare two sets of weights, in one layout or in two, byte for byte.

    The first is moved into the layout of the second, tensor by tensor. Where names and shapes leave
    a layout open, the values of the other side decide it. The result is true if both are the same
    function; printed, it says which tensors, projections and heads differ.

    Args:
        first: a file of weights, a folder with them, or a state dict.
        second: likewise.
        first_layout: the layout of the first; None to find it out.
        second_layout: that of the second.
        config: as in config.json, for both; that beside each file if None.
        outputs: run every layer of both in float64 as well.
        heads: query heads, where no config says it.
        kv_heads: heads of keys and values.
        head_dim: channels of a head, in place of ``heads``.
        rotary_width: channels of a head that are rotated.
        progress: told what is compared, and how many of how many steps are done.

    Raises:
        CheckpointError: a path leads to no weights.
        OptionError: a config contradicts what is given, or counts are missing.
        UndecidedError: one of them holds no attention that the catalogue knows.
    """
    _require_named({"first_layout": first_layout, "second_layout": second_layout})
    _require_function(progress)
    counts: Counts = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "rotary_width": rotary_width,
    }
    one = weights_of(first, counts, config=config, title="the first state dict")
    other = weights_of(second, counts, config=config, title="the second state dict")
    return _verdict(one, other, (first_layout, second_layout), outputs=outputs, progress=progress)


def _require_function(progress: object) -> None:
    if not callable(progress):
        raise OptionError(
            saw=f"progress of type {type(progress).__name__}",
            needed="a function of what is compared, the steps that are done, and all steps",
            do="give such a function, or leave progress out",
        )


def _require_named(layouts: Mapping[str, str | Layout | None]) -> None:
    for name, given in layouts.items():
        if given is not None and not isinstance(given, (str, Layout)):
            raise OptionError(
                saw=f"{name} of type {type(given).__name__}",
                needed="the name of a layout, or a Layout",
                do=f'give {name}="llama", or leave it out; headwise layouts lists the names',
            )


def _verdict(
    one: Weights,
    other: Weights,
    named: Named,
    *,
    outputs: bool,
    progress: Callable[[str, int, int], None],
) -> Verdict:
    read = readings(one, other, named)
    if read.layouts is None:
        return Verdict(layouts=None, notes=read.lines, tensors=None)
    mine, theirs = read.layouts
    found = compare(
        one.tensors,
        other.tensors,
        mine,
        theirs,
        progress=lambda done, total: progress("tensors", done, total),
        **read.known,
    )
    ran: list[Outputs] = []
    if outputs and read.can_run and not (found.unheld or found.is_turned):
        said = one.config or other.config
        ran = outputs_of_both(one.tensors, other.tensors, mine, theirs, said, **read.known)
    return Verdict(layouts=read.layouts, notes=read.lines, tensors=found, outputs=tuple(ran))
