"""Results of a comparison: the verdict, and the evidence for it, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from headwise.layouts.layout import Layout

NAMED = 3  # tensors, in the sentence about all of them
SHOWN = 8  # differences of a kind, before the rest is counted


class Verdict(StrEnum):
    """Answers to the question whether two attentions are the same function.

    Weights alone, as `verify` compares them, are the same or different; the others need a run.
    """

    SAME = "same"
    TO_ROUNDING = "same to rounding"
    OTHER_WEIGHTS = "same function, other weights"
    DIFFERENT = "different"
    INCONCLUSIVE = "inconclusive"
    UNKNOWN = "unknown cause"

    @property
    def is_same(self) -> bool:
        """True for the three verdicts of one function."""
        return self in (Verdict.SAME, Verdict.TO_ROUNDING, Verdict.OTHER_WEIGHTS)


# A kind of entries that differ, by its name in `TensorEvidence.numbers`.
_KINDS = {
    "apart": "by at most {largest:.3g}",
    "infinite": "where one is infinite",
    "nan": "where one alone is NaN",
    "nan_bits": "NaN in both, of other bits",
    "zero_signs": "zero in both, of another sign",
}


@dataclass(frozen=True, kw_only=True)
class TensorEvidence:
    """A tensor that is another one in the second set of weights.

    Attributes:
        name: in the second; in the first where the second was moved into its layout.
        made_of: names in the other.
        kind: "shape", "dtype" or "entries".
        sides: of a shape or a dtype, those of the first and of the second.
        numbers: of entries: how many there are ("entries"), how many differ ("differing") and how
            ("apart", "infinite", "nan", "nan_bits", "zero_signs"), and by how much ("largest").
        where: of a tensor of attention, the projections and heads that differ.
    """

    name: str
    made_of: tuple[str, ...]
    kind: str
    sides: tuple[str, ...] = ()
    numbers: Mapping[str, int | float] = field(default_factory=dict)
    where: str = ""

    @property
    def what(self) -> str:
        """The difference in words."""
        if self.sides:
            return f"{self.kind} {' against '.join(self.sides)}"
        kinds = [
            (self.numbers[kind], words.format_map(self.numbers))
            for kind, words in _KINDS.items()
            if self.numbers.get(kind)
        ]
        counted = f"{self.numbers['differing']} of {self.numbers['entries']} entries"
        if len(kinds) < 2:
            return ", ".join([counted, *(words for _, words in kinds)])
        return f"{counted}: {', '.join(f'{number} {words}' for number, words in kinds)}"

    def __str__(self) -> str:
        made_of = "" if self.made_of == (self.name,) else f", made of {_quoted(self.made_of)}"
        return f"{_with(f'`{self.name}`', self.where)}{made_of}: {self.what}"


@dataclass(frozen=True, kw_only=True)
class TensorComparison:
    """Tensors of two sets of weights beside each other. True if they are the same function.

    Attributes:
        same: how many tensors of the second are those of the first, byte for byte.
        differences: those that are not.
        only_first: tensors of the first -> what the second lacks of them, by its names; none
            where its layout has no name for them.
        only_second: tensors of the second that nothing of the first makes.
        conflicts: fields of `AttentionSpec` in which the two layouts differ -> (first, second).
        unheld: the reason why one layout cannot hold the weights of the other, so that nothing was
            compared; "" where it can.
        narrow: which side's layout that is, "first" or "second".
    """

    same: int = 0
    differences: tuple[TensorEvidence, ...] = ()
    only_first: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    only_second: tuple[str, ...] = ()
    conflicts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    unheld: str = ""
    narrow: str = "second"

    def __bool__(self) -> bool:
        apart = (self.differences, self.only_first, self.only_second, self.conflicts, self.unheld)
        return not any(apart)

    @property
    def total(self) -> int:
        """How many tensors were compared, or have no counterpart."""
        return self.same + len(self.differences) + len(self._lacking) + len(self.only_second)

    def swapped(self) -> TensorComparison:
        """Return the same with the first as the second."""
        return replace(
            self,
            differences=tuple(replace(one, sides=one.sides[::-1]) for one in self.differences),
            only_first=dict.fromkeys(self.only_second, ()),
            only_second=tuple(self.only_first),
            conflicts={name: (b, a) for name, (a, b) in self.conflicts.items()},
            narrow="first" if self.narrow == "second" else "second",
        )

    def lines(self, *, most: int = SHOWN) -> list[str]:
        """What keeps the two from being the same, in words; at most so many of a kind."""
        lines = [
            f"{name}: {mine} in the first, {theirs} in the second"
            for name, (mine, theirs) in self.conflicts.items()
        ]
        if self.unheld:
            lines.append(f"{self._narrow}: {self.unheld}")
        alone = []
        for name, lacking in self.only_first.items():
            named = f"; the second has no {_quoted(lacking)}" if {*lacking} - {name} else ""
            alone.append(f"`{name}`: in the first alone{named}")
        also = [f"`{name}`: in the second alone" for name in self.only_second]
        for kind in (list(map(str, self.differences)), alone, also):
            lines += shortened(kind, most)
        return lines

    @property
    def _narrow(self) -> str:
        other = "first" if self.narrow == "second" else "second"
        return f"the {self.narrow}'s layout cannot hold the {other}"

    @property
    def _lacking(self) -> list[str]:
        """What the second has not, by its own names where its layout has any."""
        found = (lack or (name,) for name, lack in self.only_first.items())
        return list(dict.fromkeys(name for names in found for name in names))

    def __str__(self) -> str:
        if self.unheld:
            return f"no tensor was compared: {self._narrow}"
        all_same = self.same == self.total
        parts = [f"{'all' if all_same else f'{self.same} of'} {self.total} tensors are equal"]
        parts += _listed("differs", "differ", [(one.name, one.where) for one in self.differences])
        for which, names in (("first", self._lacking), ("second", self.only_second)):
            alone = [(name, "") for name in names]
            parts += _listed(f"is in the {which} alone", f"are in the {which} alone", alone)
        if self.conflicts:
            parts.append(f"the two layouts use them differently ({', '.join(self.conflicts)})")
        return "; ".join(parts)


@dataclass(frozen=True)
class OutputComparison:
    """One layer of both.

    Attributes:
        first: its place in the first checkpoint.
        second: in the second.
        apart: the largest difference, as a share of the largest output.
        allowed: what rounding explains.
    """

    first: str
    second: str
    apart: float
    allowed: float

    @property
    def is_same(self) -> bool:
        """Whether no more than rounding is between them."""
        return self.apart <= self.allowed

    def __str__(self) -> str:
        word = "the same outputs" if self.is_same else "OTHER OUTPUTS"
        return (
            f"`{self.first}` and `{self.second}`: {word}; they differ by {self.apart:.1e} of the "
            f"largest output, of which rounding explains {self.allowed:.1e}"
        )


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Two attentions, or models, beside each other. True if they are the same function.

    Attributes:
        verdict: the answer.
        layouts: in which the weights were read; None where their configs contradict each other.
        notes: how that was decided, or why they are not the same.
        tensors: the evidence of the weights; None where ``layouts`` is.
        outputs: the evidence of a run of each layer of both, where that was asked for.
    """

    verdict: Verdict
    layouts: tuple[Layout, Layout] | None
    notes: tuple[str, ...]
    tensors: TensorComparison | None
    outputs: tuple[OutputComparison, ...] = ()

    def __bool__(self) -> bool:
        return self.verdict.is_same

    @property
    def lines(self) -> list[str]:
        """The diagnosis in sentences, its reasons first."""
        lines = [] if self.layouts is None else [" against ".join(n.name for n in self.layouts)]
        notes = shortened(self.notes, SHOWN)
        notes += self.tensors.lines() if self.tensors is not None else []
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


def shortened(lines: Iterable[str], most: int) -> list[str]:
    """Return the first lines, and one that counts the rest."""
    lines = list(lines)
    return lines[:most] + ([f"and {len(lines) - most} more"] if len(lines) > most else [])


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _with(name: str, where: str) -> str:
    return f"{name} ({where})" if where else name


def _listed(one: str, several: str, tensors: Iterable[tuple[str, str]]) -> list[str]:
    """Names with their verb, and the heads of each; of many, the first."""
    shown = [(f"`{name}`", where) for name, where in tensors]
    if len(shown) < 2:
        return [_with(f"{name} {one}", where) for name, where in shown]
    names = [_with(name, where) for name, where in shown]
    if len(names) > NAMED:
        more = f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more"
        return [f"{len(names)} {several}: {more}"]
    return [f"{', '.join(names[:-1])} and {names[-1]} {several}"]
