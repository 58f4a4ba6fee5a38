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
    there are fewer tokens than columns. In self-attention, a sequence longer than the window, under
    a causal mask, shows frequencies; one without the mask shows a window of later keys.

    Args:
        widths: of tokens and of the source.
        crosses: True for cross attention.
        takes_mask: False for inputs without masks.
        window: numbers of keys before and after a query in a window; 0 for none.
        seed: of the numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> Inputs:
        source = _draw_tokens(KEYS, widths[1], generator) if crosses else None
        return Inputs(_draw_tokens(length, widths[0], generator), source)

    usual = tokens(QUERIES)
    source = None if usual.source is None else _three_times(usual.source, generator)
    larger = Inputs(_three_times(usual.x, generator), source)
    probes = [
        NamedInputs(f"{QUERIES} random tokens", usual),
        NamedInputs(f"{QUERIES} random tokens, three times as large", larger),
        NamedInputs(f"{FEW} random tokens", tokens(FEW)),
    ]
    if not crosses:
        long = tokens(max(LONG, window[0] + FEW)).x
        length = long.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril() if takes_mask else None
        name = f"{length} random tokens{' under a causal mask' if takes_mask else ''}"
        probes.append(NamedInputs(name, Inputs(long, mask=causal)))
        if takes_mask and window[1] + FEW > QUERIES:
            both = tokens(window[1] + FEW)
            probes.append(NamedInputs(f"{both.x.shape[1]} random tokens", both))
    if takes_mask:
        probes += [_pad(tokens(QUERIES), side) for side in ("right", "left")]
    return probes


def _draw_tokens(length: int, width: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(BATCH, length, width, generator=generator, dtype=torch.float64)
    return ((x / UNIT).round() * UNIT).float()


def _three_times(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return sums of tokens, three times as large."""
    flat = x.flatten(0, 1)
    first, second, third = (flat[torch.randperm(len(flat), generator=generator)] for _ in range(3))
    return (2 * first - 2 * second + third).reshape(x.shape)


def make_source_probe(widths: tuple[int, int], *, seed: int = SEED) -> NamedInputs:
    """Return tokens that attend to others: cross attention of a layer whose widths are equal."""
    [probe, *_] = make_probe_inputs(widths, crosses=True, seed=seed)
    return replace(probe, name=f"{probe.name} that attend to {KEYS} others")


def _pad(inputs: Inputs, side: str) -> NamedInputs:
    """Return the inputs under a mask that hides unequal numbers of keys of the sequences."""
    keys, hidden = inputs.key_source.shape[1], torch.tensor(PADDING)[:, None]
    index = torch.arange(keys)
    mask = (index < keys - hidden if side == "right" else index >= hidden)[:, None, None]
    if inputs.source is None:  # a token attends to itself: no row is empty, whatever the window is
        mask = mask | torch.eye(keys, dtype=torch.bool)
    name = f"{inputs.x.shape[1]} random tokens under a mask of padding on the {side}"
    return NamedInputs(name, replace(inputs, mask=mask))
