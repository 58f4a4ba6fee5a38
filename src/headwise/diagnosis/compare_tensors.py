"""Two sets of tensors byte for byte, in one layout or in two; and what their layers give."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headwise.checkpoints.attention_loading import attention_of
from headwise.checkpoints.config_check import in_layer
from headwise.diagnosis.diagnosis_result import OutputComparison, TensorComparison, TensorEvidence
from headwise.errors import DTypeError, OptionError, ShapeError
from headwise.layers.native.attention import Attention
from headwise.layouts.canonical import BIASES
from headwise.layouts.conversion_plan import conflicts_of, plan, renamed
from headwise.layouts.conversion_steps import ConversionStep
from headwise.layouts.equality import differing, differing_part, same_bytes
from headwise.layouts.layout import Layout, is_positive_zero
from headwise.layouts.module_names import AS_STORED, NamedModule, NameForm, modules_of
from headwise.layouts.registry import layout
from headwise.support.progress import Progress, no_progress

BATCH, LENGTH = 2, 48
UNIT = torch.finfo(torch.float64).eps


def outputs_of_both(
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    first_layout: Layout,
    second_layout: Layout,
    config: Mapping[str, Any],
    **known: int,
) -> list[OutputComparison]:
    """Run every layer of both, each with the pairing of its own layout.

    The config says the numbers of rotations, norms and softcaps.

    Raises:
        OptionError: the config does not say what the layouts leave to it, or the weights give no
            numbers.
    """
    layers = (
        _layers(first, first_layout, config, known),
        _layers(second, second_layout, config, known),
    )
    return [_run_both(*pair) for pair in zip(*layers, strict=True)]


def _layers(
    state: Mapping[str, Tensor], layout: Layout, config: Mapping[str, Any], known: Mapping[str, int]
) -> Iterator[tuple[str, Attention]]:
    modules = modules_of(layout, state)
    for module in modules:
        described = in_layer(layout, config, module.layer)
        sizes, dtype = dict(known), torch.float64
        layer = attention_of(module, modules, state, described, config, sizes, dtype=dtype)
        yield module.prefix, layer.eval()


@torch.no_grad()
def _run_both(one: tuple[str, Attention], other: tuple[str, Attention]) -> OutputComparison:
    (first, a), (second, b) = one, other
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, LENGTH, a.embed_dim, generator=generator, dtype=torch.float64)
    source = None
    if a.source_dim != a.embed_dim:
        source = torch.randn(BATCH, LENGTH, a.source_dim, generator=generator, dtype=torch.float64)
    ours, theirs = a(x, source), b(x, source)
    largest = float(ours.abs().max())
    if not math.isfinite(largest):
        raise OptionError(
            saw=f"outputs of {first} that are NaN or infinite",
            needed="finite weights",
            do="leave --outputs out: bytes are compared all the same",
        )
    apart = float((ours - theirs).abs().max()) / largest
    # A weight changes by 2 p u where scores of size p are rounded; a sum of n products by n u.
    peak = float(a.matrix(x, source).logsumexp().abs().max())
    terms = a.embed_dim + a.head_dim + LENGTH + a.num_heads * a.value_dim
    return OutputComparison(first, second, apart, UNIT * terms * (1 + 4 * peak))


Stored = Mapping[str, Tensor]
UNREADABLE = (OptionError, ShapeError, DTypeError)


def compare_tensors(
    first: Stored,
    second: Stored,
    first_layout: str | Layout,
    second_layout: str | Layout,
    *,
    progress: Progress = no_progress,
    **known: int,
) -> TensorComparison:
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
            `headwise.layouts.conversion_plan.plan`.
    """
    mine, theirs = layout(first_layout), layout(second_layout)
    is_damaged = _is_damaged(first, mine, known)
    if is_damaged and not _misfit(second, theirs, known):
        return _compared(second, first, theirs, mine, known, progress).swapped()
    return _compared(first, second, mine, theirs, known, progress, is_damaged=is_damaged)


def _misfit(state: Stored, of: Layout, known: Mapping[str, int]) -> bool:
    """Whether a module of these tensors is not whole or does not fit."""
    with suppress(*UNREADABLE):
        _require_fit(state, of, known)
        return False
    return True


def _require_fit(state: Stored, of: Layout, known: Mapping[str, int]) -> None:
    plan(state, of, of, accept=(), form=AS_STORED, **known)


def _is_damaged(state: Stored, of: Layout, known: Mapping[str, int]) -> bool:
    """Whether some modules of these tensors are whole and fit, and others are not or do not."""
    return _misfit(state, of, known) and not all(
        _misfit({name: state[name] for name in (*module.tensors, *module.beside)}, of, known)
        for module in modules_of(of, state)
    )


def _compared(
    first: Stored,
    second: Stored,
    source: Layout,
    target: Layout,
    known: Mapping[str, int],
    progress: Progress,
    *,
    is_damaged: bool = False,
) -> TensorComparison:
    conflicts = source.function.conflicts(target.function)
    # The form of the second; of modules at places that are not known, the whole place is the root.
    mine, theirs = modules_of(source, first), modules_of(target, second)
    are_known = {bool(module.place.role) for module in (*mine, *theirs)}
    is_one = len(mine) == len(theirs) == 1 and len(are_known) == 1
    form = NameForm.of(theirs) if are_known == {True} or is_one else AS_STORED
    if is_damaged and source == target:  # nothing has to be read: what is stored is compared
        steps = renamed(first, source, form=form)
    else:
        try:
            conflicts |= conflicts_of(first, source, target, known)
            steps = plan(first, source, target, accept=conflicts, form=form, **known)
        except UNREADABLE as error:
            # What cannot be read at all is no difference; other shapes are one.
            _require_fit(first, source, known)
            with suppress(ShapeError, DTypeError):
                _require_fit(second, target, known)
            return TensorComparison(
                conflicts=conflicts, unheld=f"{error.saw}; needed: {error.needed}"
            )
    found = _Evidence(first, second, source, target, steps, known)
    for number, step in enumerate(steps):
        found.add(step)
        progress("tensors", number + 1, len(steps))
    return found.comparison(conflicts)


