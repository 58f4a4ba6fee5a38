"""Tape of a running model: every tensor that torch computes, and what it was computed from.

The tape records below Python, where any way to write a product is one of a few operators: an
einsum, `@`, a linear layer, a fused kernel. An *activation* is a tensor that depends on the inputs
of the model; weights, positions and tables do not.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from headwise.support.private_torch import DispatchMode
from headwise.support.tensors import iterate_leaves, map_leaves
from headwise.support.tracing import evaluation_mode

# Operators by name. The place of the two factors of a product among its arguments:
PRODUCTS = {
    "aten.mm.default": 0,
    "aten.bmm.default": 0,
    "aten.convolution.default": 0,
    "aten.addmm.default": 1,
    "aten.baddbmm.default": 1,
}
FUSED = "aten._scaled_dot_product"  # begins the operators that are both products of an attention
VIEWS = {"aten.view.default", "aten._unsafe_view.default", "aten._reshape_alias.default"}
# These move numbers, and compute none.
MOVES = VIEWS | {
    *("aten.permute.default", "aten.t.default", "aten.transpose.int", "aten.expand.default"),
    *("aten.slice.Tensor", "aten.select.int", "aten.unsqueeze.default", "aten.squeeze.dim"),
    *("aten.squeeze.default", "aten.squeeze.dims", "aten.clone.default", "aten.alias.default"),
    *("aten.split.Tensor", "aten.split_with_sizes.default", "aten.unbind.int"),
    *("aten.detach.default", "aten._to_copy.default"),
}
ADDITIONS = {"aten.add.Tensor", "aten.add_.Tensor"}
SCALINGS = {  # by a number where they have one tensor
    *("aten.mul.Tensor", "aten.div.Tensor", "aten.mul.Scalar", "aten.div.Scalar"),
}
SOFTMAXES = {"aten._softmax.default", "aten._safe_softmax.default", "aten.exp.default"}
# A module, an operator, how often it ran there before, and which tensor of its result. Runs on
# other lengths have other views, and the same of all else in the module of an attention.
Place = tuple[str, str, int, int]


@dataclass(eq=False)
class Node:
    """One tensor of a run."""

    order: int
    operator: str  # "" for a tensor that came from outside
    value: Tensor
    parents: tuple["Node", ...] = ()
    module: str = ""  # the innermost module with weights that ran
    is_activation: bool = False
    factors: tuple["Node", ...] = ()  # of a product
    place: Place | None = None  # None for a tensor that came from outside
    children: list["Node"] = field(default_factory=list)

    @property
    def is_half(self) -> bool:
        """True for a tensor in half precision, in a run in a wider one."""
        return self.value.dtype in (torch.float16, torch.bfloat16)

    @property
    def operation(self) -> str:
        """The name of its operator in torch, without the overload."""
        return self.operator.split(".")[1]

    @property
    def is_product(self) -> bool:
        """True for a product of two tensors of which at least one is an activation."""
        return bool(self.factors) and self.is_activation

    @property
    def is_projection(self) -> bool:
        """True for a product of an activation and of weights."""
        return self.is_product and not all(each.is_activation for each in self.factors)

    @property
    def projected(self) -> "Node":
        """The activation that a projection multiplies, before axes were joined for the product."""
        node = next(each for each in self.factors if each.is_activation)
        while node.operator in VIEWS:
            [before] = node.parents
            if before.value.shape[-1:] != node.value.shape[-1:]:
                break
            node = before
        return node


class _Counting(DispatchMode):  # type: ignore[misc]
    """Mode that counts how often each operator ran in each module."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.times = "", Counter[tuple[str, str]]()

    def count(self, operator: str) -> tuple[str, str, int]:
        """Return the module that runs, the operator, and how often it ran there before."""
        self.times[self.module, operator] += 1
        return self.module, operator, self.times[self.module, operator] - 1

    @contextmanager
    def follow_modules(self, model: nn.Module) -> Iterator[None]:
        """Note the innermost module with weights that runs."""
        running: list[str] = []

        def start(name: str) -> Any:
            def on_start(*_: Any) -> None:
                running.append(name)
                self.module = name

            return on_start

        def on_end(*_: Any) -> None:
            running.pop()
            self.module = running[-1] if running else ""

        with ExitStack() as handles:
            for name, module in model.named_modules():
                if any(True for _ in module.parameters()):
                    handles.enter_context(module.register_forward_pre_hook(start(name)))
                    handles.enter_context(module.register_forward_hook(on_end, always_call=True))
            yield


