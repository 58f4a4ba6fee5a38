"""`compare` of functions that compute in 16 bits, or return another dtype than they compute in."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headwise import Attention, compare
from headwise.identify.results import Verdict
from tests.diagnosis.among import compare_among
from tests.quick import others_extra, others_slow

WIDTH, HEADS, KV_HEADS, HEAD_DIM = 40, 6, 2, 10
NEAR = (
    "bias missing",
    "finite number for -inf",
    "mask polarity",
    "padding ignored",
    "padding side",
    "scale",
    "softmax dtype",
)
NARROW = [torch.bfloat16, torch.float16]
Port = Callable[..., Tensor]


def layer(dtype: torch.dtype, seed: int = 0) -> Attention:
    torch.manual_seed(seed)
    made = Attention(WIDTH, HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made.to(dtype).eval()


def project(known: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        projection(x.to(projection.weight.dtype)).unflatten(2, (-1, HEAD_DIM)).transpose(1, 2)
        for projection in (known.q_proj, known.k_proj, known.v_proj)
    )
    return q, *(each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))


def fused(known: Attention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k, v = project(known, x)
    heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return known.out_proj(heads.transpose(1, 2).flatten(2))


def in_steps(known: Attention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Store every result on the way, as code without a kernel does."""
    q, k, v = project(known, x)
    scores = q @ k.mT * HEAD_DIM**-0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    heads = powers / powers.sum(-1, keepdim=True) @ v
    return known.out_proj(heads.transpose(1, 2).flatten(2))


def by_head(known: Attention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Add the heads one by one."""
    q, k, v = project(known, x)
    output = known.out_proj.bias
    for head, weight in enumerate(known.out_proj.weight.split(HEAD_DIM, 1)):
        scores = q[:, head] @ k[:, head].mT / HEAD_DIM**0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, 0], -torch.inf)
        output = output + scores.softmax(-1) @ v[:, head] @ weight.T
    return output


@pytest.mark.parametrize("dtype", others_extra(NARROW))
@pytest.mark.parametrize("port", others_slow([by_head, fused, in_steps]))
def test_a_right_port_is_the_same(port: Port, dtype: torch.dtype) -> None:
    for seed in range(3):
        known = layer(dtype, seed)
        for last in (torch.Tensor.clone, torch.Tensor.float):
            diagnosis = compare(lambda x, mask=None: last(port(known, x, mask)), known)  # noqa: B023
            assert diagnosis.verdict.is_same, str(diagnosis)


@pytest.mark.parametrize("dtype", others_slow(NARROW))
def test_a_float32_port_of_a_narrow_layer_is_the_same(dtype: torch.dtype) -> None:
    known = layer(dtype)
    wide = layer(dtype).float()
    assert compare(lambda x, mask=None: fused(wide, x, mask), known).verdict.is_same
    # Attention in 16 bits and a projection in float32 are right as well.
    half = layer(dtype)
    half.out_proj.float()
    half.out_proj.register_forward_pre_hook(lambda _, arguments: arguments[0].float())
    assert compare(lambda x, mask=None: fused(half, x, mask), known).verdict.is_same


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "dtype"),
    [("mask", torch.bfloat16), ("bias", torch.bfloat16), ("scale", torch.float16)],
)
def test_a_fault_is_no_rounding(fault: str, dtype: torch.dtype) -> None:
    known, other = layer(dtype), layer(dtype)
    with torch.no_grad():
        if fault == "bias":
            other.v_proj.bias.zero_()
        elif fault == "scale":
            other.q_proj.weight.mul_(1.25)
    diagnosis = compare_among(
        NEAR,
        lambda x, mask=None: fused(other, x, None if fault == "mask" else mask).float(),
        known,
    )
    assert diagnosis.verdict in (Verdict.DIFFERENT, Verdict.UNKNOWN)
    assert fault == "mask" or "does not see" not in str(diagnosis)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NARROW)
def test_rounding_of_large_added_numbers_explains_nothing(dtype: torch.dtype) -> None:
    known = layer(dtype)

    def masked_as_the_first(x: Tensor, mask: Tensor | None = None) -> Tensor:
        return in_steps(known, x, None if mask is None else mask[:1])

    diagnosis = compare_among(NEAR, masked_as_the_first, known)
    assert diagnosis.verdict is Verdict.UNKNOWN, str(diagnosis)
    assert "mask polarity" not in str(diagnosis)


def test_a_float32_function_that_returns_float64() -> None:
    known = layer(torch.float32)
    assert compare(lambda x, mask=None: in_steps(known, x, mask).double(), known).verdict.is_same
