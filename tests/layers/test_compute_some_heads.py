"""Layers that compute a part of their heads: the outputs of the parts add up to the whole."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import Attention, Mask, MultiheadAttention, Rotary, ScoreBias
from headwise.errors import MaskError, OptionError, ShapeError
from headwise.function import Latent
from headwise.layers.base import HeadPart
from headwise.layers.distance import Alibi, T5Bias
from headwise.layers.norm import QKNorm

BATCH, LENGTH, EMBED, HEADS = 3, 24, 42, 6
PARTS = (range(4), range(4, 6))
TOLERANCE = 1e-13


def part_of(layer: Attention, heads: range) -> Attention:
    """The layer with the channels of these heads, and of the kv heads that they use."""
    part = HeadPart(heads, num_heads=HEADS, num_kv_heads=layer.num_kv_heads)
    small = copy.deepcopy(layer)
    small.part = part
    rows = {
        "q_proj": (heads, layer.head_dim),
        "k_proj": (part.kv_heads, layer.head_dim - getattr(layer.latent, "shared_width", 0)),
        "v_proj": (part.kv_heads, layer.value_dim),
    }
    for name, (channels_of, width) in rows.items():
        projection = small.get_submodule(name)
        for key, parameter in list(projection.named_parameters()):
            cut = parameter[channels_of.start * width : channels_of.stop * width]
            setattr(projection, key, nn.Parameter(cut.detach().clone()))
    first, stop = heads.start * layer.value_dim, heads.stop * layer.value_dim
    weight = small.out_proj.weight[:, first:stop]
    small.out_proj.weight = nn.Parameter(weight.detach().clone())
    if small.sink is not None:
        small.sink = nn.Parameter(small.sink[heads.start : heads.stop].detach().clone())
    return small


def made(**options: Any) -> tuple[Attention, Tensor]:
    torch.manual_seed(0)
    layer = Attention(EMBED, HEADS, **{"value_dim": 5} | options, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer, torch.randn(BATCH, LENGTH, EMBED, dtype=torch.float64)


def added(layer: Attention, call: Callable[[Attention], Tensor]) -> Tensor:
    """The sum of what each part gives, with the output's bias once."""
    outputs = [call(part_of(layer, heads)) for heads in PARTS]
    bias = layer.out_proj.bias
    return sum(outputs[1:], outputs[0]) - (len(PARTS) - 1) * bias


OPTIONS: dict[str, dict[str, Any]] = {
    "sink, softcap": {"sink": True, "softcap": 3.0},
    "6 heads on 3 kv": {"num_kv_heads": 3, "head_dim": 8, "rotary": Rotary()},
    "6 heads on 2 kv, of uneven groups": {"num_kv_heads": 2, "qk_norm": QKNorm()},
    "alibi, window": {"score_bias": Alibi(), "window": (5, 0)},
    "t5": {"score_bias": T5Bias(buckets=8, max_distance=20), "num_kv_heads": 1},
    "latent, expanded": {"latent": Latent(rank=31, shared_width=4, query_rank=8)},
    "latent, absorbed": {"latent": Latent(rank=2, shared_width=2), "head_dim": 48},
}


def test_values_of_another_input() -> None:
    layer, x = made()
    given = {"source": x.flip(1), "value_source": x.roll(1, 1)}
    output = layer(x, **given)
    parts = added(layer, lambda part: part(x, **given))
    assert (parts - output).abs().max() <= TOLERANCE * output.abs().max()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_parts_add_up(options: dict[str, Any]) -> None:
    layer, x = made(**options)
    generator = torch.Generator().manual_seed(1)
    masks = {
        "none": None,
        "where": Mask.where(
            lambda batch, head, query, key: (key - query + 2 * head + batch) % 3 > 0
        ),
        "dense": Mask.may_attend(
            torch.rand(BATCH, HEADS, LENGTH, LENGTH, generator=generator) > 0.4,
            axes="batch heads queries keys",
        )
        & Mask.causal(),
    }
    bias = torch.randn(HEADS, LENGTH, LENGTH, dtype=torch.float64, generator=generator)
    for mask in masks.values():
        call: dict[str, Any] = {
            "mask": mask,
            "score_bias": ScoreBias.dense(bias, axes="heads queries keys"),
            "gate": torch.rand(BATCH, HEADS, dtype=torch.float64, generator=generator),
        }
        with torch.no_grad():
            found = added(layer, lambda part, call=call: part(x, **call))
            torch.testing.assert_close(found, layer(x, **call), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_readings_and_steps_of_a_part(options: dict[str, Any]) -> None:
    layer, x = made(**options)
    heads = PARTS[0]
    small, chosen = part_of(layer, heads), slice(heads.start, heads.stop)
    with torch.no_grad():
        for name in ("contributions", "head_outputs"):
            whole, found = getattr(layer, name)(x), getattr(small, name)(x)
            if name == "contributions":  # of all heads: zero for those of other parts
                assert torch.all(found[:, heads.stop :] == 0)
                found = found[:, chosen]
            torch.testing.assert_close(found, whole[:, chosen], rtol=0, atol=TOLERANCE)
        cache = small.cache(batch=BATCH, length=LENGTH)
        held = "latent" if layer.latent else f"kv_heads={len(small.part.kv_heads)}"
        assert held in repr(cache)
        assert "heads 0 to 3 here" in repr(small)
        steps = [small(token, mask=Mask.causal(), cache=cache) for token in x.split(1, 1)]
        expected = small(x, mask=Mask.causal())
        torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=0, atol=TOLERANCE)


