"""Comparison of stored weights: bytes, configs, outputs of their layers, and what moved."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headwise.checkpoints.attention import attention_from_state
from headwise.checkpoints.config import layout_in_layer, resolve, window_sides
from headwise.checkpoints.fields import Config
from headwise.errors import DTypeError, OptionError, ShapeError
from headwise.function import rounding
from headwise.function.spec import ABSENT, Softcap
from headwise.function.weights import BIASES, State
from headwise.identify import results
from headwise.identify.catalogue import cause_of_layer_shifts
from headwise.identify.moves.find import find_state_moves
from headwise.identify.moves.move import MoveReport
from headwise.layers.attention import Attention
from headwise.layouts import equality, plan
from headwise.layouts._layout import Layout
from headwise.layouts.modules import AS_STORED, NamedModule, NameForm, find_modules
from headwise.layouts.registry import layout
from headwise.support.progress import Progress, no_progress
from headwise.support.tensors import is_positive_zero, same_bytes

PART = 1 << 20  # entries that are compared at a time
BATCH, LENGTH = 2, 48
UNREADABLE = (OptionError, ShapeError, DTypeError)
Stored = Mapping[str, Tensor]
BuiltLayer = tuple[str, Attention, list[torch.dtype]]  # its name, and the dtypes in the file


def compare_outputs_of_layers(
    first: Stored,
    second: Stored,
    first_layout: Layout,
    second_layout: Layout,
    config: Mapping[str, Any],
    **counts: int,
) -> list[results.OutputComparison]:
    """Run every layer of both in float64, and compare the outputs.

    Rounding in the coarser dtype of the two sets is allowed. Each layer pairs rotated channels as
    its layout does. ``config`` has the numbers of rotations, norms and softcaps.

    Raises:
        OptionError: the config lacks what the layouts leave to it, or outputs are not finite.
    """
    sides = ((first, first_layout), (second, second_layout))
    layers = [_build_float64_layers(*side, config, counts) for side in sides]
    return [_run_both(*pair) for pair in zip(*layers, strict=True)]


def _build_float64_layers(
    state: Stored, layout: Layout, config: Mapping[str, Any], counts: Mapping[str, int]
) -> Iterator[BuiltLayer]:
    """Yield the name of each layer, the layer, and the dtypes of its weights in the file."""
    modules = find_modules(layout, state)
    for module in modules:
        described = layout_in_layer(layout, config, module.layer)
        shapes = {local: tuple(state[name].shape) for name, local in module.tensors.items()}
        sizes = layout.sizes(shapes, counts)
        layer = attention_from_state(
            module, modules, state, described, config, sizes, dtype=torch.float64
        )
        yield module.prefix, layer.eval(), [state[name].dtype for name in module.tensors]


@torch.no_grad()
def _run_both(first: BuiltLayer, second: BuiltLayer) -> results.OutputComparison:
    (name, a, dtypes), (other_name, b, other_dtypes) = first, second
    dtype = rounding.coarsest(dtypes + other_dtypes)
    generator = torch.Generator().manual_seed(0)
    shapes = ((BATCH, LENGTH, n) for n in dict.fromkeys((a.embed_dim, a.source_dim)))
    random = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    inputs = [x.to(dtype) for x in random]
    narrow = copy.deepcopy(a).to(torch.float32 if dtype == torch.float64 else dtype)

    def run(*inputs: Tensor) -> Tensor:
        layer = a if inputs[0].dtype == torch.float64 else narrow
        output: Tensor = layer(*inputs)
        return output

    mine, allowed = rounding.allow_two_runs(run, *inputs, dtype=dtype)
    largest = float(mine.abs().max())
    if not math.isfinite(largest):
        raise OptionError(
            saw=f"outputs of {name} that are NaN or infinite",
            needed="finite weights",
            do="leave --outputs out: verify compares the bytes without it",
        )
    apart = (mine - b(*(x.double() for x in inputs))).abs().max()
    shares = float(apart) / largest, float(allowed.max()) / largest
    return results.OutputComparison(name, other_name, *shares)


def compare_tensors(
    first: Stored,
    second: Stored,
    first_layout: str | Layout,
    second_layout: str | Layout,
    *,
    progress: Progress = no_progress,
    names_heads: bool = True,
    **counts: int,
) -> results.TensorComparison:
    """Convert the first to the layout of the second, step by step, and compare every byte.

    A bias of attention that is +0 in one set and absent in the other is no difference. Tensors
    outside attention may keep their names, as `headwise.convert` leaves them. Where
    some modules of the first lack tensors or do not fit, the second is converted in its place.
    Tensors are read one at a time, so they may be memory-mapped. Heads that differ are named unless
    ``counts``, which no shape decides, are a guess (``names_heads``).

    Raises:
        OptionError, ShapeError, DTypeError: a set cannot be read in its own layout; see
            `headwise.layouts.plan_conversion`.
    """
    mine, theirs = layout(first_layout), layout(second_layout)
    is_damaged = _only_some_modules_fit(first, mine, counts)
    options: dict[str, Any] = {"progress": progress, "names_heads": names_heads}
    if is_damaged and _all_modules_fit(second, theirs, counts):
        return _compare_converted(second, first, theirs, mine, counts, **options).swapped()
    return _compare_converted(first, second, mine, theirs, counts, is_damaged=is_damaged, **options)


def _all_modules_fit(state: Stored, of: Layout, counts: Mapping[str, int]) -> bool:
    with suppress(*UNREADABLE):
        _require_fit(state, of, counts)
        return True
    return False


def _require_fit(state: Stored, of: Layout, counts: Mapping[str, int]) -> None:
    plan.plan_conversion(state, of, of, accept=(), form=AS_STORED, **counts)


def _only_some_modules_fit(state: Stored, of: Layout, counts: Mapping[str, int]) -> bool:
    return not _all_modules_fit(state, of, counts) and any(
        _all_modules_fit(
            {name: state[name] for name in (*module.tensors, *module.beside)}, of, counts
        )
        for module in find_modules(of, state)
    )


def _compare_converted(
    first: Stored,
    second: Stored,
    source: Layout,
    target: Layout,
    counts: Mapping[str, int],
    *,
    progress: Progress,
    names_heads: bool,
    is_damaged: bool = False,
) -> results.TensorComparison:
    conflicts = source.function.conflicts(target.function)
    # Names as in the second, if the layouts list every module's name or both hold a single module.
    mine, theirs = find_modules(source, first), find_modules(target, second)
    are_listed = {bool(module.place.role) for module in (*mine, *theirs)}
    is_single = len(mine) == len(theirs) == 1
    if is_single and not (mine[0].prefix and theirs[0].prefix):  # a layer alone, and in a model
        first = _strip_prefix(first, mine[0].prefix)
        second = _strip_prefix(second, theirs[0].prefix)
    is_single = is_single and len(are_listed) == 1
    form = NameForm.shared_by(theirs) if are_listed == {True} or is_single else AS_STORED
    if is_damaged and source == target:  # stored tensors are compared without conversion
        steps = plan.plan_renaming_within_layout(first, source, form=form)
    else:
        try:
            conflicts |= plan.find_spec_conflicts(first, source, target, counts)
            steps = plan.plan_conversion(
                first, source, target, accept=conflicts, form=form, **counts
            )
        except UNREADABLE as error:
            # Unreadable weights are an error; weights of other shapes are a difference.
            _require_fit(first, source, counts)
            with suppress(ShapeError, DTypeError):
                _require_fit(second, target, counts)
            return results.TensorComparison(
                conflicts=conflicts, unheld=f"{error.saw}; needed: {error.needed}"
            )
    evidence = _StepwiseTensorEvidence(first, second, source, target, steps, counts, names_heads)
    for number, step in enumerate(steps):
        evidence.compare_step(step)
        progress("tensors", number + 1, len(steps))
    return evidence.comparison(conflicts)


def _strip_prefix(stored: Stored, prefix: str) -> Stored:
    if not all(name.startswith(prefix) for name in stored):
        return stored
    return {name.removeprefix(prefix): stored[name] for name in stored}


@dataclass
class _StepwiseTensorEvidence:
    first: Stored
    second: Stored
    source: Layout
    target: Layout
    steps: list[plan.ConversionStep]
    counts: Mapping[str, int]
    names_heads: bool
    same: int = 0
    compared: set[str] = field(default_factory=set)
    differences: list[results.TensorEvidence] = field(default_factory=list)
    only_first: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def compare_step(self, step: plan.ConversionStep) -> None:
        stored = {name: self.first[name] for name in step.inputs}
        if not step.outputs:  # biases that the second's layout has no tensor for
            nonzero = [name for name, tensor in stored.items() if not is_positive_zero(tensor)]
            self.only_first |= dict.fromkeys(nonzero, ())
            return
        converted = stored if self._has_unconverted_names(step) else step.convert(stored)
        missing = []
        for name, tensor in converted.items():
            if name in self.second:
                self._compare_tensor(name, step, tensor)
            elif not self._is_zero_bias(name, tensor):
                missing.append(name)
        if missing:
            self.only_first |= dict.fromkeys(step.inputs, tuple(missing))

    def comparison(self, conflicts: Mapping[str, tuple[str, str]]) -> results.TensorComparison:
        left = [name for name in self.second if name not in self.compared]
        return results.TensorComparison(
            same=self.same,
            differences=tuple(self.differences),
            only_first=self.only_first,
            only_second=tuple(n for n in left if not self._is_zero_bias(n, self.second[n])),
            conflicts=conflicts,
        )

    def _has_unconverted_names(self, step: plan.ConversionStep) -> bool:
        """True if the second has these tensors under the first's names, not the converted ones."""
        return (
            self._attention_names.isdisjoint(step.inputs)
            and self.second.keys().isdisjoint(step.outputs)
            and self.second.keys() >= {*step.inputs}
            and self._output_names_of_all_steps.isdisjoint(step.inputs)
        )

    def _is_zero_bias(self, name: str, tensor: Tensor) -> bool:
        return name in self._attention_bias_names and is_positive_zero(tensor)

    def _compare_tensor(self, name: str, step: plan.ConversionStep, tensor: Tensor) -> None:
        self.compared.add(name)
        other = self.second[name]
        if same_bytes(tensor, other):
            self.same += 1
            return
        evidence: dict[str, Any]
        pair = (tensor, other)
        if tensor.shape != other.shape:
            evidence = {"kind": "shape", "sides": tuple(str(tuple(x.shape)) for x in pair)}
        elif tensor.dtype != other.dtype:
            evidence = {"kind": "dtype", "sides": tuple(str(x.dtype) for x in pair)}
        else:
            evidence = {"kind": "entries", "numbers": _count_differing_entries(*pair)}
            evidence["where"] = self._locate_difference(name, tensor)
        self.differences.append(results.TensorEvidence(name=name, made_of=step.inputs, **evidence))

    def _locate_difference(self, name: str, tensor: Tensor) -> str:
        module = next((m for m in self._second_modules if name in m.tensors), None)
        if module is None:
            return ""
        shapes = {local: tuple(self.second[n].shape) for n, local in module.tensors.items()}
        with suppress(OptionError, ShapeError):  # another tensor of the module may be the wrong one
            sizes = self.target.sizes(shapes, self.counts)
            local = module.tensors[name]
            pair = (tensor, self.second[name])
            mine, theirs = (self.target.read({local: x}, sizes=sizes) for x in pair)
            return equality.describe_difference(mine, theirs, names_heads=self.names_heads)
        return ""

    @cached_property
    def _second_modules(self) -> list[NamedModule]:
        return find_modules(self.target, self.second)

    @cached_property
    def _attention_names(self) -> set[str]:
        return {n for module in find_modules(self.source, self.first) for n in module.tensors}

    @cached_property
    def _output_names_of_all_steps(self) -> set[str]:
        return {name for step in self.steps for name in step.outputs}

    @cached_property
    def _attention_bias_names(self) -> set[str]:
        made = find_modules(self.target, self._output_names_of_all_steps)
        return {
            name
            for module in (*made, *self._second_modules)
            for name, local in module.tensors.items()
            if {*BIASES}.issuperset(self.target.patterns[local].tensors)
        }


