"""`convert`, and its plans: the steps between two layouts, from names and shapes alone.

The steps are as small as the two layouts allow, so that a checkpoint streams: a tensor waits for
another one only where they are fused on one side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import ne
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from headwise.errors import DTypeError, HeadwiseError, OptionError, ShapeError
from headwise.function.spec import require_conflicts_accepted
from headwise.function.weights import State
from headwise.layouts import modules as naming
from headwise.layouts import pattern as notation
from headwise.layouts import registry
from headwise.layouts._layout import SLOT, Layout
from headwise.layouts.equality import LayoutReading
from headwise.layouts.modules import NamedModule, NameForm, find_modules
from headwise.layouts.pattern import Pattern, Sizes, parse_pattern, unpack_tensor
from headwise.support.tensors import same_bytes, tensors_of_arrays

PARTS = ("weight", "kernel", "W", "w", "bias", "b")  # of a linear layer, or of a norm


@runtime_checkable
class TensorHeader(Protocol):
    """Shape and dtype of a tensor that may not be loaded yet; a tensor fits as well."""

    @property
    def shape(self) -> Iterable[int]:
        """Sizes of the axes."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the entries."""


@dataclass(frozen=True)
class TensorsOutsideAttention:
    """Tensors outside of attention: full name -> pattern."""

    patterns: Mapping[str, Pattern]
    sizes: Sizes

    def read(self, stored: Mapping[str, Tensor]) -> State:
        """Return the tensors by their names in the patterns."""
        parts = (unpack_tensor(self.patterns[name], x, self.sizes) for name, x in stored.items())
        return {tensor: x for part in parts for tensor, x in part.items()}

    def write(self, canonical: Mapping[str, Tensor]) -> State:
        """Return the stored tensors."""
        return {
            name: notation.pack_tensors(pattern, canonical, self.sizes)
            for name, pattern in self.patterns.items()
            if set(pattern.tensors) <= canonical.keys()
        }


Side = LayoutReading | TensorsOutsideAttention


@dataclass(frozen=True)
class ConversionStep:
    """Some tensors of the target, computed from some of the source.

    Attributes:
        inputs: names in the source.
        outputs: name in the target -> shape; none for biases that must be +0 to be left out.
        sides: stored tensors -> canonical ones, by names of their own, and these -> tensors of the
            target; None where the one output is the one input, byte for byte.
    """

    inputs: tuple[str, ...]
    outputs: Mapping[str, tuple[int, ...]]
    sides: tuple[Side, Side] | None = None

    @property
    def is_copy(self) -> bool:
        """True if the step copies one tensor byte for byte."""
        return self.sides is None

    def convert(self, stored: Mapping[str, Tensor]) -> State:
        """Compute the tensors of the target."""
        if self.sides is None:
            return dict(zip(self.outputs, (stored[name] for name in self.inputs), strict=True))
        reader, writer = self.sides
        return writer.write(reader.read(stored))


def make_copy_step(name: str, new: str, header: TensorHeader) -> ConversionStep:
    return ConversionStep((name,), {new: tuple(header.shape)})


def group_tensors_by_content(
    stored: Mapping[str, Pattern], written: Mapping[str, Pattern]
) -> list[tuple[list[str], list[str]]]:
    merged: list[tuple[set[str], list[str], list[str]]] = []
    groups = [({*pattern.tensors}, [name], list[str]()) for name, pattern in stored.items()]
    groups += [({*pattern.tensors}, [], [name]) for name, pattern in written.items()]
    for tensors, before, after in groups:
        joined = [other for other in merged if other[0] & tensors]
        merged = [other for other in merged if not other[0] & tensors]
        for more, stored_more, written_more in joined:
            tensors, before, after = tensors | more, stored_more + before, written_more + after
        merged.append((tensors, before, after))
    return [(inputs, outputs) for _, inputs, outputs in merged]


