"""Attention inside a model as a function: the model runs with other tokens where it begins."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from headwise.diagnosis.outputs.runs import Runs
from headwise.diagnosis.simulation.model import Inputs, RecordedCall
from headwise.diagnosis.subjects.function import FAILURES, describe_error
from headwise.diagnosis.subjects.sites import Site, find_sites
from headwise.diagnosis.subjects.tape import Place, record_tape, rerun
from headwise.errors import OptionError
from headwise.support.tensors import map_leaves


@dataclass(eq=False)
class PlacedAttention:
    """An attention in a recorded run of a model, to be run on other tokens, at most as many.

    Attributes:
        model: in float64.
        arguments: of the model, positional and named.
        number: of the attention among those of the run.
        site: the attention in the run.
        inputs: what entered it, and the mask of the attention that it should equal.
    """

    model: nn.Module
    arguments: tuple[Any, Any]
    number: int
    site: Site
    inputs: Inputs

    def __post_init__(self) -> None:
        self._places: dict[Any, tuple[dict[Place, str], Place]] = {}
        roles = {"q": self.inputs.x, "k": self.inputs.key_source, "v": self.inputs.key_source}
        ways = [x.transpose(0, 1) for x in roles.values()]
        nodes = self.site.sources["q"]
        self._swaps = any(_is_same(node.value, ways[0]) for node in nodes)  # tokens come first
        # The sources of each role that hold what enters the attention.
        self._entries = {
            role: [
                n
                for n, node in enumerate(self.site.sources[role])
                if _is_same(node.value, x.transpose(0, 1) if self._swaps else x)
            ]
            for role, x in roles.items()
        }

    def record(self, inputs: Inputs) -> RecordedCall:
        """Return a call with its output; its sequences stand for the first of the recorded ones.

        Raises:
            OptionError: the model, or the attention in it, does not run on as many tokens.
        """
        inputs = inputs.map_tokens(Tensor.double)
        rows = torch.arange(len(inputs.x)) % len(self.inputs.x)
        return RecordedCall(
            inputs, {"output": self._run(inputs, rows)}, torch.float32, runs=self.runs
        )

    @cached_property
    def runs(self) -> Runs:
        """Runs on sequences in the place of the recorded one with the fewest hidden keys."""
        mask = self.inputs.mask
        row = 0 if mask is None or len(mask) == 1 else int(mask.flatten(1).sum(1).argmax())
        runs = Runs(lambda x: self._run(x, torch.full((len(x.x),), row)), lambda: torch.float32)
        runs.remember("is fine", lambda: True)
        return runs

    def _run(self, inputs: Inputs, rows: Tensor) -> Tensor:
        x, lengths = inputs.x, (inputs.x.shape[1], inputs.key_source.shape[1])
        try:
            entries, end = self._find_places(rows[:2], lengths)
            tokens = {"q": x, "k": inputs.key_source, "v": inputs.key_source}
            tokens = {r: y.transpose(0, 1) if self._swaps else y for r, y in tokens.items()}
            given = {place: tokens[role] for place, role in entries.items()}
            output = rerun(self.model, *self._cut_arguments(rows, lengths), given, end)
            shape = x.shape[1::-1] if self._swaps else x.shape[:2]
            output = output.reshape(*shape, -1).double()
            return output.transpose(0, 1) if self._swaps else output
        except FAILURES as error:
            raise OptionError(
                saw=f"an attention in a {type(self.model).__name__} that does not run on {lengths} "
                f"tokens: {describe_error(error)}",
                needed="a model that runs on fewer tokens than those of its inputs",
                do="compare layers of the two: compare(lambda x: a_layer(x), b_layer)",
            ) from error

    def _find_places(
        self, rows: Tensor, lengths: tuple[int, int]
    ) -> tuple[dict[Place, str], Place]:
        """Return where tokens enter the attention, with their role, and where the output is."""
        key = (*rows.tolist(), *lengths)
        if key not in self._places:
            tape, _ = record_tape(self.model, *self._cut_arguments(rows, lengths))
            site = find_sites(tape.nodes)[self.number]
            entries = {
                site.sources[role][n].place: role
                for role, found in self._entries.items()
                for n in found
            }
            end = site.outputs()[-1].place
            if None in (*entries, end) or not {"q", "k"} <= {*self._entries}:
                raise LookupError("its input is that of the model")
            self._places[key] = entries, end
        return self._places[key]

    def _cut_arguments(self, rows: Tensor, lengths: tuple[int, int]) -> tuple[Any, Any]:
        """Return the arguments of the model for sequences with these numbers and lengths."""
        batch, queries = self.inputs.x.shape[:2]
        sizes = {self.inputs.key_source.shape[1]: lengths[1], queries: lengths[0]}

        def cut(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            for axis, size in enumerate(x.shape):
                if size == batch and (axis == 0 or size not in sizes):
                    x = x.index_select(axis, rows)
                elif size in sizes:
                    x = x.narrow(axis, 0, sizes[size])
            return x

        positional, named = map_leaves(cut, self.arguments)
        return positional, named


def _is_same(value: Tensor, x: Tensor) -> bool:
    return value.numel() == x.numel() and torch.equal(value.double().reshape(x.shape), x.double())
