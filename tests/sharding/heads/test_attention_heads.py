"""`Attention` with its heads over 2 and 4 ranks: outputs and all gradients."""

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.layers import cases
from tests.sharding.heads.compared import HEADS, attention, compared
from tests.sharding.ranks import ranks
from tests.strategies import masks, score_biases

pytestmark = pytest.mark.slow


def kv_of(kv_heads: int) -> str:
    return "replicate" if kv_heads % dist.get_world_size() else "split"


# ---- every pair of options ---------------------------------------------------------------------


def option_case(case: cases.Case) -> float:
    layer, (tensors, options) = cases.layer_of(case), cases.inputs_of(case)
    gate = options.pop("gate")

    def call(layer: nn.Module, leaves: list[Tensor]) -> Tensor:
        gates = {"gate": leaves[-1]} if gate is not None else {}
        return layer(*leaves[: len(tensors)], **options, **gates)

    leaves = [*tensors, *([] if gate is None else [gate])]
    return compared(layer, call, leaves, kv=kv_of(layer.num_kv_heads))


def option_cases(chosen: list[cases.Case]) -> list[float]:
    before, cases.HEADS = cases.HEADS, HEADS
    try:
        return [option_case(case) for case in chosen]
    finally:
        cases.HEADS = before


@pytest.mark.parametrize("count", [2, 4])
def test_every_pair_of_options(count: int) -> None:
    # A norm over all heads is refused, as are pairs of heads and DeBERTa's terms.
    divisible = [
        case
        for case in cases.pairwise()
        if case["output_norm"] in ("none", "head")
        and case["differential"] == "none"
        and not case["by distance"].startswith("deberta")
    ]
    chosen = divisible[:: 1 if count == 2 else 4]
    for found in ranks(count).run(option_cases, chosen):
        for case, excess in zip(chosen, found, strict=True):
            assert excess <= 1, case


# ---- masks and biases --------------------------------------------------------------------------


def mask_case(seed: int) -> tuple[str, float]:
    source, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    queries = keys = 23
    crosses = source.random() < 0.5
    if crosses:
        keys = 29
    shape = (2, HEADS, queries, keys)
    mask = masks(source.choice, shape, generator)
    bias = score_biases(source.choice, shape, generator)
    layer = attention(num_kv_heads=source.choice((HEADS, 4, 2)), sink=source.random() < 0.5)
    lengths = (queries, keys) if crosses else (queries,)
    tensors = [torch.randn(2, n, 40, generator=generator, dtype=torch.float64) for n in lengths]
    biases = [] if bias is None else [t.detach() for t in bias.all_tensors()]

    def call(layer: nn.Module, leaves: list[Tensor]) -> Tensor:
        numbers = iter(leaves[len(tensors) :])
        score_bias = None if bias is None else bias.map_tensors(lambda _: next(numbers))
        return layer(*leaves[: len(tensors)], mask=mask, score_bias=score_bias)

    leaves = [x.requires_grad_() for x in (*tensors, *biases)]
    excess = compared(layer, call, leaves, kv=kv_of(layer.num_kv_heads))
    return f"{seed}: {mask}, {bias}", excess


def mask_cases(seeds: range) -> list[tuple[str, float]]:
    return [mask_case(seed) for seed in seeds]


@pytest.mark.parametrize(("count", "seeds"), [(2, range(32)), (4, range(40, 60))])
def test_every_kind_of_mask_and_bias(count: int, seeds: range) -> None:
    words = "window lengths starts prefix where segments may_attend alibi relative dense("
    for found in ranks(count).run(mask_cases, seeds):
        drawn = " ".join(case for case, _ in found)
        assert [word for word in words.split() if word not in drawn] == []
        assert [(case, excess) for case, excess in found if not excess <= 1] == []
