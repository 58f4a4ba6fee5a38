"""What a conversion does, from names and shapes alone: which tensors are made of which.

The steps are as small as the two layouts allow, so that a checkpoint streams: a tensor waits for
another one only where they are fused on one side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from headwise.errors import DTypeError, OptionError
from headwise.layouts import moving
from headwise.layouts.canonical import ROTATED, State
from headwise.layouts.function import Function
from headwise.layouts.layout import Layout
from headwise.layouts.pattern import Pattern, parse
from headwise.layouts.places import Module, Numbers, Place, modules_of, outside, slots
from headwise.layouts.sizes import Sizes, solve

FIELDS = {field.name for field in fields(Function)}
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@runtime_checkable
class Header(Protocol):
    """What is known of a tensor before it is read; a tensor is one."""

    @property
    def shape(self) -> Iterable[int]:
        """How long its axes are."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its numbers."""


@dataclass(frozen=True)
class Step:
    """Some tensors of the target, made of some of the source.

    Attributes:
        inputs: names in the source.
        outputs: name in the target -> shape; none for biases that must be +0 to be left out.
        reader: stored tensors -> canonical ones, by names of its own.
        writer: canonical tensors -> tensors of the target.
        is_copy: whether the one output is the one input, byte for byte.
    """

    inputs: tuple[str, ...]
    outputs: Mapping[str, tuple[int, ...]]
    reader: Conversion
    writer: Conversion
    is_copy: bool = False

    def run(self, stored: Mapping[str, Tensor]) -> State:
        """The tensors of the target."""
        if self.is_copy:
            return {
                name: stored[given] for given, name in zip(self.inputs, self.outputs, strict=True)
            }
        return self.writer.write(self.reader.read(stored))

    def back(self, made: Mapping[str, Tensor]) -> State:
        """The tensors of the source again, for a round trip."""
        if self.is_copy:
            return {
                given: made[name] for given, name in zip(self.inputs, self.outputs, strict=True)
            }
        return self.reader.write(self.writer.read(made))


@runtime_checkable
class Conversion(Protocol):
    """One side of a step."""

    def read(self, stored: Mapping[str, Tensor]) -> State:
        """Canonical tensors of stored ones."""

    def write(self, canonical: Mapping[str, Tensor]) -> State:
        """Stored tensors of canonical ones."""


@dataclass(frozen=True)
class Inside:
    """The tensors of one module in one layout. ``names``: full name -> name within the module."""

    layout: Layout
    names: Mapping[str, str]
    sizes: Sizes

    def read(self, stored: Mapping[str, Tensor]) -> State:
        """Canonical tensors of stored ones."""
        local = {self.names[name]: x for name, x in stored.items()}
        return self.layout.read(local, sizes=self.sizes)

    def write(self, canonical: Mapping[str, Tensor]) -> State:
        """Stored tensors of canonical ones; only those that have a name here."""
        full = {local: name for name, local in self.names.items()}
        made = self.layout.write(canonical, sizes=self.sizes)
        return {full[local]: x for local, x in made.items() if local in full}


@dataclass(frozen=True)
class Outside:
    """Tensors outside of attention: full name -> pattern."""

    patterns: Mapping[str, Pattern]
    sizes: Sizes

    def read(self, stored: Mapping[str, Tensor]) -> State:
        """The tensors by their names in the patterns."""
        found: State = {}
        for name, tensor in stored.items():
            found |= moving.unpack(self.patterns[name], tensor, self.sizes)
        return found

    def write(self, canonical: Mapping[str, Tensor]) -> State:
        """Stored tensors."""
        return {
            name: moving.pack(pattern, canonical, self.sizes)
            for name, pattern in self.patterns.items()
            if set(pattern.tensors) <= canonical.keys()
        }


def plan(
    headers: Mapping[str, Header],
    source: Layout,
    target: Layout,
    *,
    accept: Iterable[str] = (),
    root: str | None = None,
    **known: int,
) -> list[Step]:
    """The steps from one layout to another; those that only check come first.

    Args:
        headers: name -> shape and dtype of every tensor.
        source: the layout that they are in.
        target: the wanted one.
        accept: of what makes another function, what may differ: names of `Function`.
        root: what stands before all names of the target, such as "transformer."; what stands
            before those of the source if None.
        known: heads, kv_heads, rotary_width, and what else no shape tells.

    Raises:
        OptionError: no module is found, the layouts are other functions, or names collide.
        ShapeError: shapes that do not fit, or that the target cannot hold.
        DTypeError: attention in integers or in 8-bit numbers.
    """
    require_same_function(source, target, accept)
    modules = modules_of(source, headers)
    if not modules:
        raise OptionError(
            saw=f"{len(headers)} tensors, among them {sorted(headers)[:3]}",
            needed=f"modules of {source.name}, which have {', '.join(source.tensors)}",
            do="headwise detect tells which layout a file is in",
        )
    steps: list[Step] = []
    for module in modules:
        _require_known(module, source, headers)
        steps += _module_steps(module, source, target, headers, known, root)
    done = {name for step in steps for name in step.inputs}
    roots = {module.place.root for module in modules}
    rest = [name for name in headers if name not in done]
    steps += _outside_steps(rest, source, target, headers, roots, root)
    _require_apart(steps)
    return sorted(steps, key=lambda step: bool(step.outputs))


