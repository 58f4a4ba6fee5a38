"""What the layers of two checkpoints give for the same inputs, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headwise.checkpoints.layer_options import in_layer, options_of
from headwise.errors import OptionError
from headwise.layers.native.attention import Attention
from headwise.layouts.canonical import State
from headwise.layouts.layout import Layout
from headwise.layouts.places import modules_of

BATCH, LENGTH = 2, 48
UNIT = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Outputs:
    """One layer of both.

    Attributes:
        first: its place in the first checkpoint.
        second: in the second.
        apart: the largest difference, as a share of the largest output.
        allowed: what rounding explains.
    """

    first: str
    second: str
    apart: float
    allowed: float

    @property
    def is_same(self) -> bool:
        """Whether no more than rounding is between them."""
        return self.apart <= self.allowed

    def __str__(self) -> str:
        word = "the same outputs" if self.is_same else "OTHER OUTPUTS"
        return (
            f"`{self.first}` and `{self.second}`: {word}; they differ by {self.apart:.1e} of the "
            f"largest output, of which rounding explains {self.allowed:.1e}"
        )


def outputs_of_both(
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    first_layout: Layout,
    second_layout: Layout,
    config: Mapping[str, Any],
    **known: int,
) -> list[Outputs]:
    """Run every layer of both, each with the pairing of its own layout.

    Args:
        first: name -> tensor.
        second: name -> tensor.
        first_layout: of the first.
        second_layout: of the second.
        config: of the model: the numbers of rotations, norms and softcaps.
        known: heads, kv_heads.

    Raises:
        OptionError: the config does not say what the layouts leave to it, or the weights give no
            numbers.
    """
    layers = (
        _layers(first, first_layout, config, known),
        _layers(second, second_layout, config, known),
    )
    return [_compared(*pair) for pair in zip(*layers, strict=True)]


def _layers(
    state: Mapping[str, Tensor], layout: Layout, config: Mapping[str, Any], known: Mapping[str, int]
) -> Iterator[tuple[str, Attention]]:
    tables: State = {}
    for module in modules_of(layout, state):
        stored = {local: state[name].double() for name, local in module.tensors.items()}
        described = in_layer(layout, config, module.layer)
        if described.function.score_bias == "t5":
            described = _with_distances(described, module.place.role, stored, tables)
        options = options_of(config, described.function, layer=module.layer)
        rotary = options.get("rotary")
        if rotary is not None and described.function.rotary == "interleaved":
            options["rotary"] = replace(rotary, pairing="interleaved")
        layer = Attention.from_layout(
            stored,
            layout=described,
            num_heads=known["heads"],
            num_kv_heads=known.get("kv_heads"),
            **options,
        )
        yield module.prefix, layer.eval()


def _with_distances(layout: Layout, role: str, stored: State, tables: State) -> Layout:
    """T5 has the table in the first layer of each side, for all of it; cross attention has none."""
    local = next(n for n, pattern in layout.patterns.items() if pattern.tensors == ("distances",))
    table = stored.get(local, tables.get(role))
    if table is None:
        return replace(layout, function=replace(layout.function, score_bias="none"))
    stored[local] = tables[role] = table
    return layout


@torch.no_grad()
def _compared(one: tuple[str, Attention], other: tuple[str, Attention]) -> Outputs:
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
    return Outputs(first, second, apart, UNIT * terms * (1 + 4 * peak))
