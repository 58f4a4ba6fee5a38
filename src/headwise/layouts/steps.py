"""The steps of a conversion: each computes tensors of the target from tensors of the source.

This module also builds the steps of weights outside of attention: norms, the MLP, embeddings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from headwise.function.weights import State
from headwise.layouts._layout import Layout
from headwise.layouts.modules import (
    NamedPosition,
    NameForm,
    locate_weight_outside_attention,
    template_fields,
)
from headwise.layouts.pattern import (
    Pattern,
    pack_tensors,
    parse_pattern,
    require_one_dtype,
    unpack_tensor,
)
from headwise.layouts.sizes import Sizes, solve_axis_sizes

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
    sides: (
        tuple[ModuleTensors | TensorsOutsideAttention, ModuleTensors | TensorsOutsideAttention]
        | None
    ) = None

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


@dataclass(frozen=True)
class ModuleTensors:
    """The tensors of one module in one layout. ``names``: full name -> name within the module."""

    layout: Layout
    names: Mapping[str, str]
    sizes: Sizes

    def read(self, stored: Mapping[str, Tensor]) -> State:
        """Return the canonical tensors of stored ones."""
        local = {self.names[name]: x for name, x in stored.items()}
        return self.layout.read(local, sizes=self.sizes)

    def write(self, canonical: Mapping[str, Tensor]) -> State:
        """Return the stored tensors of canonical ones; only those in ``names``."""
        full = {local: name for name, local in self.names.items()}
        made = self.layout.write(canonical, sizes=self.sizes)
        return {full[local]: x for local, x in made.items() if local in full}


@dataclass(frozen=True)
class TensorsOutsideAttention:
    """Tensors outside of attention: full name -> pattern."""

    patterns: Mapping[str, Pattern]
    sizes: Sizes

    def read(self, stored: Mapping[str, Tensor]) -> State:
        """Return the tensors by their names in the patterns."""
        tensors: State = {}
        for name, tensor in stored.items():
            tensors |= unpack_tensor(self.patterns[name], tensor, self.sizes)
        return tensors

    def write(self, canonical: Mapping[str, Tensor]) -> State:
        """Return the stored tensors."""
        return {
            name: pack_tensors(pattern, canonical, self.sizes)
            for name, pattern in self.patterns.items()
            if set(pattern.tensors) <= canonical.keys()
        }


def make_copy_step(name: str, new: str, header: TensorHeader) -> ConversionStep:
    """Return the step that copies a tensor under a new name."""
    return ConversionStep((name,), {new: tuple(header.shape)})


def group_tensors_by_content(
    stored: Mapping[str, Pattern], written: Mapping[str, Pattern]
) -> list[tuple[list[str], list[str]]]:
    """Group the stored and the written tensors that share canonical tensors."""
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
    kept, places = [], dict[NamedPosition, dict[str, Pattern]]()
    for name in names:
        match = locate_weight_outside_attention(source, name, roots)
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
            mine, theirs = (
                {tensor for pattern in some.values() for tensor in pattern.tensors}
                for some in (held, made)
            )
            if mine != theirs:  # the target has no name for some of the tensors
                kept += inputs
                continue
            steps += _make_steps_for_group(held, made, headers)
    return steps + [
        make_copy_step(name, _replace_root_prefix(form.root, name, roots), headers[name])
        for name in kept
    ]


def _replace_root_prefix(root: str | None, name: str, roots: Iterable[str]) -> str:
    """Return a name with its root replaced, if the name has one of ``roots``."""
    above = [old for old in roots if name.startswith(old)]
    return name if root is None or not above else root + name.removeprefix(max(above, key=len))


def _find_counterparts(
    stored: Iterable[Pattern], target: Layout, numbered: set[str]
) -> dict[str, Pattern]:
    """Return the tensors of the target that these make up: template -> pattern, no tensor twice."""
    held = {tensor for pattern in stored for tensor in pattern.tensors}
    patterns: dict[str, Pattern] = {}
    for template, text in target.outside.items():
        pattern = parse_pattern(text)
        if held.issuperset(pattern.tensors) and template_fields(template) == numbered:
            held -= set(pattern.tensors)
            patterns[template] = pattern
    return patterns


def _make_steps_for_group(
    held: Mapping[str, Pattern], made: Mapping[str, Pattern], headers: Mapping[str, TensorHeader]
) -> list[ConversionStep]:
    """Return the steps between stored tensors that hold the same canonical tensors."""
    if list(held.values()) == list(made.values()):
        return [
            make_copy_step(name, new, headers[name]) for name, new in zip(held, made, strict=True)
        ]
    shapes = {name: (pattern, tuple(headers[name].shape)) for name, pattern in held.items()}
    sizes = solve_axis_sizes(shapes, {}, {})
    require_one_dtype({name: headers[name].dtype for name in held})
    outputs = {name: pattern.shape(sizes) for name, pattern in made.items()}
    return [
        ConversionStep(
            tuple(held),
            outputs,
            (TensorsOutsideAttention(held, sizes), TensorsOutsideAttention(made, sizes)),
        )
    ]
