"""Inputs on which two attentions are compared, made from a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.diagnosis.simulation.stages import Inputs

SEED = 0
BATCH = 2
QUERIES, KEYS, LONG, FEW = 11, 7, 40, 3  # tokens; KEYS of cross attention
PADDING = (1, 4)  # tokens of each sequence
LONGEST = 256  # tokens, for a window; longer inputs take minutes where a cause is looked for
UNIT = 2.0**-8  # of which all entries are multiples, so that their sums are exact in float32


@dataclass(frozen=True)
class NamedInputs:
    """Inputs with the words by which a report names them."""

    name: str
    inputs: Inputs


def make_probe_inputs(
    widths: tuple[int, int],
    *,
    crosses: bool,
    takes_mask: bool = True,
    window: tuple[int, int] = (0, 0),
    seed: int = SEED,
) -> list[NamedInputs]:
    """Return inputs that show a difference if there is one.

    Random tokens of usual size, larger ones (which make attention sharp, and reach a softcap), a
    few tokens, fewer than a window holds, and padding on either side, of unequal lengths. The
    larger tokens are sums of the usual ones, which shows whether a projection is linear also where
    there are fewer tokens than columns. In self-attention, a sequence under a causal mask
    shows frequencies and the window, if it has at most `LONGEST` keys, and another one keys that
    come after those of the window.
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
        length = max(LONG, window[0] + FEW)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        name = f"{length} random tokens"
        if takes_mask:
            masked = Inputs(tokens(length).x, mask=causal)
            probes.append(NamedInputs(f"{name} under a causal mask", masked))
        else:
            probes.append(NamedInputs(name, tokens(length)))
        length = window[1] + FEW
        if takes_mask and length > QUERIES:
            probes.append(NamedInputs(f"{length} random tokens", tokens(length)))
    for side in ("right", "left") if takes_mask else ():
        padded = tokens(QUERIES)
        mask = _padding_mask(padded.key_source.shape[1], side)
        if not crosses:  # a token attends to itself, so that no row is empty, whatever its window
            mask = mask | torch.eye(QUERIES, dtype=torch.bool)
        name = f"{QUERIES} random tokens under a mask of padding on the {side}"
        probes.append(NamedInputs(name, replace(padded, mask=mask)))
    return probes


def make_source_probe(widths: tuple[int, int], *, seed: int = SEED) -> NamedInputs:
    """Return tokens that attend to others: cross attention of a layer whose widths are equal."""
    [probe, *_] = make_probe_inputs(widths, crosses=True, seed=seed)
    return replace(probe, name=f"{probe.name} that attend to {KEYS} others")


def _padding_mask(keys: int, side: str) -> Tensor:
    """Return a mask that hides unequal numbers of keys, (batch, 1, 1, keys); True attends."""
    index, hidden = torch.arange(keys), torch.tensor(PADDING)[:, None]
    seen = index < keys - hidden if side == "right" else index >= hidden
    return seen[:, None, None]
