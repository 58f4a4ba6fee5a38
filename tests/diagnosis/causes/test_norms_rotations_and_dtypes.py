"""Causes in norms, rotations and dtypes, named on a plain function with one fault."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from headwise import Attention, Rotary, compare
from headwise.layers import Alibi, QKNorm, alibi_slopes
from tests.diagnosis.among import compare_among
from tests.quick import others_extra

WIDTH, HEADS, KV_HEADS, HEAD_DIM, TURNED = 44, 4, 2, 10, 6
Parts = dict[str, Tensor]
Change = Callable[[Parts], None]


def layer_of(*, turned: int = TURNED) -> Attention:
    torch.manual_seed(3)
    layer = Attention(
        WIDTH,
        HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rotary=Rotary(theta=100.0, width=turned),
        qk_norm=QKNorm(eps=1e-6),
    )
    with torch.no_grad():
        for weight in layer.parameters():
            weight.add_(0.3 * torch.randn(weight.shape))
    return layer.requires_grad_(False)


def turn(x: Tensor, width: int) -> Tensor:
    positions = torch.arange(x.shape[2])[:, None]
    angles = positions * 100.0 ** (-torch.arange(0, width, 2) / width)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    moving, still = x.split((width, x.shape[-1] - width), -1)
    first, second = moving.chunk(2, -1)
    return torch.cat([moving * cos + torch.cat([-second, first], -1) * sin, still], -1)


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def port(layer: Attention, fault: str, x: Tensor) -> Tensor:
    """Return the output of plain code with a fault."""
    state, turned = dict(layer.state_dict()), layer.spec.rotation.width
    if fault == "dtype's rounding of weights":
        state["v_proj.weight"] = state["v_proj.weight"].half().to(x.dtype)
    q, k, v = (
        F.linear(x, state[f"{role}_proj.weight"], state[f"{role}_proj.bias"])
        .unflatten(2, (-1, HEAD_DIM))
        .transpose(1, 2)
        for role in "qkv"
    )
    weights = [state["q_norm.weight"], state["k_norm.weight"]]
    weights = weights[::-1] if fault == "norm weights of q and k exchanged" else weights
    if fault == "norm weights missing":
        weights[1] = torch.ones_like(weights[1])
    if fault == "norm weights in another order":
        pairs = [w[:turned].unflatten(0, (2, -1)).T.flatten() for w in weights]
        weights = [torch.cat([p, w[turned:]]) for p, w in zip(pairs, weights, strict=True)]
    eps = 1e-3 if fault == "qk-norm eps" else 1e-6
    if fault == "norm on another role":
        v, k = rms(v, weights[0]), rms(k, weights[1])
    else:
        q, k = (rms(y, weight, eps) for y, weight in zip((q, k), weights, strict=True))
    if fault == "rotary on other channels":
        q, k = (turn(y.roll(TURNED, -1), turned).roll(-TURNED, -1) for y in (q, k))
    elif fault == "rotary over all heads at once":
        joined = (y.transpose(1, 2).flatten(2)[:, None] for y in (q, k))
        q, k = (
            turn(y, y.shape[-1])[:, 0].unflatten(2, (-1, HEAD_DIM)).transpose(1, 2) for y in joined
        )
    else:
        q, k = turn(q, turned), turn(k, turned)
    k = turn(k, turned) if fault == "rotary applied twice" else k
    v = turn(v, turned) if fault == "rotary on values" else v
    if fault == "activations in a narrower dtype":
        k, v = k.bfloat16().to(x.dtype), v.bfloat16().to(x.dtype)
    dtype = torch.bfloat16 if fault == "softmax dtype" else x.dtype
    k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
    mixed = (q @ k.mT / HEAD_DIM**0.5).softmax(-1, dtype=dtype).to(x.dtype) @ v
    return F.linear(
        mixed.transpose(1, 2).flatten(2), state["out_proj.weight"], state["out_proj.bias"]
    )


FAULTS = (
    "norm weights of q and k exchanged",
    "norm weights missing",
    "norm weights in another order",
    "norm on another role",
    "qk-norm eps",
    "rotary applied twice",
    "rotary on values",
    "rotary on other channels",
    "rotary over all heads at once",
    "activations in a narrower dtype",
    "softmax dtype",
    "dtype's rounding of weights",
)


AMONG = (*FAULTS, "factor", "qk-norm kind", "rotary theta", "rotary scaling factor", "scale")
QUICK = ("softmax dtype",)


@pytest.mark.parametrize("fault", others_extra(FAULTS, *[*FAULTS][::3], quick=QUICK))
def test_the_cause_is_named_on_a_function(fault: str) -> None:
    turned = HEAD_DIM if fault == "rotary over all heads at once" else TURNED
    layer = layer_of(turned=turned)
    diagnosis = compare_among(AMONG, partial(port, layer, fault), layer)
    assert diagnosis.function is not None
    assert diagnosis.function.cause_names == [fault], diagnosis


@pytest.mark.parametrize(
    ("dtype", "of", "words"),
    others_extra(
        [
            (torch.bfloat16, "bias", "of the bias by distance, from the first key"),
            (torch.float16, "bias", "of the bias by distance, from the first key"),
            (torch.bfloat16, "softmax", "bias by distance from the first key"),
        ]
    ),
)
def test_a_bias_by_distance_in_16_bit(dtype: torch.dtype, of: str, words: str) -> None:
    """Keys count from the first one, so that rows have numbers in common that are rounded."""
    torch.manual_seed(2)
    layer = Attention(60, 12, window=(None, 0), score_bias=Alibi())

    def port(x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(2, (12, 5)).transpose(1, 2)
            for part in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        places = torch.arange(x.shape[1])
        bias = (alibi_slopes(12)[:, None, None] * places).to(dtype if of == "bias" else x.dtype)
        scores = (q @ k.mT / 5**0.5 + bias).masked_fill(places > places[:, None], -torch.inf)
        scores = scores.to(dtype if of == "softmax" else x.dtype)
        output = layer.out_proj((scores.softmax(-1).to(x.dtype) @ v).transpose(1, 2).flatten(2))
        assert isinstance(output, Tensor)
        return output

    diagnosis = compare_among((*AMONG, "distance bias slope rule"), port, layer)
    assert diagnosis.function is not None
    [cause] = diagnosis.function.causes
    named = {"bias": "activations in a narrower dtype", "softmax": "softmax dtype"}
    assert cause.name == named[of]
    assert words in str(diagnosis)


@pytest.mark.parametrize("heads", [3, 12])
def test_a_bias_by_distance_from_the_first_key_is_the_same_function(heads: int) -> None:
    """The numbers that a row has in common grow with its position, and so their rounding."""
    torch.manual_seed(2)
    layer = Attention(60, heads, window=(None, 0), score_bias=Alibi())

    def port(x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(2, (heads, -1)).transpose(1, 2)
            for part in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        places = torch.arange(x.shape[1])
        scores = q @ k.mT / (60 / heads) ** 0.5 + alibi_slopes(heads)[:, None, None] * places
        weights = scores.masked_fill(places > places[:, None], -torch.inf).softmax(-1)
        output = layer.out_proj((weights @ v).transpose(1, 2).flatten(2))
        assert isinstance(output, Tensor)
        return output

    assert compare(port, layer)


def test_the_plain_function_without_a_fault_is_the_same() -> None:
    layer = layer_of()
    assert compare(partial(port, layer, ""), layer)
