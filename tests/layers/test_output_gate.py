"""The output gate of a layer: closed forms, float64 by hand, caches, and the words of errors."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import headwise
from headwise import Attention, Mask, Rotary
from headwise.errors import HeadwiseError, OptionError, ShapeError
from headwise.function.gate import output_gate
from headwise.function.spec import ABSENT
from headwise.layers.conversion import options_of_spec, state_per_head
from headwise.layers.norm import QKNorm
from tests.quick import others_slow

EMBED, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, LENGTH, BATCH = 40, 6, 2, 10, 7, 24, 3
SIZES: dict[str, Any] = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "value_dim": VALUE_DIM}
KINDS = ("head", "channel")


def gated(kind: str, **options: Any) -> Attention:
    torch.manual_seed(0)
    layer = Attention(EMBED, HEADS, **SIZES | options, output_gate=kind, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return layer


def without_gate(layer: Attention, **options: Any) -> Attention:
    plain = Attention(EMBED, HEADS, **SIZES | options, dtype=torch.float64)
    state = layer.state_dict().items()
    plain.load_state_dict({n: x for n, x in state if not n.startswith("gate_proj")})
    return plain


def tokens(length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, length, EMBED, generator=generator, dtype=torch.float64)


# ---- closed forms ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_gate_of_zeros_halves_the_head_outputs(kind: str) -> None:
    layer, x = gated(kind), tokens()
    for parameter in layer.gate_proj.parameters():
        parameter.zero_()
    plain = without_gate(layer)
    assert torch.equal(layer.head_outputs(x), plain.head_outputs(x) / 2)
    halved = plain.head_outputs(x).transpose(1, 2).flatten(2) / 2
    assert torch.equal(layer(x), F.linear(halved, layer.out_proj.weight, layer.out_proj.bias))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_gate_of_a_large_bias_is_no_gate(kind: str) -> None:
    layer, x = gated(kind), tokens()
    layer.gate_proj.bias.fill_(1e3)
    assert torch.equal(layer(x), without_gate(layer)(x))
    layer.gate_proj.bias.fill_(-1e3)
    assert torch.equal(layer(x), layer.out_proj.bias.expand_as(x))


@torch.no_grad()
def test_one_gate_for_each_head_closes_this_head() -> None:
    layer, x = gated("head"), tokens()
    layer.gate_proj.weight.zero_()
    layer.gate_proj.bias.copy_(torch.tensor([1e3, -1e3, 1e3, 1e3, 1e3, 1e3]))
    without = without_gate(layer)(x, gate=torch.tensor([1.0, 0, 1, 1, 1, 1], dtype=torch.float64))
    assert torch.equal(layer(x), without)


# ---- against the formula -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_channels_of_a_head_have_their_own_gates(kind: str) -> None:
    """The rows of gate_proj are heads, then channels: by a loop over both."""
    layer, x = gated(kind), tokens()
    plain, width = without_gate(layer).head_outputs(x), 1 if kind == "head" else VALUE_DIM
    assert layer.gate_proj.weight.shape == (HEADS * width, EMBED)
    found = layer.head_outputs(x)
    for head in range(HEADS):
        for channel in range(VALUE_DIM):
            row = head * width + (channel if width > 1 else 0)
            gate = 1 / (
                1 + torch.exp(-(x @ layer.gate_proj.weight[row] + layer.gate_proj.bias[row]))
            )
            torch.testing.assert_close(
                found[:, head, :, channel], plain[:, head, :, channel] * gate, rtol=1e-13, atol=0
            )


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_contributions_add_up_to_the_output(kind: str) -> None:
    layer, x = gated(kind), tokens()
    total = layer.contributions(x, mask=Mask.causal()).sum(1) + layer.out_proj.bias
    torch.testing.assert_close(total, layer(x, mask=Mask.causal()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_skipped_and_gates_stay_with_their_tokens(kind: str) -> None:
    """Wide enough that real tokens are packed into one row."""
    torch.manual_seed(0)
    layer = Attention(256, 8, output_gate=kind, dtype=torch.float64)
    x, lengths = torch.randn(4, 96, 256, dtype=torch.float64), torch.tensor([96, 3, 17, 9])
    mask = Mask.lengths(queries=lengths, keys=lengths) & Mask.causal()
    assert "padding is skipped" in str(layer.explain(x, mask=mask))
    heads = torch.linspace(0.2, 1.4, 32, dtype=torch.float64).reshape(4, 8)
    found = layer(x, mask=mask, gate=heads)
    for row, length in enumerate(lengths.tolist()):
        alone = layer(x[row : row + 1, :length], mask=Mask.causal(), gate=heads[row : row + 1])
        torch.testing.assert_close(found[row, :length], alone[0], rtol=1e-11, atol=1e-12)
        assert torch.equal(found[row, length:], layer.out_proj.bias.expand(96 - length, -1))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_steps_with_a_cache_are_one_pass(kind: str) -> None:
    layer, x = gated(kind, rotary=Rotary(width=6), qk_norm=QKNorm()), tokens()
    whole = layer(x, mask=Mask.causal())
    cache = layer.cache(batch=BATCH, length=LENGTH)
    parts = [layer(part, mask=Mask.causal(), cache=cache) for part in x.split([9, 1, 1, 13], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-11, atol=1e-12)


@torch.no_grad()
def test_lengths_of_a_cached_prefill_keep_gates_with_their_tokens() -> None:
    layer, x = gated("channel"), tokens()
    lengths = torch.tensor([24, 5, 11])
    found = layer(
        x,
        mask=Mask.lengths(queries=lengths, keys=lengths) & Mask.causal(),
        cache=layer.cache(batch=BATCH, length=LENGTH),
    )
    for row, length in enumerate(lengths.tolist()):
        alone = layer(x[row : row + 1, :length], mask=Mask.causal())
        torch.testing.assert_close(found[row, :length], alone[0], rtol=1e-11, atol=1e-12)


@torch.no_grad()
def test_gates_of_cross_attention_are_of_the_queries() -> None:
    layer = gated("channel", source_dim=33)
    x, source = tokens(), torch.randn(BATCH, 29, 33, dtype=torch.float64)
    gates = output_gate(x, *(state_per_head(layer, layer.state_dict())[n] for n in ("wg", "bg")))
    plain = without_gate(layer, source_dim=33).head_outputs(x, source)
    torch.testing.assert_close(layer.head_outputs(x, source), plain * gates, rtol=1e-13, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str) -> None:
    layer = gated(kind)
    x = tokens(5).requires_grad_()
    parameters = tuple(layer.parameters())
    inputs = (x, *parameters)
    assert torch.autograd.gradcheck(lambda *_: layer(x), inputs, fast_mode=True)


# ---- as a description --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_its_weights_come_back_from_layouts(kind: str) -> None:
    layer, x = gated(kind, gate_bias=kind == "head"), tokens()
    assert layer.spec.output_gate == kind
    assert options_of_spec(layer.spec)["output_gate"] == kind
    assert f"output_gate={kind}" in repr(layer)
    for name in ("headwise", "canonical"):
        again = Attention.from_layout(
            layer.to_layout(name), layout=name, num_heads=HEADS, scale=None
        )
        assert again.output_gate == kind
        assert torch.equal(again(x), layer(x))
    assert without_gate(layer).spec.output_gate is ABSENT


@torch.no_grad()
def test_a_layout_without_gates_does_not_take_one() -> None:
    layer = gated("channel", value_dim=HEAD_DIM)
    with pytest.raises(OptionError, match="output_gate: channel against none"):
        layer.to_layout("llama")
    with pytest.raises(HeadwiseError, match="bg, wg, which llama has no tensor for"):
        layer.to_layout("llama", accept=["output_gate", "rotary"])


@pytest.mark.usefixtures("shapes_unchecked")
def test_gates_of_another_width_are_refused_with_both_numbers() -> None:
    state = gated("head").to_layout("headwise")
    words = f"output_gate='channel', and weights with 1 gates.*\n.*{VALUE_DIM} for each head"
    options: dict[str, Any] = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "scale": None}
    with pytest.raises(ShapeError, match=words):
        Attention.from_layout(state, layout="headwise", **options, output_gate="channel")


def test_kinds() -> None:
    with pytest.raises(OptionError) as error:
        Attention(EMBED, HEADS, head_dim=7, output_gate="heads")  # type: ignore[arg-type]
    assert "output_gate='heads'" in str(error.value)
    assert Attention(EMBED, HEADS, head_dim=7, gate_bias=False).gate_proj is None


# ---- compared ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", others_slow(KINDS))
def test_compare_names_a_missing_gate_on_either_side(kind: str) -> None:
    layer = gated(kind)
    plain = without_gate(layer)
    for pair in ((plain, layer), (layer, plain)):
        diagnosis = headwise.compare(*pair)
        assert diagnosis.function is not None
        assert [each.name for each in diagnosis.function.causes] == ["output gate missing"]
        assert [each.stage for each in diagnosis.function.parted] == ["head outputs"]
    assert headwise.compare(layer, layer)


@pytest.mark.slow
def test_compare_does_not_name_it_for_another_gate() -> None:
    """The same layer with gates of other heads."""
    right = gated("head")
    wrong = gated("head")
    with torch.no_grad():
        for parameter in wrong.gate_proj.parameters():
            parameter.copy_(parameter.roll(1, 0))
    diagnosis = headwise.compare(wrong, right)
    assert not diagnosis
    assert diagnosis.function is not None
    assert not diagnosis.function.causes
    assert [each.stage for each in diagnosis.function.parted] == ["head outputs"]
