"""`verify`: whether two sets of tensors hold the same function, compared byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor

from headwise.checkpoints.entries import what_differs
from headwise.errors import DTypeError, OptionError, ShapeError
from headwise.layouts.canonical import BIASES
from headwise.layouts.layout import Layout, is_positive_zero
from headwise.layouts.places import AS_STORED, Form, Module, modules_of
from headwise.layouts.plan import conflicts_of, plan
from headwise.layouts.registry import layout
from headwise.layouts.sameness import differing, differing_part, same_bytes
from headwise.layouts.steps import Step

NAMED = 3  # tensors, in the sentence about all of them
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Difference:
    """A tensor that is another one in the second file.

    Attributes:
        name: in the second file; in the first where the second was moved into its layout.
        made_of: names in the other.
        what: the shapes or dtypes that differ, or how many entries, and how.
        where: of a tensor of attention, the projections and heads that differ.
    """

    name: str
    made_of: tuple[str, ...]
    what: str
    where: str = ""

    def __str__(self) -> str:
        return f"`{self.name}`" + (f" ({self.where})" if self.where else "")


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was found.

    Attributes:
        same: how many tensors of the second file are those of the first, byte for byte.
        differences: those that are not.
        only_first: tensors of the first file -> what the second lacks of them, by its names; none
            where its layout has no name for them.
        only_second: tensors of the second file that nothing of the first makes.
        conflicts: what the two layouts say of how weights are used, and say differently.
        unheld: what of the first the second's layout cannot hold, so that nothing was compared;
            "" where it can.
        is_turned: whether the second was moved into the layout of the first, of which a module is
            not whole or does not fit; ``unheld`` is of the second then.
    """

    same: int = 0
    differences: tuple[Difference, ...] = ()
    only_first: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    only_second: tuple[str, ...] = ()
    conflicts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    unheld: str = ""
    is_turned: bool = False

    def __bool__(self) -> bool:
        """Whether both hold the same function."""
        apart = (self.differences, self.only_first, self.only_second, self.conflicts, self.unheld)
        return not any(apart)

    @property
    def total(self) -> int:
        """How many tensors were compared, or have no counterpart."""
        return self.same + len(self.differences) + len(self._lacking) + len(self.only_second)

    @property
    def whose(self) -> str:
        """The layout that cannot hold what the other file has, in words."""
        mine, theirs = ("second", "first")[:: -1 if self.is_turned else 1]
        return f"the {mine}'s layout cannot hold the {theirs}"

    @property
    def _lacking(self) -> list[str]:
        """What the second has not, by its own names where its layout has any."""
        found = (lack or (name,) for name, lack in self.only_first.items())
        return list(dict.fromkeys(name for names in found for name in names))

    def __str__(self) -> str:
        if self.unheld:
            return f"no tensor was compared: {self.whose}"
        if self.same == self.total:
            counted = f"all {self.total} tensors are equal"
        else:
            counted = f"{self.same} of {self.total} tensors are equal"
        apart = [(f"`{one.name}`", one.where) for one in self.differences]
        lacking, more = (
            [(f"`{name}`", "") for name in x] for x in (self._lacking, self.only_second)
        )
        parts = [
            _listed("differs", "differ", apart),
            _listed("is in the first alone", "are in the first alone", lacking),
            _listed("is in the second alone", "are in the second alone", more),
        ]
        if self.conflicts:
            parts.append(f"the two layouts use them differently ({', '.join(self.conflicts)})")
        return "; ".join([counted, *filter(None, parts)])


def _listed(one: str, several: str, tensors: list[tuple[str, str]]) -> str:
    """Names with their verb, and what of each; of many, the first."""
    if not tensors:
        return ""
    if len(tensors) == 1:
        name, where = tensors[0]
        return f"{name} {one}" + (f" ({where})" if where else "")
    *most, last = (name + (f" ({where})" if where else "") for name, where in tensors[:NAMED])
    if len(tensors) > NAMED:
        shown = ", ".join([*most, last])
        return f"{len(tensors)} {several}: {shown} and {len(tensors) - NAMED} more"
    return f"{', '.join(most)} and {last} {several}"


def _quoted(names: Iterable[str]) -> list[str]:
    return [f"`{name}`" for name in names]