def steps_outside_attention(
    names: Iterable[str],
    source: Layout,
    target: Layout,
    headers: Mapping[str, TensorHeader],
    roots: set[str],
    *,
    form: NameForm,
) -> list[ConversionStep]:
    """Return the steps of weights outside of attention.

    A tensor that either layout does not list keeps its name. So do all parts of a module that
    holds an unlisted tensor, such as scales or an adapter: the parts stay together.
    """
    kept, places = [], dict[naming.NamedPosition, dict[str, Pattern]]()
    for name in names:
        match = naming.locate_weight_outside_attention(source, name, roots)
        if match is None:
            kept.append(name)
            continue
        template, place = match
        same = places.setdefault(replace(place, role=""), {})
        same[name] = parse_pattern(source.outside[template])
    steps = []
    for place, stored in places.items():
        written = _find_counterparts(stored.values(), target, {slot for slot, _ in place.numbers})
        for inputs, templates in group_tensors_by_content(stored, written):
            # A module with further tensors (scales, an adapter, a bias) keeps its name.
            parts = (name.rpartition(".") for name in inputs)
            above = tuple(f"{module}." for module, _, leaf in parts if leaf in PARTS)
            if any(other.startswith(above) for other in kept):
                kept += inputs
                continue
            held = {name: stored[name] for name in inputs}
            made = {
                place.in_name_form(form).fill_name_template(name): written[name]
                for name in templates
            }
            sides = ({t for p in some.values() for t in p.tensors} for some in (held, made))
            if ne(*sides):  # the target has no name for some of the tensors
                kept += inputs
                continue
            steps += _make_steps_for_group(held, made, headers)
    for name in kept:
        its_roots = [old for old in roots if name.startswith(old)]
        new = name
        if form.root is not None and its_roots:
            new = form.root + name.removeprefix(max(its_roots, key=len))
        steps.append(make_copy_step(name, new, headers[name]))
    return steps


def _find_counterparts(
    stored: Iterable[Pattern], target: Layout, numbered: set[str]
) -> dict[str, Pattern]:
    """Return the tensors of the target that these make up: template -> pattern, no tensor twice."""
    held = {tensor for pattern in stored for tensor in pattern.tensors}
    patterns: dict[str, Pattern] = {}
    for template, text in target.outside.items():
        pattern = parse_pattern(text)
        if held.issuperset(pattern.tensors) and {*SLOT.findall(template)} == numbered:
            held -= set(pattern.tensors)
            patterns[template] = pattern
    return patterns


def _make_steps_for_group(
    held: Mapping[str, Pattern], made: Mapping[str, Pattern], headers: Mapping[str, TensorHeader]
) -> list[ConversionStep]:
    if list(held.values()) == list(made.values()):
        pairs = zip(held, made, strict=True)
        return [make_copy_step(name, new, headers[name]) for name, new in pairs]
    shapes = {name: (pattern, tuple(headers[name].shape)) for name, pattern in held.items()}
    sizes = notation.solve_axis_sizes(shapes, {}, {})
    notation.require_one_dtype({name: headers[name].dtype for name in held})
    outputs = {name: pattern.shape(sizes) for name, pattern in made.items()}
    sides = TensorsOutsideAttention(held, sizes), TensorsOutsideAttention(made, sizes)
    return [ConversionStep(tuple(held), outputs, sides)]


FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def plan_conversion(
    headers: Mapping[str, TensorHeader],
    source: Layout,
    target: Layout,
    *,
    accept: Iterable[str] = (),
    form: NameForm = naming.AS_STORED,
    **known: int,
) -> list[ConversionStep]:
    """Return the steps from one layout to another; steps that only check come first.

    Args:
        headers: name -> shape and dtype of every tensor; tensors fit, also those on "meta".
        source: the layout that they are in.
        target: the layout to write.
        accept: settings of `AttentionSpec` that may differ.
        form: prefix and base name of the target's names; by default its layout's or the source's.
        known: heads, kv_heads, rotary_width, and other counts that follow from no shape.

    Raises:
        OptionError: no module is found, the layouts are other functions, or names collide.
        ShapeError: shapes that do not fit, or that the target cannot hold.
        DTypeError: attention in integers or in 8-bit numbers, or in several dtypes where they
            would share a tensor.
    """
    modules = find_modules(source, headers)
    if not modules:
        raise OptionError(
            saw=f"{len(headers)} tensors, among them {sorted(headers)[:3]}",
            needed=f"modules of {source.name}, which have {', '.join(source.tensors)}",
            do="headwise detect tells which layout a file is in",
        )
    for module in modules:
        _require_tensors_listed_by_layout(module, source, headers)
    fitted = [(module, _solve_module_sizes(module, source, headers, known)) for module in modules]
    conflicts = _conflicting_function_settings([sizes for _, sizes in fitted], source, target)
    require_conflicts_accepted(conflicts, accept, between=f"{source.name} and {target.name}")
    _require_same_head_dim_across_modules(fitted, known)
    if form.base is None and any(module.place.is_base for module in modules):
        form = replace(form, base=True)  # so an unembedding gets its name without the base as well
    is_one_model = len({module.place.root for module in modules if module.place.role}) == 1
    if form.root is None and is_one_model and all(module.place.role for module in modules):
        form = replace(form, root=target.root if target.name != source.name else None)
    steps: list[ConversionStep] = []
    for module, sizes in fitted:
        steps += _module_steps(module, sizes, source, target, headers, form)
    return _add_steps_outside_attention(steps, modules, source, target, headers, form)