class Tape(_Counting):
    """Mode that records all operators; ``inputs`` are those of the model."""

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self._node_of: dict[int, Node] = {}
        self._of_storage: dict[int, list[Tensor]] = {}
        for x in inputs:
            self._add(x, "", (), is_activation=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and record its results."""
        del types
        kwargs = kwargs or {}
        given = [x for x in iterate_leaves((args, kwargs)) if isinstance(x, Tensor)]
        parents = tuple(self._find(x) for x in given)
        written = _list_written(func, args, kwargs)
        for x in written:
            for other in self._of_storage.get(_storage(x), ()):
                self._node_of[id(other)].value = other.clone()
        result = func(*args, **kwargs)
        factors: tuple[Node, ...] = ()
        operator = str(func)
        place = PRODUCTS.get(operator, 0 if operator.startswith(FUSED) else None)
        if place is not None:
            factors = tuple(self._find(x) for x in args[place : place + 2])
        changed = [other for x in written for other in self._of_storage.get(_storage(x), ())]
        for x in changed:
            self._add(x, operator, (self._node_of[id(x)], *parents))
        for x in iterate_leaves(result):
            if isinstance(x, Tensor) and not any(x is other for other in changed):
                self._add(x, operator, parents, factors=factors)
        turn = self.count(operator)
        for number, x in enumerate(iterate_leaves(result)):
            if isinstance(x, Tensor):
                self._node_of[id(x)].place = *turn, number
        return result

    def _find(self, x: Tensor) -> Node:
        return self._node_of[id(x)] if id(x) in self._node_of else self._add(x, "", ())

    def _add(
        self,
        x: Tensor,
        operator: str,
        parents: tuple[Node, ...],
        *,
        is_activation: bool = False,
        factors: tuple[Node, ...] = (),
    ) -> Node:
        is_activation = is_activation or any(each.is_activation for each in parents)
        node = Node(
            len(self.nodes), operator, x, parents, self.module, is_activation, factors=factors
        )
        for each in parents:
            each.children.append(node)
        if id(x) not in self._node_of:
            self._of_storage.setdefault(_storage(x), []).append(x)  # which keeps it alive
        self._node_of[id(x)] = node
        self.nodes.append(node)
        return node


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _list_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator changes in place."""
    written = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written += [x for x in iterate_leaves(value) if isinstance(x, Tensor)]
    return written


class _Replacing(_Counting):
    """Mode that puts tensors in the place of results, and stops where one is ``wanted``."""

    def __init__(self, given: Mapping[Place, Tensor], wanted: Place) -> None:
        super().__init__()
        self.given, self.wanted = given, wanted
        self.taken: Tensor | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and replace its results."""
        del types
        result, turn, numbers = func(*args, **(kwargs or {})), self.count(str(func)), count()
        if turn == self.wanted[:3]:
            self.taken = [*iterate_leaves(result)][self.wanted[3]]
            raise _FoundError

        def take(x: Any) -> Any:
            given = self.given.get((*turn, next(numbers)))
            if given is None:
                return x
            given = given.reshape(x.shape).to(x.dtype)
            return x.copy_(given) if _list_written(func, args, kwargs or {}) else given

        return map_leaves(take, result)


class _FoundError(Exception):
    """The tensor that was wanted is there."""


@contextmanager
def _running_plainly(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode, with fused attention as the products that it stands for."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), evaluation_mode(model), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)


def record_tape(
    model: nn.Module, positional: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Tape, Any]:
    """Run a model with all its operators recorded; return the tape and the output."""
    tape = Tape(x for x in iterate_leaves((positional, named)) if isinstance(x, Tensor))
    with _running_plainly(model), tape.follow_modules(model), tape:
        output = model(*positional, **named)
    return tape, output


def run_with(
    given: Mapping[Place, Tensor],
    wanted: Place,
    model: nn.Module,
    positional: tuple[Any, ...],
    named: Mapping[str, Any],
) -> tuple[Tensor, Counter[str]]:
    """Run a model with tensors in the place of results of its operators.

    Return another result, and the products before it in its module.
    """
    mode = _Replacing(given, wanted)
    with suppress(_FoundError), _running_plainly(model), mode.follow_modules(model), mode:
        model(*positional, **named)
    if mode.taken is None:
        raise LookupError(f"no {wanted[1]} {wanted[2]} in {wanted[0]}")
    ran = {operator: n for (module, operator), n in mode.times.items() if module == wanted[0]}
    return mode.taken, Counter({name: n for name, n in ran.items() if name in PRODUCTS})
