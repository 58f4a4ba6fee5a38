"""`MultiheadAttention` with its heads over ranks: every form, mask and returned weights."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from headwise import MultiheadAttention
from tests.sharding.heads.compared import compared, divided, moved
from tests.sharding.ranks import ranks

pytestmark = pytest.mark.slow

BATCH, QUERIES, KEYS, EMBED, HEADS = 3, 23, 29, 36, 12
FORMS: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed, slots, no bias": {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
    "separate": {"kdim": 33, "vdim": 35, "add_bias_kv": True},
}


def layer_of(form: str, **options: Any) -> MultiheadAttention:
    torch.manual_seed(0)
    layer = MultiheadAttention(EMBED, HEADS, **FORMS[form], **options, dtype=torch.float64)
    moved(layer)
    return layer


def inputs_of(form: str, *, batch_first: bool, batched: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    widths = [EMBED, FORMS[form].get("kdim", EMBED), FORMS[form].get("vdim", EMBED)]
    shapes = [(BATCH, n, w) for n, w in zip((QUERIES, KEYS, KEYS), widths, strict=True)]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    if not batched:
        inputs = [x[0] for x in inputs]
    elif not batch_first:
        inputs = [x.transpose(0, 1) for x in inputs]
    return [x.requires_grad_() for x in inputs]


def masks_of(kind: str, *, batched: bool, keys: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    rows = (BATCH if batched else 1) * HEADS
    hidden = torch.rand(rows, QUERIES, keys, generator=generator) < 0.3
    padding = torch.arange(keys) >= torch.tensor([[keys], [20], [3]])
    normal = torch.randn(rows, QUERIES, keys, generator=generator, dtype=torch.float64)
    return {
        "none": {},
        "bool": {"attn_mask": hidden, "key_padding_mask": padding if batched else padding[1]},
        "float of heads": {"attn_mask": normal},
        "float": {"attn_mask": normal[0]},
    }[kind]


def case(
    form: str, kind: str, batch_first: bool, batched: bool, itself: bool, in_proj: str
) -> float:
    layer = layer_of(form, batch_first=batch_first)
    inputs = inputs_of(form, batch_first=batch_first, batched=batched)
    masks = masks_of(kind, batched=batched, keys=QUERIES if itself else KEYS)
    inputs = inputs[:1] if itself else inputs
    floats = [m.requires_grad_() for m in masks.values() if m.is_floating_point()]

    def call(layer: nn.Module, leaves: list[Tensor], **weights: bool) -> Tensor:
        query, key, value = leaves[:1] * 3 if itself else leaves[:3]
        own = masks | ({"attn_mask": leaves[len(inputs)]} if floats else {})
        output, returned = layer(query, key, value, **own, **weights)
        return output if returned is None else torch.cat([output.flatten(), returned.flatten()])

    def with_mean(layer: nn.Module, leaves: list[Tensor]) -> Tensor:
        return call(layer, leaves)

    def with_weights(layer: nn.Module, leaves: list[Tensor]) -> Tensor:
        return call(layer, leaves, average_attn_weights=False)

    def without(layer: nn.Module, leaves: list[Tensor]) -> Tensor:
        return call(layer, leaves, need_weights=False)

    return max(
        compared(layer, way, [*inputs, *floats], in_proj=in_proj)
        for way in (with_mean, with_weights, without)
    )


def cases_of(chosen: list[tuple[Any, ...]]) -> list[float]:
    return [case(*options) for options in chosen]


CASES = [
    *product(FORMS, ("none", "bool", "float of heads"), (True,), (True,), (False,), ("whole",)),
    *product(("packed",), ("bool", "float"), (False,), (True,), (True,), ("separate", "whole")),
    *product(("packed",), ("none", "bool"), (False,), (False,), (False,), ("separate",)),
]


@pytest.mark.parametrize(("count", "chosen"), [(2, CASES), (4, CASES[::3])])
def test_every_form_mask_and_returned_weights(count: int, chosen: list[tuple[Any, ...]]) -> None:
    for found in ranks(count).run(cases_of, chosen):
        for options, excess in zip(chosen, found, strict=True):
            assert excess <= 1, options


def test_parameters_are_divided_where_they_can_be() -> None:
    for found in ranks(2).run(placements):
        whole, separate = found
        assert whole["in_proj_weight"] == (Replicate(), (108, 36))
        assert whole["in_proj_bias"] == separate["in_proj_bias"] == (Replicate(), (108,))
        assert whole["out_proj.weight"] == (Shard(1), (36, 18))
        assert separate["q_proj_weight"] == separate["v_proj_weight"] == (Shard(0), (18, 36))
        assert "in_proj_weight" not in separate


def placements() -> list[dict[str, Any]]:
    found = []
    for in_proj in ("whole", "separate"):
        layer = divided(layer_of("packed"), in_proj=in_proj)
        assert all(isinstance(p, DTensor) for p in layer.parameters())
        found.append(
            {
                name: (p.placements[0], tuple(p.to_local().shape))
                for name, p in layer.named_parameters()
            }
        )
    return found


def test_without_gradients_and_in_training() -> None:
    for found in ranks(2).run(inference):
        assert max(found) <= 1e-12


def inference() -> list[float]:
    layer = layer_of("packed", batch_first=True)
    sharded = divided(layer)
    x = inputs_of("packed", batch_first=True)[0].detach()
    errors = []
    with torch.no_grad():
        for average in (True, False):
            for a, b in zip(
                layer(x, x, x, average_attn_weights=average),
                sharded(x, x, x, average_attn_weights=average),
                strict=True,
            ):
                errors.append(float((a - b).abs().max()))
    assert "q_proj_weight" in str(sharded.explain(x, x, x))
    return errors