def require_same_function(source: Layout, target: Layout, accept: Iterable[str]) -> None:
    """Raise OptionError where both layouts say how weights are used, and differ."""
    conflicts, accepted = source.function.conflicts(target.function), {*accept}
    if unknown := sorted(accepted - FIELDS):
        raise OptionError(
            saw=f"accept {', '.join(unknown)}",
            needed=f"names among {', '.join(sorted(FIELDS))}",
            do="give none first: what differs is then said, and by which name it is accepted",
        )
    left = {name: both for name, both in conflicts.items() if name not in accepted}
    if left:
        said = "; ".join(
            f"{name}: {mine} against {theirs}" for name, (mine, theirs) in left.items()
        )
        raise OptionError(
            saw=f"{source.name} and {target.name} use the same weights differently: {said}",
            needed="two layouts of one function, since nothing of it is folded into weights",
            do=f"if the model that reads the result is told so: accept {', '.join(left)}",
        )


def strays(module: Module, layout: Layout) -> list[str]:
    """What stands within a module, and is neither of the layout nor known beside it."""
    return [
        name
        for name in module.beside
        if not any(fnmatchcase(name.removeprefix(module.prefix), known) for known in layout.beside)
        and outside(layout, name, [module.place.root]) is None
    ]


def _require_known(module: Module, layout: Layout, headers: Mapping[str, Header]) -> None:
    stray = strays(module, layout)
    if stray:
        raise OptionError(
            saw=f"{', '.join(stray[:4])}{' ...' if len(stray) > 4 else ''}, within {module.prefix}",
            needed=f"the tensors of {layout.name}: {', '.join(layout.tensors)}",
            do="name the layout that the file is in; adapters and quantised weights have to be "
            "merged first",
        )
    for name in module.tensors:
        if headers[name].dtype not in FLOATING:
            raise DTypeError(
                saw=f"{name} in {headers[name].dtype}",
                needed="weights in float64, float32, bfloat16 or float16",
                do="convert before quantising: rows that move must take their scales along",
            )


def _module_steps(
    module: Module,
    source: Layout,
    target: Layout,
    headers: Mapping[str, Header],
    known: Mapping[str, int],
    root: str | None,
) -> list[Step]:
    locals_ = {local: headers[name] for name, local in module.tensors.items()}
    source.require_whole(locals_)
    sizes = source.sizes({local: tuple(header.shape) for local, header in locals_.items()}, known)
    shapes = source.canonical_shapes(locals_, sizes)
    kept = {name: n for name, n in sizes.items() if name == "rotary_width"}
    target_sizes = target.canonical_sizes(shapes, kept)
    target.require_fit(shapes, target_sizes)
    if "interleaved" in (source.function.rotary, target.function.rotary):
        for either in (source, target):
            either.rotary_width(sizes)  # the pairs of one, the share of either
    written = {
        local: pattern
        for local, pattern in target.patterns.items()
        if any(tensor in shapes for tensor in pattern.tensors)
    }
    target.require_whole(written)
    dtypes = {
        tensor: headers[name].dtype
        for name, local in module.tensors.items()
        for tensor in source.patterns[local].tensors
    }
    for pattern in written.values():
        moving.require_one_dtype({t: dtypes[t] for t in pattern.tensors if t in dtypes})
    prefix = module.prefix if not module.place.role else _prefix(module, target, root)
    stored = {local: source.patterns[local] for local in module.tensors.values()}
    steps = []
    for locals_in, locals_out in _components(stored, written):
        inputs = tuple(name for name, local in module.tensors.items() if local in locals_in)
        outputs = {prefix + local: written[local].shape(target_sizes) for local in locals_out}
        if _is_kept(source, target, locals_in, locals_out):
            steps.append(copy(inputs[0], next(iter(outputs)), headers[inputs[0]]))
            continue
        steps.append(
            Step(
                inputs,
                outputs,
                Inside(source, {name: module.tensors[name] for name in inputs}, sizes),
                Inside(target, {prefix + local: local for local in locals_out}, target_sizes),
            )
        )
    return steps