def verify(
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    first_layout: str | Layout,
    second_layout: str | Layout,
    *,
    progress: Progress | None = None,
    **known: int,
) -> Verification:
    """Move the first into the layout of the second, step by step, and compare every byte.

    A bias of attention that is +0 in one and absent in the other is no difference. What is not
    attention may have kept its name, as `headwise.layouts.convert.convert` leaves it. Where some
    modules of the first are not whole or do not fit, the second is moved in its place.

    Args:
        first: name -> tensor; read one after the other, so they may be memory-mapped.
        second: likewise.
        first_layout: the layout that the first are in, or its name.
        second_layout: that of the second.
        progress: told how many of how many steps are done.
        known: heads, and what else no shape tells.

    Raises:
        OptionError, ShapeError, DTypeError: one of them cannot be read in its own layout; see
            `headwise.layouts.plan.plan`.
    """
    source, target = layout(first_layout), layout(second_layout)
    if _is_read(second, target, known) and _is_damaged(first, source, known):
        source, target, first, second, is_turned = target, source, second, first, True
    else:
        is_turned = False
    found = _verify(first, second, source, target, progress, known, is_turned=is_turned)
    return _turned(found) if is_turned else found


def _is_read(state: Mapping[str, Tensor], of: Layout, known: Mapping[str, int]) -> bool:
    """Whether every module of these tensors is whole and fits."""
    with suppress(OptionError, ShapeError, DTypeError):
        plan(state, of, of, accept=(), form=AS_STORED, **known)
        return True
    return False


def _is_damaged(state: Mapping[str, Tensor], of: Layout, known: Mapping[str, int]) -> bool:
    """Whether some modules of these tensors are whole and fit, and others are not or do not."""
    read = [
        _is_read({name: state[name] for name in (*module.tensors, *module.beside)}, of, known)
        for module in modules_of(of, state)
    ]
    return any(read) and not all(read)


def _turned(found: Verification) -> Verification:
    """What was found of the second, moved into the layout of the first, as of the first."""
    return replace(
        found,
        only_first=dict.fromkeys(found.only_second, ()),
        only_second=tuple(found.only_first),
        conflicts={name: (b, a) for name, (a, b) in found.conflicts.items()},
        is_turned=True,
    )


def _verify(
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    source: Layout,
    target: Layout,
    progress: Progress | None,
    known: Mapping[str, int],
    *,
    is_turned: bool,
) -> Verification:
    conflicts = source.function.conflicts(target.function)
    form = _form(modules_of(source, first), modules_of(target, second))
    try:
        conflicts |= conflicts_of(first, source, target, known)
        steps = plan(first, source, target, accept=conflicts, form=form, **known)
    except (OptionError, ShapeError, DTypeError) as error:
        # What cannot be read at all is no difference; other shapes are one.
        plan(first, source, source, accept=(), form=AS_STORED, **known)
        with suppress(ShapeError, DTypeError):
            plan(second, target, target, accept=(), form=AS_STORED, **known)
        unheld = f"{error.saw}; needed: {error.needed}"
        return Verification(conflicts=conflicts, unheld=unheld)
    found = _Comparison.between(first, second, source, target, steps, known)
    found.is_turned = is_turned
    for number, step in enumerate(steps):
        found.add(step)
        if progress is not None:
            progress(number + 1, len(steps))
    return found.verification(conflicts)


def _form(first: list[Module], second: list[Module]) -> Form:
    """That of the second; of modules at places that are not known, the whole place is the root."""
    are_known = {bool(module.place.role) for module in (*first, *second)}
    is_one = len(first) == len(second) == 1 and len(are_known) == 1
    return Form.of(second) if are_known == {True} or is_one else AS_STORED


