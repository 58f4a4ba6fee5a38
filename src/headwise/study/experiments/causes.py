"""Answers of `headwise.compare` to the pairs of layers of the study."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from headwise.diagnosis._compare import compare
from headwise.diagnosis.results.diagnosis import Verdict


def name_cause(first: nn.Module, second: nn.Module, x: Tensor | None = None) -> str:
    """Return the causes of a difference that `compare` names, or its verdict with the reason.

    Args:
        first: the layer in doubt.
        second: the layer that it should equal.
        x: (batch, tokens, width); None for the inputs that headwise makes.
    """
    diagnosis = compare(first, second, x)
    assert diagnosis.function is not None
    if diagnosis.verdict is Verdict.DIFFERENT:
        return " and ".join(cause.name for cause in diagnosis.function.causes)
    reason = diagnosis.function.blind.partition(":")[0]
    return f"{diagnosis.verdict}: {reason}" if reason else str(diagnosis.verdict)


def compare_published_check(heads: int, shape: tuple[int, int, int], seeds: int) -> dict[str, Any]:
    """Compare layers of several heads and of one, as a published test does, for each seed.

    Tokens and projections come from torch.rand, and the output projection is the identity.

    Returns:
        The number of seeds, how often the outputs are equal, the answers with their counts for
        equal and for other outputs, and the answer on the inputs that headwise makes.
    """
    answers: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for seed in range(seeds):
        torch.manual_seed(seed)
        weight = torch.cat([torch.rand(shape[2], shape[2]) for _ in range(3)], dim=1)
        x = torch.rand(shape)
        several, single = (_make_torch_layer(count, weight) for count in (heads, 1))
        with torch.no_grad():
            is_equal = torch.equal(several(x, x, x)[0], single(x, x, x)[0])
        answers[is_equal][name_cause(several, single, x)] += 1
    return {
        "seeds": seeds,
        "equal": answers[True].total(),
        "of_equal": dict(answers[True]),
        "of_others": dict(answers[False]),
        "elsewhere": name_cause(several, single),
    }


@torch.no_grad()
def _make_torch_layer(heads: int, weight: Tensor) -> nn.MultiheadAttention:
    layer = nn.MultiheadAttention(len(weight), heads, batch_first=True, bias=False)
    layer.in_proj_weight.copy_(weight.mT)
    layer.out_proj.weight.copy_(torch.eye(len(weight)))
    return layer