def test_a_mask_for_other_heads_is_refused() -> None:
    layer, x = made()
    small = part_of(layer, PARTS[0])
    allowed = torch.ones(4, LENGTH, LENGTH, dtype=torch.bool)
    with pytest.raises(MaskError, match="heads 6"):
        small(x, mask=Mask.may_attend(allowed, axes="heads queries keys"))
    with pytest.raises(MaskError, match="heads 6"):
        small(x, score_bias=ScoreBias.dense(allowed.double(), axes="heads queries keys"))


def test_a_projection_of_fewer_heads_is_refused_without_a_part() -> None:
    layer, x = made(num_kv_heads=2)
    small = part_of(layer, PARTS[0])
    small.part = None
    with pytest.raises(ShapeError, match="q_proj gives 28 channels for 6 heads of 7") as caught:
        small(x)
    assert "headwise.sharding.Heads()" in str(caught.value)


# ---- the drop-in -------------------------------------------------------------------------------


DROP_IN: dict[str, dict[str, Any]] = {
    "packed": {"add_bias_kv": True, "add_zero_attn": True},
    "separate": {"kdim": 33, "vdim": 35},
    "no bias": {"bias": False},
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("options", DROP_IN.values(), ids=DROP_IN)
def test_parts_of_the_drop_in_add_up(options: dict[str, Any], batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = MultiheadAttention(EMBED, HEADS, batch_first=batch_first, **options).double()
    shape = (BATCH, LENGTH) if batch_first else (LENGTH, BATCH)
    query = torch.randn(*shape, EMBED).double()
    inputs = [torch.randn(*shape, options.get(n, EMBED)).double() for n in ("kdim", "vdim")]
    masks = {
        "attn_mask": torch.rand(BATCH * HEADS, LENGTH, LENGTH) < 0.3,
        "key_padding_mask": torch.arange(LENGTH) >= torch.tensor([[24], [20], [3]]),
    }
    with torch.no_grad():
        for average in (True, False):
            call = {**masks, "average_attn_weights": average}
            expected, weights = layer(query, *inputs, **call)
            total, collected = torch.zeros_like(expected), []
            for heads in PARTS:
                small = copy.copy(layer)
                small.part = HeadPart(heads, num_heads=HEADS, num_kv_heads=HEADS)
                small.__dict__["out_proj"] = _columns(layer.out_proj, heads)
                out, returned = small(query, *inputs, **call)
                total += out
                collected.append(returned)
            if layer.out_proj.bias is not None:
                total -= (len(PARTS) - 1) * layer.out_proj.bias
            torch.testing.assert_close(total, expected, rtol=0, atol=TOLERANCE)
            found = sum(collected) if average else torch.cat(collected, 1)
            torch.testing.assert_close(found, weights, rtol=0, atol=TOLERANCE)


def _columns(projection: nn.Linear, heads: range) -> nn.Linear:
    width = EMBED // HEADS
    part = copy.deepcopy(projection)
    columns = projection.weight[:, heads.start * width : heads.stop * width]
    part.weight = nn.Parameter(columns.detach().clone())
    return part


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_part_of_the_drop_in_refuses_other_masks() -> None:
    layer = MultiheadAttention(EMBED, HEADS, batch_first=True)
    layer.part = HeadPart(PARTS[0], num_heads=HEADS, num_kv_heads=HEADS)
    x = torch.randn(BATCH, LENGTH, EMBED)
    mask = torch.zeros(BATCH * 4, LENGTH, LENGTH, dtype=torch.bool)
    with pytest.raises(MaskError, match=r"should be \(18, 24, 24\)"):
        layer(x, x, x, attn_mask=mask)
    nested = torch.nested.nested_tensor([x[0], x[1]])
    with pytest.raises(OptionError, match="heads 0 to 3 of 6 with nested"):
        layer(nested, nested, nested)
