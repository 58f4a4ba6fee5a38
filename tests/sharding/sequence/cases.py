"""Attention problems for ranks: each kind of mask by name, and problems drawn from a seed.

A rank gets a name and makes the problem itself, since a mask's function cannot travel.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.sharding.sequence.layout import SequenceLayout
from tests.strategies import Problem, problem

DOUBLE = torch.float64
LENGTH, BATCH, HEAD_DIM, VALUE_DIM = 61, 2, 10, 7
LAYOUTS = {"contiguous": SequenceLayout.contiguous, "zigzag": SequenceLayout.zigzag}


def _every_third(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (key - query + head + 2 * batch) % 3 > 0


def _random(*sizes: int) -> Tensor:
    return torch.rand(sizes, generator=torch.Generator().manual_seed(5))


def _ids(n: int) -> Tensor:
    return torch.stack([torch.arange(n) * 3 // max(1, n), torch.arange(n) // 20 - 1])


# Masks by name, for a length.
MASKS: dict[str, Callable[[int], Mask | None]] = {
    "everything": lambda n: None,
    "causal": lambda n: Mask.causal(),
    "window": lambda n: Mask.window(5, 3),
    "lengths": lambda n: Mask.lengths(
        keys=torch.tensor([n, n // 2]), queries=torch.tensor([n // 3, n])
    ),
    "left-padded": lambda n: Mask.lengths(keys=torch.tensor([n // 4, n]), side="left"),
    "starts": lambda n: Mask.starts(queries=torch.tensor([n // 2, 0])) & Mask.causal(),
    "segments": lambda n: Mask.segments(_ids(n)),
    "prefix": lambda n: Mask.prefix(torch.tensor([n // 3, 0])),
    "where": lambda n: Mask.where(_every_third),
    "dense": lambda n: Mask.may_attend(_random(BATCH, n, n) < 0.6, axes="batch queries keys"),
    "heads": lambda n: Mask.may_attend(_random(6, n, n) < 0.6, axes="heads queries keys"),
    "hidden": lambda n: Mask.lengths(keys=torch.tensor([0, n])) & Mask.causal(),
    "packed": lambda n: Mask.packed(torch.tensor([0, n // 4, n // 2, n - n // 5])),
}


def of_mask(name: str, length: int = LENGTH, *, heads: int = 6, kv_heads: int = 2) -> Problem:
    """Return a problem of self-attention with this mask, and sink, softcap and biases beside it."""
    generator = torch.Generator().manual_seed(length)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=DOUBLE)

    batch = 1 if name == "packed" else BATCH
    plain = name in ("everything", "window")
    bias = ScoreBias.relative(normal(heads, 9)) + ScoreBias.alibi(normal(heads).abs())
    if name == "prefix":
        bias += ScoreBias.dense(normal(heads, length, length), axes="heads queries keys")
    return Problem(
        q=normal(batch, heads, length, HEAD_DIM),
        k=normal(batch, kv_heads, length, HEAD_DIM),
        v=normal(batch, kv_heads, length, VALUE_DIM),
        mask=MASKS[name](length),
        score_bias=None if plain else bias,
        softcap=None if plain else 4.0,
        sink=None if plain else normal(heads),
    )


def make(name: str) -> Problem:
    """Return the problem of a name: "causal", "causal 5", "causal 61 8 2" or "seed 17"."""
    kind, *numbers = name.split()
    if kind == "seed":
        return problem(int(numbers[0]))
    length, heads, kv_heads = (*map(int, numbers), *(LENGTH, 6, 2)[len(numbers) :])
    return of_mask(kind, length, heads=heads, kv_heads=kv_heads)


def with_leaves(p: Problem) -> tuple[Problem, list[Tensor]]:
    """Return the problem with new leaves in the place of sink and biases, and those leaves."""
    leaves: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        leaves.append(tensor.detach().clone().requires_grad_())
        return leaves[-1]

    sink = None if p.sink is None else leaf(p.sink)
    bias = p.score_bias
    if bias is not None:
        tables = tuple(replace(part, given=leaf(part.given)) for part in bias.by_distance)
        bias = ScoreBias(tables, tuple(map(leaf, bias.tensors)))
    return replace(p, sink=sink, score_bias=bias), leaves


def layouts_of(p: Problem, kind: str, ranks: int) -> tuple[SequenceLayout, SequenceLayout]:
    """Return the layouts of the queries and of the keys."""
    make_layout = LAYOUTS[kind]
    return make_layout(p.shape[2], ranks), make_layout(p.shape[3], ranks)
