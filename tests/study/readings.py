"""What encoders with random weights read, at once."""

from dataclasses import replace

import torch
from torch import nn

from headwise.masks.mask import Mask
from headwise.study.encoder import AttentionCall, RecordedRun
from headwise.study.implementations import SharedWeights
from headwise.study.measures import layer_output

LAYERS, HEADS, HEAD_DIM, LENGTH = 3, 5, 6, 37


def random_reading(tokens: tuple[str, ...] | None = None) -> RecordedRun:
    """Three layers of five heads, torch's own; the second sequence has 11 tokens."""
    tokens = tokens or ("[CLS]", *(f"w{n}" for n in range(LENGTH - 2)), "[SEP]")
    real = torch.arange(len(tokens)) < torch.tensor([[len(tokens)], [11]])
    calls = []
    for _ in range(LAYERS):
        layer = nn.MultiheadAttention(HEADS * HEAD_DIM, HEADS, batch_first=True)
        nn.init.normal_(layer.in_proj_weight, std=0.4)
        x = torch.randn(2, len(tokens), HEADS * HEAD_DIM)
        output, _ = layer(x, x, x, key_padding_mask=~real, need_weights=False)
        weights = SharedWeights.from_packed(
            layer.in_proj_weight.detach(),
            layer.in_proj_bias.detach(),
            layer.out_proj.weight.detach(),
            layer.out_proj.bias.detach(),
        )
        calls.append(AttentionCall(x, output.detach(), weights))
    return RecordedRun(
        model="a model with random weights",
        num_heads=HEADS,
        tokens=tokens,
        real=real,
        calls=tuple(calls),
    )


def small_reading(*, exchanged: bool = False) -> RecordedRun:
    """What one layer of two heads gave for two texts, of seven tokens and of four.

    With ``exchanged`` the weights that are told are not those it computed with: wq and wk stand
    in each other's place.
    """
    given = SharedWeights.random(8, biased=True)
    assert given.biases is not None
    x, real = torch.randn(2, 7, 8), torch.ones(2, 7, dtype=torch.bool)
    real[1, 4:] = False
    may_attend = real[:, None].expand(-1, 7, -1)
    mask = Mask.may_attend(may_attend, axes="batch queries keys")
    output = layer_output(x, x, x, *given.tensors, num_heads=2, mask=mask)
    told = replace(given, q=given.k, k=given.q) if exchanged else given
    return RecordedRun(
        model="a layer",
        num_heads=2,
        tokens=tuple("abcdefg"),
        real=real,
        calls=(AttentionCall(x, output, told),),
    )
