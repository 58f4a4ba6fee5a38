"""The steps of a conversion: some tensors of the target, made of some of the source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from headwise.layouts import moving
from headwise.layouts.canonical import State
from headwise.layouts.layout import Layout
from headwise.layouts.pattern import Pattern
from headwise.layouts.sizes import Sizes


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


def copy(name: str, new: str, header: Header) -> Step:
    """A tensor that keeps its bytes."""
    nothing = Outside({}, {})
    return Step((name,), {new: tuple(header.shape)}, nothing, nothing, is_copy=True)


def components(
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