def _count_differing_entries(a: Tensor, b: Tensor) -> dict[str, int | float]:
    counts: dict[str, int | float] = {"entries": a.numel(), "differing": 0}
    if not a.is_floating_point():
        return counts | {"differing": int(equality.mark_differing_entries(a, b).sum())}
    counts |= dict.fromkeys((*results.KINDS, "largest"), 0)
    for x, y in zip(*(t.reshape(-1).split(PART) for t in (a, b)), strict=True):
        differ = equality.mark_differing_entries(x, y)
        counts["differing"] += int(differ.sum())
        # torch cannot index float8 numbers.
        x, y = ((t.double() if t.element_size() == 1 else t)[differ].double() for t in (x, y))
        nan, infinite = (test(x) | test(y) for test in (torch.isnan, torch.isinf))
        kinds = (
            (x != y) & ~nan & ~infinite,
            infinite & ~nan,
            nan & (x.isnan() != y.isnan()),
            x.isnan() & y.isnan(),
            x == y,
        )
        for name, kind in zip(results.KINDS, kinds, strict=True):
            counts[name] += int(kind.sum())
        finite = (x - y)[kinds[0]].abs()
        counts["largest"] = max(counts["largest"], float(finite.max()) if len(finite) else 0.0)
    return counts


def find_config_differences(
    first: Config, second: Config, layouts: tuple[Layout, Layout], layers: Iterable[int]
) -> dict[str, tuple[str, str]]:
    """Return the fields in which two configs differ -> (first, second), by the first such layer.

    Compared are theta and scaling of a rotation, the softcap and the window. Without a config of
    each side nothing is known to differ.
    """
    differing: dict[str, tuple[str, str]] = {}
    if not first or not second or first == second:
        return differing
    for layer in sorted({*layers}):
        with suppress(OptionError):  # a setting that headwise has no name for
            mine, theirs = (
                _read_attention_settings(config, layout, layer)
                for config, layout in zip((first, second), layouts, strict=True)
            )
            for name in mine.keys() & theirs.keys():
                if mine[name] != theirs[name]:
                    differing.setdefault(name, (mine[name], theirs[name]))
    return differing


