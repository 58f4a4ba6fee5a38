"""What the tests of the layer among other libraries share.

The kinds of layer are subjects of tests/paths, so that what is asked of every path is asked here.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from headwise import Attention, Mask, Rotary
from headwise.function import Latent
from headwise.layers.distance import Alibi, T5Bias
from headwise.layers.norm import QKNorm
from headwise.testing import Budget
from tests.layers import reference
from tests.paths.subjects import BATCH, Outputs, Parameters, Subject

EMBED, SOURCE, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, LENGTH = 40, 33, 6, 2, 10, 7, 24
SIZES: dict[str, Any] = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "value_dim": VALUE_DIM}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")

MakeMask = Callable[..., Mask | None]


def layer_of(**options: Any) -> Attention:
    """Seeded; no parameter is 0 or 1 by initialisation."""
    torch.manual_seed(1)
    layer = Attention(EMBED, HEADS, **SIZES | options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer


def tokens(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    """Seeded input of a layer."""
    return torch.randn(batch, length, EMBED, generator=torch.Generator().manual_seed(2))


class Called(nn.Module):
    """The layer with one call's options, and its output as the only one."""

    def __init__(self, mask: MakeMask, **options: Any) -> None:
        super().__init__()
        self.mask, self.inner = mask, layer_of(**options)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Outputs:
        """``other``: a source, or lengths."""
        if other is None:
            return (self.output(x, mask=self.mask()),)
        if other.is_floating_point():
            return (self.output(x, other, mask=self.mask()),)
        return (self.output(x, mask=self.mask(other)),)

    def output(self, *given: Any, **options: Any) -> Tensor:
        out: Tensor = self.inner(*given, **options)
        return out


class Written(Called):
    """The same, written out by hand."""

    def output(self, *given: Any, **options: Any) -> Tensor:
        return reference.output(self.inner, *given, **options)


def subject(
    name: str,
    what: str,
    *,
    tiled: bool,
    mask: MakeMask,
    inputs: Callable[[int, int], Outputs],
    **options: Any,
) -> Subject:
    """One kind of layer and call."""

    def written(parameters: Parameters, *given: Tensor) -> Outputs:
        outputs: Outputs = functional_call(Written(mask, **options), parameters, given)
        return outputs

    return Subject(name, what, partial(Called, mask, **options), inputs, written, tiled=tiled)


def own(queries: int, _: int) -> Outputs:
    """x."""
    return (torch.randn(BATCH, queries, EMBED),)


def own_and_lengths(queries: int, _: int) -> Outputs:
    """x, and how many of its tokens are real: all, none, and half."""
    return torch.randn(BATCH, queries, EMBED), torch.tensor([queries, 0, queries // 2])


def own_and_source(queries: int, keys: int) -> Outputs:
    """x and what keys and values come from."""
    return torch.randn(BATCH, queries, EMBED), torch.randn(BATCH, keys, SOURCE)


def no_mask() -> None:
    return None


def real(lengths: Tensor) -> Mask:
    return Mask.lengths(queries=lengths, keys=lengths) & Mask.causal()


SUBJECTS = (
    subject("causal", "a causal mask", tiled=False, mask=Mask.causal, inputs=own),
    subject(
        "window",
        "rotary, QK-norm and a window, with 2 kv_heads for 6 heads",
        tiled=True,
        mask=no_mask,
        inputs=own,
        rotary=Rotary(),
        qk_norm=QKNorm(),
        window=(9, 2),
    ),
    subject(
        "sink",
        "sink and softcap",
        tiled=True,
        mask=Mask.causal,
        inputs=own,
        sink=True,
        softcap=5.0,
    ),
    subject(
        "latent",
        "a latent of queries, and one of keys and values",
        tiled=False,
        mask=Mask.causal,
        inputs=own,
        num_kv_heads=HEADS,
        rotary=Rotary(),
        latent=Latent(rank=9, shared_width=4, query_rank=11),
    ),
    subject("alibi", "Alibi", tiled=True, mask=Mask.causal, inputs=own, score_bias=Alibi()),
    subject(
        "t5",
        "T5Bias",
        tiled=True,
        mask=no_mask,
        inputs=own,
        score_bias=T5Bias(buckets=8, max_distance=20),
        scale=1.0,
    ),
    subject(
        "lengths",
        "causal, and lengths of queries and keys; one sequence is padding",
        tiled=True,
        mask=real,
        inputs=own_and_lengths,
        rotary=Rotary(),
    ),
    subject(
        "cross",
        "cross attention",
        tiled=False,
        mask=no_mask,
        inputs=own_and_source,
        source_dim=SOURCE,
    ),
)
BY_NAME = {own.name: own for own in SUBJECTS}

# Lengths of x and of a source, and a batch: the first is what a graph is made at. Of 3 tokens the
# window (9, 2) hides nothing.
AT = (((24, 29), 3), ((31, 37), 5), ((63, 70), 2), ((3, 12), 4))


def every_size(subject: Subject) -> Iterator[tuple[tuple[int, int], Outputs]]:
    """The lengths, and inputs of these, for one size after the other."""
    for lengths, batch in AT:
        yield lengths, tuple(torch.cat((x, x))[:batch] for x in subject.at(*lengths))


# ---- budgets of a reading ----------------------------------------------------------------------


class Read(nn.Module):
    """``read(layer, x)`` as a module, for other parameters than the layer's own."""

    def __init__(self, layer: Attention, read: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.read = layer, read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.layer, x)


def read_with(
    layer: Attention, parameters: Parameters, read: Callable[..., Tensor], x: Tensor
) -> Tensor:
    """``read(layer, x)`` with these parameters in place of its own."""
    named = {f"layer.{name}": value for name, value in parameters.items()}
    found: Tensor = functional_call(Read(layer, read), named, (x,))
    return found


def budget_of(layer: Attention, read: Callable[..., Tensor], x: Tensor) -> Budget:
    """The error budget of ``read(layer, x)``, written on tests.layers.reference."""
    names = [name for name, _ in layer.named_parameters()]
    values = [p.detach() for p in layer.parameters()]

    def function(x: Tensor, *values: Tensor) -> Tensor:
        return read_with(layer, dict(zip(names, values, strict=True)), read, x)

    return Budget.for_function(function, x, *values)


def contributions(layer: Attention, x: Tensor, **options: Any) -> Tensor:
    """What each head adds to the output, written out by hand."""
    outputs = reference.head_outputs(layer, x, **options)
    parts = layer.out_proj.weight.unflatten(1, (HEADS, VALUE_DIM))
    return torch.einsum("bhqv,ohv->bhqo", outputs, parts)
