"""Costs of a model before and after a cut: parameters, bytes, and the time of a run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from headwise.scanning.importance import prepare
from headwise.scanning.inputs import call_model_on_input, token_ids
from headwise.support.text import human_bytes
from headwise.support.tracing import evaluation_mode

RUNS = 7  # of each model, in turns; the first ones do not count

Pair = tuple[float, float]  # before and after


@dataclass(frozen=True)
class Costs:
    """Sizes and times of a model before and after a cut; times are medians of interleaved runs.

    Attributes:
        parameters, nbytes: their numbers.
        attention: seconds in the modules of attention.
        model: seconds of the whole run.
        shape: of the input, (batch, length) of tokens.
        threads: of torch.
    """

    parameters: tuple[int, int]
    nbytes: tuple[int, int]
    attention: Pair
    model: Pair
    shape: tuple[int, ...]
    threads: int
    runs: int = RUNS

    @classmethod
    def measure(
        cls,
        models: tuple[nn.Module, nn.Module],
        names: Iterable[str],
        given: Any,
        nbytes: tuple[int, int],
    ) -> Costs:
        """Run both models in turns; ``names`` are those of the modules of attention in both."""
        paths = [name.rstrip(".") for name in names]
        numbers = [sum(x.numel() for x in model.parameters()) for model in models]
        (prepared,) = prepare(models[0], [given])[1]
        seconds: tuple[list[Pair], list[Pair]] = ([], [])
        for number in range(2 * (RUNS + 1)):
            model = models[number % 2]
            seconds[number % 2].append(_time_run(model, paths, prepared))
        times = [[median(pair[part] for pair in each[1:]) for each in seconds] for part in (0, 1)]
        ids = token_ids(prepared)
        parts: Sequence[Any] = (ids, *prepared.positional, *prepared.named.values())
        first = next(x for x in parts if isinstance(x, Tensor))
        (before, after), (whole, smaller) = times
        return cls(
            (numbers[0], numbers[1]),
            nbytes,
            (before, after),
            (whole, smaller),
            tuple(first.shape),
            torch.get_num_threads(),
        )

    def __str__(self) -> str:
        sizes, (many, few) = map(human_bytes, self.nbytes), self.parameters
        times = (
            f"{part} {1e3 * old:.1f} to {1e3 * new:.1f} ms ({new / old:.2f})"
            for part, (old, new) in {"attention": self.attention, "model": self.model}.items()
        )
        return (
            f"{many:,} to {few:,} parameters, {' to '.join(sizes)}; {', '.join(times)}: an input "
            f"{self.shape}, {self.threads} threads, median of {self.runs} interleaved runs"
        )

    def values(self) -> dict[str, Any]:
        """Return all numbers by name."""
        return asdict(self)


def _time_run(model: nn.Module, paths: Sequence[str], given: Any) -> Pair:
    """Return the seconds in the modules at some paths, and of the whole run."""
    starts, spent = dict[nn.Module, float](), list[float]()
    with ExitStack() as stack, torch.no_grad(), evaluation_mode(model):
        for module in map(model.get_submodule, paths):
            begin = module.register_forward_pre_hook(
                lambda module, _: starts.update({module: time.perf_counter()})
            )
            end = module.register_forward_hook(
                lambda module, *_: spent.append(time.perf_counter() - starts[module])
            )
            stack.enter_context(begin)
            stack.enter_context(end)
        start = time.perf_counter()
        call_model_on_input(model, given)
        return sum(spent), time.perf_counter() - start