def plan_renaming_within_layout(
    headers: Mapping[str, TensorHeader], layout: Layout, *, form: NameForm
) -> list[ConversionStep]:
    """Return the steps that only rename tensors; modules may lack some of their tensors."""
    modules = find_modules(layout, headers)
    steps = [
        make_copy_step(name, _target_prefix(module, layout, form) + local, headers[name])
        for module in modules
        for name, local in module.tensors.items()
    ]
    return _add_steps_outside_attention(steps, modules, layout, layout, headers, form)


def _add_steps_outside_attention(
    steps: list[ConversionStep],
    modules: Iterable[NamedModule],
    source: Layout,
    target: Layout,
    headers: Mapping[str, TensorHeader],
    form: NameForm,
) -> list[ConversionStep]:
    done = {name for step in steps for name in step.inputs}
    roots = {module.place.root for module in modules}
    rest = [name for name in headers if name not in done]
    steps = steps + steps_outside_attention(rest, source, target, headers, roots, form=form)
    makers: dict[str, str] = {}
    for step in steps:
        made_of = ", ".join(step.inputs)
        for name in step.outputs:
            if name in makers:
                raise OptionError(
                    saw=f"{name}, made of {makers[name]} and of {made_of}",
                    needed="one tensor for each name",
                    do="take one of them out of the source",
                )
            makers[name] = made_of
    return sorted(steps, key=lambda step: bool(step.outputs))


def find_spec_conflicts(
    headers: Mapping[str, TensorHeader], source: Layout, target: Layout, known: Mapping[str, int]
) -> dict[str, tuple[str, str]]:
    """Return the settings of `AttentionSpec` in which these modules differ from the target.

    A known rotary_width is compared too.

    Raises:
        OptionError, ShapeError: the modules cannot be read in the source's layout.
    """
    modules = find_modules(source, headers)
    return _conflicting_function_settings(
        [_solve_module_sizes(module, source, headers, known) for module in modules], source, target
    )


def _conflicting_function_settings(
    sizes: Iterable[Sizes], source: Layout, target: Layout
) -> dict[str, tuple[str, str]]:
    conflicts = source.function.conflicts(target.function)
    for each in sizes:
        conflicts |= source.function.with_rotary_width_from_sizes(each).conflicts(target.function)
    return conflicts


def _require_tensors_listed_by_layout(
    module: NamedModule, layout: Layout, headers: Mapping[str, TensorHeader]
) -> None:
    stray = naming.find_unlisted_tensors_of_module(module, layout)
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


def _require_same_head_dim_across_modules(
    fitted: Iterable[tuple[NamedModule, Sizes]], known: Mapping[str, int]
) -> None:
    first: dict[int, str] = {}
    for module, sizes in fitted:
        first.setdefault(sizes["head_dim"], module.prefix)
    if len(first) > 1 and "heads" in known and "head_dim" not in known:
        widths = ", ".join(f"{head_dim} in {prefix}" for head_dim, prefix in first.items())
        raise ShapeError(
            saw=f"heads {known['heads']}, which gives a head_dim of {widths}",
            needed="one head_dim: modules of another width have other heads",
            do="give {head_dim} in place of {heads}, if all of them share it; or convert the parts "
            "of the model one by one",
            parameter={"head_dim": (), "heads": ()},
        )


def _solve_module_sizes(
    module: NamedModule,
    source: Layout,
    headers: Mapping[str, TensorHeader],
    known: Mapping[str, int],
) -> Sizes:
    stored = {local: headers[name] for name, local in module.tensors.items()}
    source.require_whole(stored, prefix=module.prefix)
    return source.sizes({local: tuple(header.shape) for local, header in stored.items()}, known)


