"""`verify`: whether two sets of weights are the same function, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping

from headwise.checkpoints.config import Config
from headwise.diagnosis.outputs import Outputs, outputs_of_both
from headwise.diagnosis.readings import Readings, readings
from headwise.diagnosis.result import Diagnosis, Verdict
from headwise.diagnosis.tensors import compare_tensors
from headwise.diagnosis.weights import Counts, Given, Weights, weights_of
from headwise.errors import OptionError
from headwise.layouts.layout import Layout
from headwise.support.progress import Progress, no_progress


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
    progress: Progress = no_progress,
) -> Diagnosis:
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
    read = readings(one, other, (first_layout, second_layout))
    return _diagnosis(one, other, read, outputs=outputs, progress=progress)


def _diagnosis(
    one: Weights, other: Weights, read: Readings, *, outputs: bool, progress: Progress
) -> Diagnosis:
    if read.layouts is None:
        return Diagnosis(verdict=Verdict.DIFFERENT, layouts=None, notes=read.lines, tensors=None)
    mine, theirs = read.layouts
    tensors = compare_tensors(
        one.tensors, other.tensors, mine, theirs, progress=progress, **read.known
    )
    ran: list[Outputs] = []
    if outputs and read.can_run and not tensors.unheld:
        stated = one.config or other.config
        ran = outputs_of_both(one.tensors, other.tensors, mine, theirs, stated, **read.known)
    is_same = bool(tensors) and all(layer.is_same for layer in ran)
    return Diagnosis(
        verdict=Verdict.SAME if is_same else Verdict.DIFFERENT,
        layouts=read.layouts,
        notes=read.lines,
        tensors=tensors,
        outputs=tuple(ran),
    )


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
