"""Nothing of the size of every head's weights is made, unless it is what was asked for."""

import pytest
import torch
from torch import Tensor, nn

from headwise.layers.torch_api import layer
from headwise.matrix.kernels import tiles
from tests.layers.torch_api.cases import causal, pair
from tests.memory import LargestTensor

# Long enough that queries x keys outweighs the widest activation, the packed projection.
BATCH, HEADS, LENGTH, EMBED = 3, 6, 640, 60
# In bytes, float32.
PER_HEAD = 4 * BATCH * HEADS * LENGTH * LENGTH
AVERAGE = 4 * BATCH * LENGTH * LENGTH
ACTIVATION = 4 * BATCH * LENGTH * 3 * EMBED


def made_by(layer: nn.MultiheadAttention, *, train: bool, **options: object) -> LargestTensor:
    x = torch.randn(BATCH, LENGTH, EMBED, requires_grad=train)
    layer.train(train)
    with torch.set_grad_enabled(train), LargestTensor() as made:
        output, weights = layer(x, x, x, **options)
        if train:
            loss = output.sum() if weights is None else output.sum() + weights.square().sum()
            loss.backward()
    return made


def padding() -> Tensor:
    return torch.arange(LENGTH) >= torch.tensor([LENGTH, LENGTH - 11, 5])[:, None]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"key_padding_mask": padding()}, marks=pytest.mark.slow),
        pytest.param(
            {"key_padding_mask": torch.zeros(BATCH, LENGTH).masked_fill(padding(), -torch.inf)},
            marks=pytest.mark.slow,
        ),
        pytest.param({"attn_mask": causal(LENGTH)}, marks=pytest.mark.slow),
        {"attn_mask": causal(LENGTH), "key_padding_mask": padding()},
    ],
    ids=["plain", "padding", "float padding", "causal", "causal and padding"],
)
def test_with_and_without_weights(
    options: dict[str, Tensor], train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if a tile were small, so that two masks are too large to be written as one.
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 2**15)
    # No mask's values are read while a dispatch mode watches; here they are to be read.
    monkeypatch.setattr(layer, "may_read_values", lambda _: True)
    theirs, ours = pair(dtype=torch.float32, batch_first=True)
    made = made_by(ours, train=train, need_weights=False, **options)
    assert made.bytes <= ACTIVATION, made.name
    made = made_by(ours, train=train, **options)
    assert made.bytes <= AVERAGE, made.name
    if train:
        # The check can fail: torch makes the weights of every head.
        assert made_by(theirs, train=True, **options).bytes >= PER_HEAD


@pytest.mark.parametrize("train", [True, False])
def test_a_dense_mask_is_not_expanded_to_heads(train: bool) -> None:
    _, ours = pair(dtype=torch.float32, batch_first=True)
    for mask in (torch.rand(LENGTH, LENGTH) < 0.5, torch.randn(LENGTH, LENGTH)):
        for both in ({}, {"key_padding_mask": padding()}):
            made = made_by(ours, train=train, need_weights=False, attn_mask=mask, **both)
            assert made.bytes <= AVERAGE, made.name


def test_weights_of_every_head_are_made_where_they_are_returned() -> None:
    _, ours = pair(dtype=torch.float32, batch_first=True)
    assert made_by(ours, train=False, average_attn_weights=False).bytes >= PER_HEAD
