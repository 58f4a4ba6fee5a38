"""Values from an input of their own: torch's numbers, all readings, packing, refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import Attention, Mask, Rotary
from headwise.errors import HeadwiseError
from headwise.function import Latent
from headwise.layers import packing

BATCH, QUERIES, KEYS, EMBED, HEADS = 3, 24, 17, 48, 6
ROUNDING = 1e-14


def draw(seed: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, length, EMBED, generator=generator, dtype=torch.float64)


X, PLACES, SOURCE, VALUES = draw(0, QUERIES), draw(1, QUERIES), draw(2, KEYS), draw(3, KEYS)


def make_layer(**options: Any) -> Attention:
    torch.manual_seed(4)
    layer = Attention(EMBED, HEADS, **options, dtype=torch.float64).requires_grad_(False)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


def test_one_head_by_hand() -> None:
    layer = Attention(1, 1, dtype=torch.float64).requires_grad_(False)
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
        projection.weight.fill_(1)
    keys, values = torch.tensor([[[0.0], [1.0]]]).double(), torch.tensor([[[3.0], [11.0]]]).double()
    output = layer(torch.ones(1, 1, 1).double(), keys, value_source=values)
    weight = torch.tensor(1.0).double().sigmoid()  # of the second key
    assert (output.item() - (3 + 8 * weight)).abs() <= ROUNDING


@pytest.mark.parametrize("lengths", [None, torch.tensor([17, 11, 5])])
def test_the_numbers_of_torch(lengths: Tensor | None) -> None:
    layer = make_layer()
    theirs = nn.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64)
    theirs.load_state_dict(layer.to_layout("torch-packed"))
    mask = None if lengths is None else Mask.lengths(keys=lengths)
    hidden = None if lengths is None else torch.arange(KEYS) >= lengths[:, None]
    expected, _ = theirs(X, SOURCE, VALUES, key_padding_mask=hidden)
    output = layer(X, SOURCE, value_source=VALUES, mask=mask)
    assert (output - expected).abs().max() <= ROUNDING * expected.abs().max()


def test_all_readings_take_it() -> None:
    layer = make_layer(output_gate="channel", rotary=Rotary())
    given: Any = {"x": X + PLACES, "value_source": X, "mask": Mask.causal()}
    output, stages = layer(**given), layer.stages(**given)
    whole = layer.contributions(**given).sum(1) + layer.out_proj.bias
    assert (whole - output).abs().max() <= ROUNDING * output.abs().max()
    assert torch.equal(stages["output"], output)
    assert torch.equal(stages["head outputs"], layer.head_outputs(**given))
    assert torch.equal(stages["v"], layer.v_proj(X).unflatten(2, (HEADS, -1)).transpose(1, 2))
    assert torch.equal(
        layer.matrix(**given).dense(), layer.matrix(X + PLACES, mask=given["mask"]).dense()
    )
    assert str(layer.explain(**given)) == str(layer.explain(X + PLACES, mask=given["mask"]))
    same = layer(X + PLACES, value_source=X + PLACES)
    assert torch.equal(same, layer(X + PLACES))


def test_packed_tokens_have_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, lengths = make_layer(), torch.tensor([24, 7, 13])
    mask = Mask.lengths(queries=lengths, keys=lengths)
    padded = layer(X + PLACES, value_source=X, mask=mask)
    monkeypatch.setattr(packing.varlen, "call_overhead", lambda _: 0)
    assert "packed into one row" in str(layer.explain(X + PLACES, value_source=X, mask=mask))
    packed = layer(X + PLACES, value_source=X, mask=mask)
    assert (packed - padded).abs().max() <= ROUNDING * padded.abs().max()


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("options", "given", "saw"),
    [
        ({}, {"value_source": draw(0, 5)}, r"value_source .*5.* for keys of .*17"),
        ({}, {"value_source": VALUES[..., :9]}, r"value_source of shape \(3, 17, 9\)"),
        ({"latent": Latent(rank=5, shared_width=2)}, {"source": None}, "value_source= with Latent"),
        ({}, {"source": None, "cache": 24}, "value_source= with a cache"),
    ],
)
def test_what_is_refused(options: Any, given: Any, saw: str) -> None:
    layer = make_layer(**options)
    call = {"source": SOURCE, "value_source": VALUES} | given
    if call["source"] is None:
        call["value_source"] = PLACES
    if "cache" in call:
        call["cache"] = layer.cache(batch=BATCH, length=call["cache"])
    with pytest.raises(HeadwiseError, match=saw):
        layer(X, **call)
