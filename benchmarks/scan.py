"""Benchmarks of a matrix's statistics against the fused kernel, which returns none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.case import Case
from headwise import AttentionMatrix, Mask, scan
from headwise.models import tiny
from headwise.scanning.call import CapturedCall
from headwise.scanning.statistics import catalogue
from headwise.scanning.statistics.maps import TopKeysOfEveryQuery
from headwise.scanning.statistics.statistic import compute_summaries

SHAPE = (1, 12, 8192, 64)
TEN = (
    "logsumexp",
    "entropy",
    "maximum",
    "first_token",
    "previous_token",
    "distance",
    "within_64",
    "most_received",
    "participation",
    "map",
)


def make_call(dtype: torch.dtype) -> tuple[CapturedCall, Callable[[], Tensor]]:
    """Make a causal call with all inputs of the statistics, and its fused forward."""
    q, k, v = (torch.randn(SHAPE).to(dtype) for _ in range(3))
    _, heads, length, width = SHAPE
    matrix = AttentionMatrix(q, k, mask=Mask.causal())

    def fused() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    tokens = torch.randint(50_000, (1, length))
    observation = CapturedCall.for_self_attention(
        matrix,
        tokens=tokens,
        separators=tokens % 20 == 0,
        specials=tokens < 10,
        values=v,
        outputs=fused(),
        out_proj=torch.randn(heads, width, heads * width),
        residual=torch.randn(1, length, heads * width),
        unembedding=torch.randn(50_000, heads * width),
    )
    return observation, fused


def _case(names: tuple[str, ...] | None, dtype: torch.dtype, limit: float) -> Case:
    observation, fused = make_call(dtype)
    statistics = [
        statistic
        for statistic in (
            catalogue.STANDARD if names is None else catalogue.find_standard_statistics(names)
        )
        if statistic.reason_not_computable(observation) is None
    ]

    def ours() -> object:
        return compute_summaries(observation, statistics)

    what = f"{len(statistics)} statistics" + ("" if names else ", the standard set")
    dtype_name = str(dtype).removeprefix("torch.")
    return Case(f"scan, causal {SHAPE}, {dtype_name}", what, ours, {"fused forward": fused}, limit)


def _top_keys_case() -> Case:
    """A whole scan of the model that ships, with and without the top keys of 12 of 32 heads."""
    model, length = tiny.load(), 1024
    ids = torch.randint(tiny.VOCABULARY, (1, length))
    top_keys = TopKeysOfEveryQuery([(layer, head) for layer in range(4) for head in range(3)])
    return Case(
        f"scan of tiny, {length:,} tokens",
        "the standard set, top keys of 12 heads",
        lambda: scan(model, ids, statistics=["standard", top_keys]),
        {"without top keys": lambda: scan(model, ids)},
        1.3,
    )


MAKERS = (
    partial(_case, TEN, torch.float32, 1.5),
    partial(_case, TEN, torch.bfloat16, 1.5),
    partial(_case, None, torch.float32, 2.2),
    _top_keys_case,
)
