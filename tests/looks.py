"""Results of a first look at layers with random weights, for tests of what is shown."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from headwise.models.reading import AttentionCall, Projections, Reading
from headwise.studies.first_look import Equality, FirstLook, look

LAYERS, HEADS, HEAD_DIM, LENGTH = 3, 5, 6, 37


def random_reading(tokens: tuple[str, ...] | None = None) -> Reading:
    """Three layers of five heads, torch's own; the second sequence has 11 tokens."""
    tokens = tokens or ("[CLS]", *(f"w{n}" for n in range(LENGTH - 2)), "[SEP]")
    real = torch.arange(len(tokens)) < torch.tensor([[len(tokens)], [11]])
    separators = torch.zeros_like(real)
    separators[0, -1] = separators[1, 10] = True
    calls = []
    for _ in range(LAYERS):
        layer = nn.MultiheadAttention(HEADS * HEAD_DIM, HEADS, batch_first=True)
        nn.init.normal_(layer.in_proj_weight, std=0.4)
        x = torch.randn(2, len(tokens), HEADS * HEAD_DIM)
        output, _ = layer(x, x, x, key_padding_mask=~real, need_weights=False)
        projections = Projections(
            layer.in_proj_weight.detach(),
            layer.in_proj_bias.detach(),
            layer.out_proj.weight.detach(),
            layer.out_proj.bias.detach(),
        )
        calls.append(AttentionCall(x, output.detach(), projections))
    return Reading(
        model="a model with random weights",
        origin="Random weights.",
        reference="torch.nn.MultiheadAttention",
        num_heads=HEADS,
        passage="a test",
        tokens=tokens,
        real=real,
        separators=separators,
        separator="[SEP]",
        calls=tuple(calls),
    )


def random_look(tokens: tuple[str, ...] | None = None) -> FirstLook:
    return look(random_reading(tokens))


def with_distinct_checks(result: FirstLook) -> FirstLook:
    """The same, but no two shares of the budget are the same number."""
    shares = iter(n / 100 for n in range(11, 99))

    def distinct(equality: Equality) -> Equality:
        checks = {
            name: replace(getattr(equality, name), ratio=next(shares))
            for name in ("drop_in", "reference", "matrix")
        }
        return replace(equality, **checks)

    return replace(result, equalities=tuple(map(distinct, result.equalities)))