def _module_steps(
    module: NamedModule,
    sizes: Sizes,
    source: Layout,
    target: Layout,
    headers: Mapping[str, TensorHeader],
    form: NameForm,
) -> list[ConversionStep]:
    shapes = source.canonical_shapes(module.tensors.values(), sizes)
    known = {name: n for name, n in sizes.items() if name == "rotary_width"}
    target_sizes = target.canonical_sizes(shapes, known)
    target.require_can_store(shapes, target_sizes)
    if "interleaved" in (source.rows, target.rows):
        for either in (source, target):
            either.rotary_width(sizes)  # raises where the width is unknown or odd
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
        notation.require_one_dtype({t: dtypes[t] for t in pattern.tensors if t in dtypes})
    prefix = _target_prefix(module, target, form)
    stored = {local: source.patterns[local] for local in module.tensors.values()}
    steps = []
    for locals_in, locals_out in group_tensors_by_content(stored, written):
        inputs = tuple(name for name, local in module.tensors.items() if local in locals_in)
        outputs = {prefix + local: written[local].shape(target_sizes) for local in locals_out}
        if _is_stored_alike(source, target, locals_in, locals_out):
            steps.append(make_copy_step(inputs[0], next(iter(outputs)), headers[inputs[0]]))
            continue
        reader = LayoutReading(source, {name: module.tensors[name] for name in inputs}, sizes)
        named = {prefix + local: local for local in locals_out}
        writer = LayoutReading(target, named, target_sizes)
        steps.append(ConversionStep(inputs, outputs, (reader, writer)))
    return steps


def _is_stored_alike(source: Layout, target: Layout, stored: list[str], written: list[str]) -> bool:
    if len(stored) != 1 or len(written) != 1:
        return False
    mine, theirs = source.patterns[stored[0]], target.patterns[written[0]]
    return (
        (mine.axes, mine.tensors) == (theirs.axes, theirs.tensors)
        and source.axis_splits_with_defaults == target.axis_splits_with_defaults
        and (
            source.is_ordered_as(target)
            or {*source.rotated, *target.rotated}.isdisjoint(mine.tensors)
        )
    )


def _target_prefix(module: NamedModule, target: Layout, form: NameForm) -> str:
    place = module.place.in_name_form(form)
    if not place.role:
        return place.root
    template = target.where.get(place.role)
    if not target.where:
        raise OptionError(
            saw=f"{module.prefix}, one of the modules of a model",
            needed=f"a layout of whole models: {target.name} is that of one layer",
            do="choose another one; or read one module by Attention.from_layout",
        )
    numbers = {name for name, _ in place.numbers}
    if template is None or not numbers.issuperset(SLOT.findall(template)):
        places = ", ".join(f"{role} ({at})" for role, at in target.where.items())
        raise OptionError(
            saw=f"{module.prefix}, which is {place.role} attention",
            needed=f"a place for it in {target.name}, which has {places}",
            do="choose a layout that has one; headwise layouts lists them",
        )
    return place.fill_name_template(template)


class RoundTripError(HeadwiseError, RuntimeError):
    """A conversion that did not lead back to the bytes it began with."""


def convert(
    state: Mapping[str, Tensor | np.ndarray],
    source: str | Layout,
    target: str | Layout,
    *,
    accept: Iterable[str] = (),
    root: str | None = None,
    **known: int,
) -> dict[str, Tensor]:
    """Convert the tensors of a module, or of a whole model, to another layout.

    Every rewritten tensor is converted back and compared byte for byte. A tensor that both layouts
    store in the same way, or that is outside of attention, is copied under its name in the target.
    A tensor that either layout does not list keeps its name. The result shares no memory with
    ``state``.

    Args:
        state: name -> tensor or NumPy array; as from ``state_dict()`` or a file.
        source: the layout they are in, or its name.
        target: the wanted one.
        accept: settings of `AttentionSpec` that may differ.
        root: what stands before all names of the target, such as "transformer."; what its layout
            states, or stands before those of the source, if None.
        known: heads, and other counts that follow from no shape: kv_heads, rotary_width.

    Raises:
        OptionError, ShapeError, DTypeError: see `headwise.layouts.plan_conversion`.
        RoundTripError: the way back does not lead to the same bytes.
    """
    converted: dict[str, Tensor] = {}
    stored, form = tensors_of_arrays(state), NameForm(root=root)
    for step in plan_conversion(
        stored, registry.layout(source), registry.layout(target), accept=accept, form=form, **known
    ):
        tensors = run_round_trip_checked_step(step, {name: stored[name] for name in step.inputs})
        converted |= {name: x.clone() for name, x in tensors.items()} if step.is_copy else tensors
    return converted


def run_round_trip_checked_step(
    step: ConversionStep, stored: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Run one step and its inverse, and compare the bytes.

    Raises:
        RoundTripError: they differ.
    """
    made = step.convert(stored)
    if step.sides is None or not step.outputs:
        return made
    reader, writer = step.sides
    back = reader.write(writer.read(made))
    for name, tensor in stored.items():
        if not same_bytes(tensor, back[name]):
            raise RoundTripError(
                saw=f"{name}, which does not come back from {', '.join(made)}",
                needed="the same bytes",
                do="nothing was written; the layouts' patterns contradict each other",
            )
    return made
