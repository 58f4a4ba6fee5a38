"""Inputs on which two attentions are compared, made from a seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwise.diagnosis.simulation.stages import Inputs

SEED = 0
BATCH = 2
QUERIES, KEYS, LONG, FEW = 11, 7, 40, 3  # tokens; KEYS of cross attention


@dataclass(frozen=True)
class NamedInputs:
    """Inputs with the words by which a report names them."""

    name: str
    inputs: Inputs


def own_probes(widths: tuple[int, int], *, crosses: bool, seed: int = SEED) -> list[NamedInputs]:
    """Return inputs that show a difference if there is one.

    Random tokens of usual size, larger ones (which make attention sharp, and reach a softcap), a
    longer sequence under a causal mask (which shows frequencies and windows), and a few tokens,
    fewer than a window holds.
    """
    generator = torch.Generator().manual_seed(seed)
    width, source_width = widths

    def tokens(length: int, size: float = 1.0) -> Inputs:
        x = size * torch.randn(BATCH, length, width, generator=generator, dtype=torch.float64)
        if not crosses:
            return Inputs(x.float())
        source = torch.randn(BATCH, KEYS, source_width, generator=generator, dtype=torch.float64)
        return Inputs(x.float(), source=(size * source).float())

    probes = [
        NamedInputs(f"{QUERIES} random tokens", tokens(QUERIES)),
        NamedInputs(f"{QUERIES} random tokens, three times as large", tokens(QUERIES, 3.0)),
        NamedInputs(f"{FEW} random tokens", tokens(FEW)),
    ]
    if not crosses:
        long = tokens(LONG)
        causal = torch.ones(LONG, LONG, dtype=torch.bool).tril()
        masked = Inputs(long.x, mask=causal[None, None])
        probes.append(NamedInputs(f"{LONG} random tokens under a causal mask", masked))
    return probes