@dataclass
class _Comparison:
    """What is found on the way.

    Attributes:
        first: tensors by name.
        second: likewise.
        attention: names in the first.
        biases: of attention: names in the second, those that it might have included.
        outputs: all that is made of the first.
        target: the layout of the second.
        known: heads, and what else no shape tells.
        is_turned: whether what differs is said with the second before the first.
    """

    first: Mapping[str, Tensor]
    second: Mapping[str, Tensor]
    attention: set[str]
    biases: set[str]
    outputs: set[str]
    target: Layout
    known: Mapping[str, int]
    is_turned: bool = False
    same: int = 0
    met: set[str] = field(default_factory=set)
    differences: list[Difference] = field(default_factory=list)
    only_first: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def between(
        cls,
        first: Mapping[str, Tensor],
        second: Mapping[str, Tensor],
        source: Layout,
        target: Layout,
        steps: Iterable[Step],
        known: Mapping[str, int],
    ) -> _Comparison:
        """Before anything is compared."""
        attention = {name for module in modules_of(source, first) for name in module.tensors}
        outputs = {name for step in steps for name in step.outputs}
        biases = _biases(target, outputs) | _biases(target, second)
        return cls(first, second, attention, biases, outputs, target, known)

    def add(self, step: Step) -> None:
        """Compare what one step makes."""
        stored = {name: self.first[name] for name in step.inputs}
        if not step.outputs:  # biases that the second's layout has no tensor for
            held = [name for name, tensor in stored.items() if not is_positive_zero(tensor)]
            self.only_first |= dict.fromkeys(held, ())
            return
        made = stored if self._kept_its_names(step) else step.run(stored)
        lacking = []
        for name, tensor in made.items():
            if name in self.second:
                self._compare(name, step, tensor)
            elif not self._is_nothing(name, tensor):
                lacking.append(name)
        if lacking:
            self.only_first |= dict.fromkeys(step.inputs, tuple(lacking))

    def verification(self, conflicts: Mapping[str, tuple[str, str]]) -> Verification:
        """All that was found, once every step is compared."""
        left = [name for name in self.second if name not in self.met]
        return Verification(
            same=self.same,
            differences=tuple(self.differences),
            only_first=self.only_first,
            only_second=tuple(n for n in left if not self._is_nothing(n, self.second[n])),
            conflicts=conflicts,
        )

    def _kept_its_names(self, step: Step) -> bool:
        """Whether the second has these tensors under their old names: nobody translated them."""
        return (
            self.attention.isdisjoint(step.inputs)
            and self.second.keys().isdisjoint(step.outputs)
            and self.second.keys() >= {*step.inputs}
            and self.outputs.isdisjoint(step.inputs)
        )

    def _is_nothing(self, name: str, tensor: Tensor) -> bool:
        """Whether it may as well be absent."""
        return name in self.biases and is_positive_zero(tensor)

    def _compare(self, name: str, step: Step, tensor: Tensor) -> None:
        self.met.add(name)
        if same_bytes(tensor, self.second[name]):
            self.same += 1
        else:
            pair = (tensor, self.second[name])[:: -1 if self.is_turned else 1]
            where = self._where(name, tensor)
            self.differences.append(Difference(name, step.inputs, what_differs(*pair), where))

    def _where(self, name: str, tensor: Tensor) -> str:
        """The projections and heads in which a tensor of attention differs from the second's."""
        other = self.second[name]
        module = next((m for m in self._modules if name in m.tensors), None)
        if module is None or tensor.shape != other.shape or tensor.dtype != other.dtype:
            return ""
        shapes = {local: tuple(self.second[n].shape) for n, local in module.tensors.items()}
        with suppress(OptionError, ShapeError):  # another tensor of the module may be the wrong one
            sizes = self.target.sizes(shapes, self.known)
            local = module.tensors[name]
            mine, theirs = (self.target.read({local: x}, sizes=sizes) for x in (tensor, other))
            names = differing(mine, theirs)
            return "; ".join(differing_part(n, mine[n], theirs[n]) for n in names)
        return ""

    @cached_property
    def _modules(self) -> list[Module]:
        return modules_of(self.target, self.second)


def _biases(layout: Layout, names: Iterable[str]) -> set[str]:
    """Those of attention among the names of tensors that are stored in this layout."""
    patterns = layout.patterns
    return {
        name
        for module in modules_of(layout, names)
        for name, local in module.tensors.items()
        if {*BIASES}.issuperset(patterns[local].tensors)
    }


def lines_of(found: Verification, *, most: int) -> list[str]:
    """What keeps two files from being the same, in words; at most so many of a kind."""
    lines = [
        f"{name}: {mine} in the first, {theirs} in the second"
        for name, (mine, theirs) in found.conflicts.items()
    ]
    if found.unheld:
        lines.append(f"{found.whose}: {found.unheld}")
    kinds = [
        [f"{one}{_made_of(one)}: {one.what}" for one in found.differences],
        [
            f"`{name}`: in the first alone{_of(name, lack)}"
            for name, lack in found.only_first.items()
        ],
        [f"`{name}`: in the second alone" for name in found.only_second],
    ]
    for kind in kinds:
        lines += kind[:most]
        if len(kind) > most:
            lines.append(f"and {len(kind) - most} more")
    return lines


def _made_of(one: Difference) -> str:
    return "" if one.made_of == (one.name,) else f", made of {', '.join(_quoted(one.made_of))}"


def _of(name: str, lacking: tuple[str, ...]) -> str:
    return f"; the second has no {', '.join(_quoted(lacking))}" if {*lacking} - {name} else ""
