"""Attention inside a model as a function: the model runs with other tokens where it begins."""

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.diagnosis.outputs.runs import Runs
from headwise.diagnosis.simulation.model import Inputs, RecordedCall
from headwise.diagnosis.subjects.subject import FAILURES, describe_error
from headwise.errors import OptionError
from headwise.function.rounding import is_near
from headwise.scanning.sites import Site
from headwise.scanning.tape import MOVES, Node, Place, run_with
from headwise.support.tensors import map_leaves

OUTSIDE: Place = ("", "", 0, 0)  # of a tensor that no operator computed


class PlacedAttention:
    """An attention of a model that ran in float64, to be run on other tokens, at most as many.

    ``inputs`` are those that it had in the run.
    """

    def __init__(self, model: nn.Module, arguments: Any, site: Site, inputs: Inputs) -> None:
        self.model, self.arguments, self.inputs = model, arguments, inputs
        self.end = _find_computed(site.outputs()[-1])
        sources = {"q": inputs.x, "k": inputs.key_source, "v": inputs.key_source}
        nodes = [(role, _find_computed(node)) for role in sources for node in site.sources[role]]
        for self.swaps in (False, True):  # True where tokens come before the batch
            self.entries = {
                _place_of(node): role == "q"
                for role, node in nodes
                if _is_same(node.value, self._swap(sources[role]))
            }
            if self.entries:
                break

    def make_runs(self, call: RecordedCall) -> Runs | None:
        """Return runs in the place of a sequence that hides no key; None where each hides some."""
        mask = call.inputs.mask
        rows = [0] if mask is None else mask.flatten(1).all(1).nonzero().flatten().tolist()
        if not rows or not self.entries or OUTSIDE in (*self.entries, _place_of(self.end)):
            return None
        swaps, output = self.swaps, call.stages.get("output")
        if output is not None and not _is_same(self.end.value, self._swap(output)):
            # torch's own module computes with tokens first, whatever it is given.
            swaps = not swaps
        _, products = run_with({}, _place_of(self.end), self.model, *self.arguments)
        runs = Runs(partial(self._run, rows[0], swaps, products), lambda: call.dtype)
        runs.remember("is fine", lambda: True)
        return runs

    def _run(self, row: int, swaps: bool, products: Counter[str], inputs: Inputs) -> Tensor:
        x, source = inputs.x, inputs.key_source
        given = {place: self._swap(x if is_q else source) for place, is_q in self.entries.items()}
        try:
            arguments = self._cut_arguments(row, inputs)
            output, ran = run_with(given, _place_of(self.end), self.model, *arguments)
            if ran != products:  # another layout in memory may take other products
                raise ValueError(f"{dict(ran)} products in the place of {dict(products)}")
            if swaps:
                return output.reshape(x.shape[1], x.shape[0], -1).transpose(0, 1)
            return output.reshape(*x.shape[:2], -1)
        except FAILURES as error:
            raise OptionError(
                saw=f"a {type(self.model).__name__} that does not run on {len(x)} sequences of "
                f"{x.shape[1]} tokens: {describe_error(error)}",
                needed="a model of any batch, and of fewer tokens than it was given",
                do="compare layers of the two: compare(lambda x: a_layer(x), b_layer)",
            ) from error

    def _swap(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if self.swaps else x

    def _cut_arguments(self, row: int, inputs: Inputs) -> Any:
        """Return the arguments of the model, with one sequence in all places."""
        known, given = self.inputs, inputs
        lengths = {
            known.key_source.shape[1]: given.key_source.shape[1],
            known.x.shape[1]: given.x.shape[1],
        }

        def cut(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            for axis, size in enumerate(x.shape):
                if size == len(known.x) and (axis == 0 or size not in lengths):
                    x = x.index_select(axis, torch.full((len(given.x),), row))
                elif size in lengths:
                    x = x.narrow(axis, 0, lengths[size])
            return x

        return map_leaves(cut, self.arguments)


def _find_computed(node: Node) -> Node:
    """Return the node that computed what a node only moves: other lengths have other moves."""
    while node.operator in MOVES:
        [node] = node.parents
    return node


def _place_of(node: Node) -> Place:
    return node.place or OUTSIDE


def _is_same(value: Tensor, x: Tensor) -> bool:
    """True for the numbers of x; another kernel before them may round the last of their digits."""
    return value.numel() == x.numel() and is_near(value.reshape(x.shape), x)
