"""The functional form against torch's, static keys and values included."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from headwise import MultiheadAttention
from headwise.layers import multi_head_attention_forward
from tests.layers.torch_api.cases import BATCH, EMBED, HEADS, KEYS, QUERIES, pair

Q, K = torch.randn(QUERIES, BATCH, EMBED).double(), torch.randn(KEYS, BATCH, EMBED).double()


def arguments(layer: MultiheadAttention, **other: Any) -> dict[str, Any]:
    separate = not layer._qkv_same_embed_dim
    weights = {f"{x}_proj_weight": getattr(layer, f"{x}_proj_weight") for x in "qkv"}
    return {
        "embed_dim_to_check": EMBED,
        "num_heads": HEADS,
        "in_proj_weight": layer.in_proj_weight,
        "in_proj_bias": layer.in_proj_bias,
        "bias_k": layer.bias_k,
        "bias_v": layer.bias_v,
        "add_zero_attn": layer.add_zero_attn,
        "dropout_p": 0.0,
        "out_proj_weight": layer.out_proj.weight,
        "out_proj_bias": layer.out_proj.bias,
        "use_separate_proj_weight": separate,
        **(weights if separate else {}),
        **other,
    }


def static(keys: int) -> Tensor:
    return torch.randn(BATCH * HEADS, keys, EMBED // HEADS).double()


def both(inputs: tuple[Tensor, ...], given: dict[str, Any]) -> tuple[Any, Any]:
    ours = multi_head_attention_forward(*inputs, **given)
    return ours, functional.multi_head_attention_forward(*inputs, **given)


def test_the_signature_is_torchs() -> None:
    ours = inspect.signature(multi_head_attention_forward).parameters
    theirs = inspect.signature(functional.multi_head_attention_forward).parameters
    assert [(p.name, p.default, p.kind) for p in ours.values()] == [
        (p.name, p.default, p.kind) for p in theirs.values()
    ]


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"vdim": 7}, {"add_bias_kv": True, "add_zero_attn": True}, {"bias": False}]
)
def test_it_is_torchs_function(options: dict[str, Any], need_weights: bool) -> None:
    _, layer = pair(**options)
    inputs = (Q, K, K[..., : layer.vdim])
    padding = torch.rand(BATCH, KEYS) < 0.3
    given = arguments(layer, need_weights=need_weights, key_padding_mask=padding)
    torch.testing.assert_close(*both(inputs, given))
    given |= {"key_padding_mask": padding[0], "average_attn_weights": False}
    torch.testing.assert_close(*both(tuple(x[:, 0] for x in inputs), given))
    layer_output = layer(*inputs, key_padding_mask=padding, need_weights=need_weights)
    given = arguments(layer, need_weights=need_weights, key_padding_mask=padding)
    torch.testing.assert_close(multi_head_attention_forward(*inputs, **given), layer_output)


@pytest.mark.parametrize("keys", [KEYS, 17])
@pytest.mark.parametrize("zero", [False, True])
def test_static_keys_and_values(zero: bool, keys: int) -> None:
    _, layer = pair(add_zero_attn=zero)
    padding = torch.rand(BATCH, keys) < 0.3
    given = arguments(layer, static_k=static(keys), static_v=static(keys), key_padding_mask=padding)
    ours, theirs = both((Q, K, K), given)
    torch.testing.assert_close(ours, theirs)
    assert ours[1].shape == (BATCH, QUERIES, keys + zero)


@pytest.mark.parametrize("name", ["static_k", "static_v"])
def test_one_static_operand(name: str) -> None:
    _, layer = pair()
    mask = torch.rand(QUERIES, KEYS) < 0.3
    torch.testing.assert_close(
        *both((Q, K, K), arguments(layer, attn_mask=mask, **{name: static(KEYS)}))
    )


def test_masks_are_for_the_static_length() -> None:
    _, layer = pair()
    mask = torch.rand(QUERIES, 17) < 0.3
    given = arguments(layer, static_k=static(17), static_v=static(17), attn_mask=mask)
    output = multi_head_attention_forward(Q, K, K, **given)[0]
    as_padding = arguments(layer, static_k=static(17), static_v=static(17))
    assert output.shape == multi_head_attention_forward(Q, K, K, **as_padding)[0].shape
    with pytest.raises(RuntimeError, match="2D attn_mask"):
        multi_head_attention_forward(Q, K, K, **given | {"attn_mask": mask[:, :16]})


def test_static_operands_get_their_gradient() -> None:
    _, layer = pair()
    gradients = []
    k, v = static(17), static(17)
    for function in (multi_head_attention_forward, functional.multi_head_attention_forward):
        leaves = [k.clone().requires_grad_(), v.clone().requires_grad_()]
        given = arguments(layer, static_k=leaves[0], static_v=leaves[1])
        function(Q, K, K, **given)[0].square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*gradients)


def test_dropout_only_in_training() -> None:
    _, layer = pair()
    given = arguments(layer, dropout_p=0.5)
    calm = multi_head_attention_forward(Q, K, K, **given, training=False)[0]
    assert torch.equal(calm, multi_head_attention_forward(Q, K, K, **arguments(layer))[0])
    assert not torch.equal(calm, multi_head_attention_forward(Q, K, K, **given)[0])
