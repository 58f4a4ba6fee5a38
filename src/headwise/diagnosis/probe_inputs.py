"""Inputs on which two attentions are compared, made from a seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.diagnosis.simulation.stages import Inputs

SEED = 0
BATCH = 2
QUERIES, KEYS, LONG, FEW = 11, 7, 40, 3  # tokens; KEYS of cross attention
UNIT = 2.0**-8  # of which all entries are multiples, so that their sums are exact in float32


@dataclass(frozen=True)
class NamedInputs:
    """Inputs with the words by which a report names them."""

    name: str
    inputs: Inputs


def make_probe_inputs(
    widths: tuple[int, int], *, crosses: bool, seed: int = SEED
) -> list[NamedInputs]:
    """Return inputs that show a difference if there is one.

    Random tokens of usual size, larger ones (which make attention sharp, and reach a softcap), a
    longer sequence under a causal mask (which shows frequencies and windows), and a few tokens,
    fewer than a window holds. The larger tokens are sums of the usual ones, which shows whether
    a projection is linear also where there are fewer tokens than columns.
    """
    generator = torch.Generator().manual_seed(seed)

    def rows(length: int, width: int) -> Tensor:
        x = torch.randn(BATCH, length, width, generator=generator, dtype=torch.float64)
        return (x / UNIT).round() * UNIT

    def three_times(x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        first, second, third = (
            flat[torch.randperm(len(flat), generator=generator)] for _ in range(3)
        )
        return (2 * first - 2 * second + third).reshape(x.shape)

    def tokens(length: int) -> Inputs:
        source = rows(KEYS, widths[1]).float() if crosses else None
        return Inputs(rows(length, widths[0]).float(), source)

    usual = tokens(QUERIES)
    source = None if usual.source is None else three_times(usual.source)
    larger = Inputs(three_times(usual.x), source)
    probes = [
        NamedInputs(f"{QUERIES} random tokens", usual),
        NamedInputs(f"{QUERIES} random tokens, three times as large", larger),
        NamedInputs(f"{FEW} random tokens", tokens(FEW)),
    ]
    if not crosses:
        causal = torch.ones(LONG, LONG, dtype=torch.bool).tril()
        masked = Inputs(tokens(LONG).x, mask=causal[None, None])
        probes.append(NamedInputs(f"{LONG} random tokens under a causal mask", masked))
    return probes