def _read_attention_settings(config: Config, layout: Layout, layer: int) -> dict[str, str]:
    described = layout_in_layer(layout, config, layer)
    spec = resolve(replace(described.function, window=ABSENT), config, layer=layer)
    fields = {"window": str(window_sides(config, layer))}
    if described.function.softcap is not ABSENT:
        fields["softcap"] = str(spec.softcap.limit if isinstance(spec.softcap, Softcap) else None)
    if (rotary := spec.rotation) is not None:
        fields |= {"rope_theta": f"{rotary.theta:g}", "rotary scaling": str(rotary.scaling)}
    return fields


def find_module_moves(
    first: Stored,
    second: Stored,
    layouts: tuple[Layout, Layout],
    differing: Sequence[str],
    counts: Mapping[str, int],
) -> list[results.ModuleMoves]:
    """Name the moves in every module that has one of the tensors ``differing`` of the second.

    Modules are paired in their order. Those that cannot be read are left out.
    """
    mine, theirs = find_modules(layouts[0], first), find_modules(layouts[1], second)
    if len(mine) != len(theirs):
        return []
    concerned = [
        (a, b) for a, b in zip(mine, theirs, strict=True) if not {*b.tensors}.isdisjoint(differing)
    ]
    named, shifts = [], set()
    options: dict[str, Any] = {"rotary_width": counts.get("rotary_width")}
    options["was_interleaved"] = layouts[0].rows == "interleaved"

    def read_second(module: NamedModule) -> State:
        return _unpack_module(second, module, layouts[1], counts)

    # A neighbour may be equal: where layers are off by one, the last has the weights of none.
    near = {theirs.index(b) + shift for _, b in concerned for shift in (-1, 0, 1)}
    candidates = [theirs[place] for place in sorted(near & {*range(len(theirs))})]
    for a, b in concerned:
        with suppress(*UNREADABLE):
            state = _unpack_module(first, a, layouts[0], counts)
            others = [each for each in candidates if each.prefix != b.prefix]
            other = _find_module_with_weights(state, others, read_second)
            if other is not None:
                shifts.add(other.layer - a.layer)
                names = [each.prefix.rstrip(".") for each in (a, other)]
                named.append(
                    results.ModuleMoves(name=names[0], layer=a.layer, is_other_module=names[1])
                )
            else:
                report = find_state_moves(state, read_second(b), **options)
                if report.moves or report.unexplained:  # signs of zeros alone move nothing
                    named.append(_describe_moves_of_module(a, report))
    exchange = cause_of_layer_shifts(shifts)
    return [
        replace(each, causes=(exchange.name,), repairs=(exchange.remedy,), pages=(exchange.page,))
        if each.is_other_module
        else each
        for each in named
    ]


def _unpack_module(
    stored: Stored, module: NamedModule, layout: Layout, counts: Mapping[str, int]
) -> State:
    tensors = {local: stored[name] for name, local in module.tensors.items()}
    known = {name: counts[name] for name in ("heads", "kv_heads", "rotary_width") if name in counts}
    return layout.unpack(tensors, **known)


def _find_module_with_weights(
    state: State, modules: Sequence[NamedModule], read: Callable[[NamedModule], State]
) -> NamedModule | None:
    for module in modules:
        with suppress(*UNREADABLE):
            if not equality.list_differing_tensors(state, read(module)):
                return module
    return None


def _describe_moves_of_module(module: NamedModule, report: MoveReport) -> results.ModuleMoves:
    return results.ModuleMoves(
        name=module.prefix.rstrip("."),
        layer=module.layer,
        moves=tuple(map(str, report.moves)),
        causes=tuple(move.cause.name for move in report.moves),
        repairs=tuple(move.name.repair for move in report.moves),
        pages=tuple(move.cause.page for move in report.moves),
        unexplained=report.unexplained,
    )