@dataclass
class _Evidence:
    """The evidence on the way. ``known``: heads, and what else no shape tells."""

    first: Stored
    second: Stored
    source: Layout
    target: Layout
    steps: list[ConversionStep]
    known: Mapping[str, int]
    same: int = 0
    met: set[str] = field(default_factory=set)
    differences: list[TensorEvidence] = field(default_factory=list)
    only_first: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def add(self, step: ConversionStep) -> None:
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

    def comparison(self, conflicts: Mapping[str, tuple[str, str]]) -> TensorComparison:
        """All that was found, once every step is compared."""
        left = [name for name in self.second if name not in self.met]
        return TensorComparison(
            same=self.same,
            differences=tuple(self.differences),
            only_first=self.only_first,
            only_second=tuple(n for n in left if not self._is_nothing(n, self.second[n])),
            conflicts=conflicts,
        )

    def _kept_its_names(self, step: ConversionStep) -> bool:
        """Whether the second has these tensors under their old names: nobody translated them."""
        return (
            self._attention.isdisjoint(step.inputs)
            and self.second.keys().isdisjoint(step.outputs)
            and self.second.keys() >= {*step.inputs}
            and self._outputs.isdisjoint(step.inputs)
        )

    def _is_nothing(self, name: str, tensor: Tensor) -> bool:
        """Whether it is a bias of attention that may as well be absent."""
        return name in self._biases and is_positive_zero(tensor)

    def _compare(self, name: str, step: ConversionStep, tensor: Tensor) -> None:
        self.met.add(name)
        other = self.second[name]
        if same_bytes(tensor, other):
            self.same += 1
            return
        said: dict[str, Any] = {"kind": "entries"}
        for kind in ("dtype", "shape"):
            mine, theirs = getattr(tensor, kind), getattr(other, kind)
            if mine != theirs:
                sides = (mine, theirs) if kind == "dtype" else (tuple(mine), tuple(theirs))
                said = {"kind": kind, "sides": tuple(map(str, sides))}
        if said["kind"] == "entries":
            said |= {"numbers": _numbers(tensor, other), "where": self._where(name, tensor)}
        self.differences.append(TensorEvidence(name=name, made_of=step.inputs, **said))

    def _where(self, name: str, tensor: Tensor) -> str:
        """The projections and heads in which a tensor of attention differs from the second's."""
        module = next((m for m in self._modules if name in m.tensors), None)
        if module is None:
            return ""
        shapes = {local: tuple(self.second[n].shape) for n, local in module.tensors.items()}
        with suppress(OptionError, ShapeError):  # another tensor of the module may be the wrong one
            sizes = self.target.sizes(shapes, self.known)
            local = module.tensors[name]
            pair = (tensor, self.second[name])
            mine, theirs = (self.target.read({local: x}, sizes=sizes) for x in pair)
            names = differing(mine, theirs)
            return "; ".join(differing_part(n, mine[n], theirs[n]) for n in names)
        return ""

    @cached_property
    def _modules(self) -> list[NamedModule]:
        return modules_of(self.target, self.second)

    @cached_property
    def _attention(self) -> set[str]:
        return {n for module in modules_of(self.source, self.first) for n in module.tensors}

    @cached_property
    def _outputs(self) -> set[str]:
        return {name for step in self.steps for name in step.outputs}

    @cached_property
    def _biases(self) -> set[str]:
        """Names in the second of biases of attention, also of those that it lacks."""
        return _biases(modules_of(self.target, self._outputs), self.target) | _biases(
            self._modules, self.target
        )


def _biases(modules: Iterable[NamedModule], of: Layout) -> set[str]:
    return {
        name
        for module in modules
        for name, local in module.tensors.items()
        if {*BIASES}.issuperset(of.patterns[local].tensors)
    }


def _numbers(a: Tensor, b: Tensor) -> dict[str, int | float]:
    """How many entries of two tensors differ, and how: see `TensorEvidence`."""
    bits = (_bytes(a) != _bytes(b)).any(1)
    counts: dict[str, int | float] = {"entries": a.numel(), "differing": int(bits.sum())}
    if not a.is_floating_point():
        return counts
    # Numbers of 8 bits can be compared only as wider ones.
    x, y = (tensor.double().reshape(-1)[bits] for tensor in (a, b))
    nan, infinite = (is_it(x) | is_it(y) for is_it in (torch.isnan, torch.isinf))
    finite = (x - y)[~nan & ~infinite].abs()
    kinds = {
        "apart": (x != y) & ~nan & ~infinite,
        "infinite": infinite & ~nan,
        "nan": nan & (x.isnan() != y.isnan()),
        "nan_bits": x.isnan() & y.isnan(),
        "zero_signs": x == y,
    }
    counts |= {name: int(kind.sum()) for name, kind in kinds.items()}
    return counts | {"largest": float(finite.max()) if len(finite) else 0.0}


def _bytes(tensor: Tensor) -> Tensor:
    """A row for each entry."""
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)