def _is_kept(source: Layout, target: Layout, stored: list[str], written: list[str]) -> bool:
    """Whether one tensor is stored in both in the same way, by one name or another."""
    if len(stored) != 1 or len(written) != 1:
        return False
    mine, theirs = source.patterns[stored[0]], target.patterns[written[0]]
    pairings = {source.function.rotary, target.function.rotary}
    is_turned = len(pairings) == 2 and "interleaved" in pairings
    return (
        (mine.axes, mine.tensors) == (theirs.axes, theirs.tensors)
        and source.all_splits == target.all_splits
        and not (is_turned and not {*ROTATED}.isdisjoint(mine.tensors))
    )


def _prefix(module: Module, target: Layout, root: str | None) -> str:
    template = target.where.get(module.place.role)
    if template is None:
        raise OptionError(
            saw=f"{module.prefix}, which is {module.place.role} attention",
            needed=f"a place for it in {target.name}: it has {', '.join(target.where) or 'none'}",
            do="choose a layout that has one; headwise layouts lists them",
        )
    return module.place.under(root).within(template)


def _components(
    stored: Mapping[str, Pattern], written: Mapping[str, Pattern]
) -> list[tuple[list[str], list[str]]]:
    """The stored tensors and the written ones that share canonical tensors, group by group."""
    groups: list[tuple[set[str], list[str], list[str]]] = [
        (set(pattern.tensors), [name], []) for name, pattern in stored.items()
    ] + [(set(pattern.tensors), [], [name]) for name, pattern in written.items()]
    merged: list[tuple[set[str], list[str], list[str]]] = []
    for group in groups:
        joined = [other for other in merged if other[0] & group[0]]
        merged = [other for other in merged if not other[0] & group[0]]
        for other in joined:
            group = (group[0] | other[0], other[1] + group[1], other[2] + group[2])
        merged.append(group)
    return [(inputs, outputs) for _, inputs, outputs in merged]


def _outside_steps(
    names: Iterable[str],
    source: Layout,
    target: Layout,
    headers: Mapping[str, Header],
    roots: set[str],
    new_root: str | None,
) -> list[Step]:
    """Steps for what is not attention; what either layout does not know keeps its name."""
    kept, places = [], dict[tuple[str, Numbers], dict[str, Pattern]]()
    for name in names:
        found = outside(source, name, roots)
        if found is None:
            kept.append(copy(name, name, headers[name]))
            continue
        template, place = found
        same = places.setdefault((place.root, place.numbers), {})
        same[name] = parse(source.outside[template])
    steps = []
    for (root, numbers), stored in places.items():
        written = _counterparts(stored.values(), target, {slot for slot, _ in numbers})
        for inputs, templates in _components(stored, written):
            held = {name: stored[name] for name in inputs}
            place = Place(root, "", numbers).under(new_root)
            made = {place.within(name): written[name] for name in templates}
            steps += _moved(held, made, headers)
    return steps + kept


def _counterparts(
    stored: Iterable[Pattern], target: Layout, numbered: set[str]
) -> dict[str, Pattern]:
    """The tensors of the target that can be made of these: template -> pattern, each thing once."""
    held = {tensor for pattern in stored for tensor in pattern.tensors}
    found: dict[str, Pattern] = {}
    for template, text in target.outside.items():
        pattern = parse(text)
        if held.issuperset(pattern.tensors) and slots(template) == numbered:
            held -= set(pattern.tensors)
            found[template] = pattern
    return found


def _moved(
    held: Mapping[str, Pattern], made: Mapping[str, Pattern], headers: Mapping[str, Header]
) -> list[Step]:
    """The step between tensors of one content; copies where the target cannot hold all of it."""
    wanted = {tensor for pattern in held.values() for tensor in pattern.tensors}
    if {tensor for pattern in made.values() for tensor in pattern.tensors} != wanted:
        return [copy(name, name, headers[name]) for name in held]
    if list(held.values()) == list(made.values()):
        return [copy(name, new, headers[name]) for name, new in zip(held, made, strict=True)]
    shapes = {name: (pattern, tuple(headers[name].shape)) for name, pattern in held.items()}
    sizes = solve(shapes, {}, {})
    moving.require_one_dtype({name: headers[name].dtype for name in held})
    outputs = {name: pattern.shape(sizes) for name, pattern in made.items()}
    return [Step(tuple(held), outputs, Outside(held, sizes), Outside(made, sizes))]


def copy(name: str, new: str, header: Header) -> Step:
    """A tensor that keeps its bytes."""
    nothing = Outside({}, {})
    return Step((name,), {new: tuple(header.shape)}, nothing, nothing, is_copy=True)


def _require_apart(steps: Iterable[Step]) -> None:
    makers: dict[str, tuple[str, ...]] = {}
    for step in steps:
        for name in step.outputs:
            if name in makers:
                raise OptionError(
                    saw=f"{name}, made of {', '.join(makers[name])} and of "
                    f"{', '.join(step.inputs)}",
                    needed="one tensor for each name",
                    do="take one of them out of the source",
                )
            makers[name] = step.inputs
