"""Results of a comparison: the verdict, and the evidence for it, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from headwise.identify.comparison import FunctionComparison, ModelComparison
from headwise.layouts._layout import Layout
from headwise.support.lazy import Displayed
from headwise.support.text import list_some

NAMED = 3  # tensors, in the sentence about all of them
SHOWN = 8  # differences of a kind; more are only counted
SCHEMA = 1  # version of the JSON form


class Verdict(StrEnum):
    """Results of comparing two attentions as functions.

    `verify`, which compares weights, returns SAME, DIFFERENT or INCONCLUSIVE; the others need runs.
    """

    SAME = "same"
    TO_ROUNDING = "same to rounding"
    UNDER_MASK = "same under a causal mask"
    OTHER_WEIGHTS = "same function, other weights"
    DIFFERENT = "different"
    INCONCLUSIVE = "inconclusive"
    UNKNOWN = "unknown cause"

    @property
    def is_same(self) -> bool:
        """True if both are the same function."""
        return self not in (Verdict.DIFFERENT, Verdict.INCONCLUSIVE, Verdict.UNKNOWN)


# The last line about two functions.
_ANSWERS = {
    Verdict.SAME: "The same function: every output is equal to the last bit.",
    Verdict.TO_ROUNDING: "The same function: rounding explains every difference.",
    Verdict.UNDER_MASK: "The same function under a causal mask, to rounding.",
    Verdict.OTHER_WEIGHTS: "The same function with other weights: stages differ, outputs agree.",
    Verdict.DIFFERENT: "Different: {causes} {explains}.",
    Verdict.INCONCLUSIVE: "Inconclusive: this check could not have shown a difference.",
    Verdict.UNKNOWN: "Different, and no known cause explains it.",
}

# Words for the kinds of entries that differ, by their names in `TensorEvidence.numbers`.
KINDS = {
    "apart": "by at most {largest:.3g}",
    "infinite": "where one is infinite",
    "nan": "where one alone is NaN",
    "nan_bits": "NaN in both, with other bits",
    "zero_signs": "zero in both, with the other sign",
}


@dataclass(frozen=True, kw_only=True)
class TensorEvidence:
    """Tensor that differs between two sets of weights."""

    name: str  # in the second; in the first if the second was converted to its layout
    # Names of the tensors in the other set from which this one was converted.
    made_of: tuple[str, ...]
    kind: str  # "shape", "dtype" or "entries"
    sides: tuple[str, ...] = ()  # shape or dtype in the first and in the second
    # Counts of all entries ("entries"), of those that differ ("differing") and of each kind
    # ("apart", "infinite", "nan", "nan_bits", "zero_signs"); the largest finite difference
    # ("largest").
    numbers: Mapping[str, int | float] = field(default_factory=dict)
    where: str = ""  # the projections and heads that differ; "" outside attention

    @property
    def difference_in_words(self) -> str:
        """The difference in words."""
        if self.sides:
            return f"{self.kind} {' against '.join(self.sides)}"
        counts = self.numbers
        present = [kind for kind in KINDS if counts.get(kind)]
        kinds = [(counts[kind], KINDS[kind].format_map(counts)) for kind in present]
        counted = f"{counts['differing']} of {counts['entries']} entries"
        if len(kinds) < 2:
            return ", ".join([counted, *(words for _, words in kinds)])
        return f"{counted}: {', '.join(f'{number} {words}' for number, words in kinds)}"

    def __str__(self) -> str:
        made_of = "" if self.made_of == (self.name,) else f", made of {_quote_names(self.made_of)}"
        return f"{_append_place(f'`{self.name}`', self.where)}{made_of}: {self.difference_in_words}"


@dataclass(frozen=True, kw_only=True)
class TensorComparison:
    """Comparison of two sets of weights, tensor by tensor. True if they are the same function."""

    same: int = 0  # number of tensors that are equal byte for byte
    differences: tuple[TensorEvidence, ...] = ()  # tensors that are in both and differ
    # Tensors of the first -> their names in the second, which lacks them; no names where its layout
    # has none.
    only_first: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    only_second: tuple[str, ...] = ()  # tensors of the second without a counterpart in the first
    # Settings of `AttentionSpec` in which the two layouts differ -> (first, second).
    conflicts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    # The reason why one layout cannot hold the weights of the other, so that no tensor was
    # compared; "" where it can.
    unheld: str = ""
    narrow: str = "second"  # the side with that layout, "first" or "second"

    def __bool__(self) -> bool:
        return not (self.total > self.same or self.conflicts or self.unheld)

    @property
    def total(self) -> int:
        """Number of tensors that were compared or have no counterpart."""
        parts = (self.differences, self._list_missing_in_second, self.only_second)
        return self.same + sum(map(len, parts))

    def swapped(self) -> TensorComparison:
        """Return the comparison with first and second exchanged."""
        return replace(
            self,
            differences=tuple(replace(each, sides=each.sides[::-1]) for each in self.differences),
            only_first=dict.fromkeys(self.only_second, ()),
            only_second=tuple(self.only_first),
            conflicts={name: (b, a) for name, (a, b) in self.conflicts.items()},
            narrow="first" if self.narrow == "second" else "second",
        )

    def lines(self, *, most: int = SHOWN) -> list[str]:
        """Return the differences in words, at most ``most`` of a kind."""
        lines = [
            f"{name}: {mine} in the first, {theirs} in the second"
            for name, (mine, theirs) in self.conflicts.items()
        ]
        if self.unheld:
            lines.append(f"{self._describe_less_capable_layout}: {self.unheld}")
        in_first = []
        for name, missing in self.only_first.items():
            lack = f"; the second has no {_quote_names(missing)}" if {*missing} - {name} else ""
            in_first.append(f"`{name}`: in the first alone{lack}")
        in_second = [f"`{name}`: in the second alone" for name in self.only_second]
        for kind in (list(map(str, self.differences)), in_first, in_second):
            lines += shorten_lines(kind, most)
        return lines

    @property
    def _describe_less_capable_layout(self) -> str:
        other = "first" if self.narrow == "second" else "second"
        return f"the {self.narrow}'s layout cannot hold the {other}"

    @property
    def _list_missing_in_second(self) -> list[str]:
        """Tensors that the second lacks, by the names of its layout where it has them."""
        missing = (names or (name,) for name, names in self.only_first.items())
        return list(dict.fromkeys(name for names in missing for name in names))

    def __str__(self) -> str:
        if self.unheld:
            return f"no tensor was compared: {self._describe_less_capable_layout}"
        all_same = self.same == self.total
        parts = [f"{'all' if all_same else f'{self.same} of'} {self.total} tensors are equal"]
        parts += _describe_tensors(
            "differs", "differ", [(each.name, each.where) for each in self.differences]
        )
        for which, names in (("first", self._list_missing_in_second), ("second", self.only_second)):
            alone = [(name, "") for name in names]
            parts += _describe_tensors(
                f"is in the {which} alone", f"are in the {which} alone", alone
            )
        if self.conflicts:
            parts.append(f"the two layouts use them differently ({', '.join(self.conflicts)})")
        return "; ".join(parts)


@dataclass(frozen=True)
class OutputComparison:
    """Comparison of the outputs of a layer."""

    first: str  # the layer's name in the first checkpoint
    second: str  # its name in the second
    apart: float  # the largest difference, as a share of the largest output
    allowed: float  # the share that rounding explains

    @property
    def is_same(self) -> bool:
        """True if rounding explains the difference."""
        return self.apart <= self.allowed

    def __str__(self) -> str:
        stripped = (name.rstrip(".") for name in (self.first, self.second))
        names = dict.fromkeys(f"`{name}`" if name else "the layer" for name in stripped)
        word = "the same outputs to rounding" if self.is_same else "OTHER OUTPUTS"
        return (
            f"{' and '.join(names)}: {word}; the difference is {self.apart:.1e} of the largest "
            f"output, and rounding explains {self.allowed:.1e}"
        )


@dataclass(frozen=True)
class UnappliedSetting:
    """Setting in the metadata of a file that the code of its layout does not apply."""

    side: str  # "first" or "second"
    layout: str  # the layout of the file
    name: str  # a setting of `AttentionSpec`
    recorded: str  # its value in the metadata
    applied: str  # its value in the code of the layout

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.recorded} in the metadata of the {self.side}, "
            f"{self.applied} in the code of {self.layout}"
        )


@dataclass(frozen=True, kw_only=True)
class ModuleMoves:
    """Moves that make the weights of a module in the first from those in the second.

    Attributes:
        name: the module in the first; "" if its tensors have no prefix.
        layer: its layer in the model.
        moves: causes in the order in which they happened, each with its projections.
        causes: their names.
        repairs: what undoes each cause; the last is the first to be undone.
        pages: the path of the page about each cause, in the installed package.
        unexplained: projections that nothing explains.
        is_other_module: the module of the second whose weights these are; "" for its own.
    """

    name: str
    layer: int
    moves: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    repairs: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()
    unexplained: tuple[str, ...] = ()
    is_other_module: str = ""

    def __str__(self) -> str:
        name = f"`{self.name}`" if self.name else "the layer"
        if self.is_other_module:
            return f"{name} has the weights of `{self.is_other_module}`: {self.causes[0]}"
        left = f"no known change explains {', '.join(self.unexplained)}"
        return f"{name}: {'; then '.join([*self.moves, *[left] * bool(self.unexplained)])}"

    @property
    def repair(self) -> str:
        """The repairs, in the order in which they are done; "" where nothing is named."""
        return "; then ".join(reversed(self.repairs))

    @property
    def repair_lines(self) -> list[str]:
        """Sentences: the repair, and the pages about the causes."""
        pages = ", ".join(dict.fromkeys(self.pages))
        lines = [f"  repair: {self.repair}"] if self.repairs else []
        return lines + ([f"  more: {pages}"] if pages else [])


def describe_module_moves(modules: Sequence[ModuleMoves], *, most: int) -> list[str]:
    """Return sentences on the first modules, and the number of the others.

    A repair stands below the first module that needs it.
    """
    lines, repaired = [], set()
    for module in modules[:most]:
        lines.append(str(module))
        if module.repair not in repaired:
            lines += module.repair_lines
            repaired.add(module.repair)
    return lines + ([f"and {len(modules) - most} more"] if len(modules) > most else [])


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Displayed):
    """Comparison of two attentions or models. True if they are the same function.

    Attributes:
        verdict: the result.
        layouts: those in which the weights were read; None if their configs contradict each other,
            or if other layouts that fit have another verdict.
        notes: the evidence for these layouts, or the reasons why the two are not the same.
        tensors: the comparison of the weights; None where ``layouts`` is.
        outputs: the comparison of each layer's outputs; empty without `verify(outputs=True)`.
        function: the comparison of two functions by running them; None for weights and models.
        model: the comparison of two whole models; None for weights and single attentions.
        moves: what happened to the weights of modules that differ.
        unapplied: settings that the metadata of a file record, and that no class of its layout
            applies: only readers of the metadata compute the same function.
    """

    verdict: Verdict
    layouts: tuple[Layout, Layout] | None = None
    notes: tuple[str, ...] = ()
    tensors: TensorComparison | None = None
    outputs: tuple[OutputComparison, ...] = ()
    function: FunctionComparison | None = None
    model: ModelComparison | None = None
    moves: tuple[ModuleMoves, ...] = ()
    unapplied: tuple[UnappliedSetting, ...] = ()

    def __bool__(self) -> bool:
        return self.verdict.is_same

    def with_notes(self, notes: Iterable[str]) -> Diagnosis:
        """Return this with further notes."""
        return replace(self, notes=tuple(dict.fromkeys((*self.notes, *notes))))

    @property
    def lines(self) -> list[str]:
        """Sentences: the layouts, the evidence, the answer."""
        comparison = self.function or self.model
        if comparison is not None:
            return [*comparison.lines, *(f"  {note}" for note in self.notes), self.answer]
        lines = [] if self.layouts is None else [" against ".join(n.name for n in self.layouts)]
        notes = shorten_lines([*self.notes, *map(str, self.unapplied)], SHOWN)
        notes += self.tensors.lines() if self.tensors is not None else []
        notes += describe_module_moves(self.moves, most=SHOWN)
        lines += [f"  {note}" for note in [*notes, *map(str, self.outputs)]]
        return [*lines, self.answer]

    def as_dict(self) -> dict[str, Any]:
        """Return the result as numbers, texts, lists and dicts, for JSON."""
        return {
            "schema": SCHEMA,
            "verdict": str(self.verdict),
            "same": bool(self),
            "lines": self.lines,
            "moves": [asdict(module) for module in self.moves],
            "function": None if self.function is None else self.function.as_dict(),
            "model": None if self.model is None else self.model.as_dict(),
        }

    @property
    def answer(self) -> str:
        """The verdict as a sentence."""
        comparison = self.function or self.model
        if comparison is not None:
            return self._answer_from_comparison(comparison)
        if self.verdict is Verdict.INCONCLUSIVE:
            return (
                "Inconclusive: the weights are equal in some of these readings, and not in all. "
                "verify takes the layout of each side and the number of heads."
            )
        if self.tensors is None:
            return "Not the same: the configs contradict each other; no tensor was compared."
        if self and self.unapplied:
            layouts = " and ".join(dict.fromkeys(each.layout for each in self.unapplied))
            names = ", ".join(dict.fromkeys(each.name for each in self.unapplied))
            return (
                f"The same weights, byte for byte: {self.tensors}. The code of {layouts} does not "
                f"apply what the metadata record ({names})."
            )
        if self:
            return f"The same function, byte for byte: {self.tensors}."
        if not self.tensors:
            return f"Not the same: {self.tensors}."
        others = sum(not layer.is_same for layer in self.outputs)
        return (
            f"Not the same: {self.tensors}, but {others} of {len(self.outputs)} layers have other "
            "outputs."
        )

    def _answer_from_comparison(self, comparison: FunctionComparison | ModelComparison) -> str:
        if self.function and self.function.stopped and not self.function.causes:
            is_unknown = self.verdict is Verdict.UNKNOWN
            answer = "Different, and no cause was found" if is_unknown else "Inconclusive"
            return f"{answer}: the comparison was stopped before everything was tried."
        if self.verdict is Verdict.UNKNOWN and self.function and self.function.gradients:
            return "Different in training alone: outputs agree, and gradients do not."
        if self.verdict is Verdict.DIFFERENT and self.function and not self.function.causes:
            apart = f"the outputs are apart by {self.function.output_gap:.2g} of their size"
            return f"Different: {self.function.shapes or apart}."
        names, left = comparison.cause_names_with_equals, comparison.unexplained_places
        causes = " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
        rest = f"a part of it; nothing explains {', '.join(left)}" if left else "all of it"
        verb = "explain" if len(names) > 1 else "explains"
        answer = _ANSWERS[self.verdict].format(causes=causes, explains=f"{verb} {rest}")
        condition = "" if self.function is None else self.function.condition
        return f"{answer} {condition}".strip()

    def __str__(self) -> str:
        return "\n".join(self.lines)


def shorten_lines(lines: Iterable[str], most: int) -> list[str]:
    """Return the first lines, and a line with the number of the others."""
    lines = list(lines)
    return lines[:most] + ([f"and {len(lines) - most} more"] if len(lines) > most else [])


def _quote_names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _append_place(name: str, where: str) -> str:
    return f"{name} ({where})" if where else name


def _describe_tensors(singular: str, plural: str, tensors: Iterable[tuple[str, str]]) -> list[str]:
    shown = [(f"`{name}`", where) for name, where in tensors]
    if len(shown) < 2:
        return [_append_place(f"{name} {singular}", where) for name, where in shown]
    names = [_append_place(name, where) for name, where in shown]
    if len(names) > NAMED:
        return [f"{len(names)} {plural}: {list_some(names, NAMED)}"]
    return [f"{', '.join(names[:-1])} and {names[-1]} {plural}"]
