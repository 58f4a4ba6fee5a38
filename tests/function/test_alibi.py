"""ALiBi: slopes by both published rules, and the attention of the models that use them."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BloomConfig, MptConfig
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

from headwise import Attention
from headwise.errors import OptionError
from headwise.function.budget import Budget
from headwise.function.spec import AlibiRule
from headwise.layers.conversion import spec_of_layer
from headwise.layers.distance import Alibi, PositionBias, alibi_slopes
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from tests.honest import normal
from tests.refusals import refusals

EPS = torch.finfo(torch.float32).eps
COUNTS = (8, 6, 12, 7, 1, 2, 3, 5, 16, 40, 71)


def exponents(slopes: Tensor) -> list[float]:
    return [-math.log2(slope) for slope in slopes.tolist()]


def table(bias: ScoreBias, heads: int, queries: int = 24, keys: int = 29) -> Tensor:
    """(heads, distances) from 1 - queries to keys - 1."""
    cpu = torch.device("cpu")
    found = bias.bind(batch=1, heads=heads, queries=queries, keys=keys, device=cpu).table
    assert found is not None
    return found


# ---- slopes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_powers_of_two_by_hand(heads: int) -> None:
    expected = [8 * (head + 1) / heads for head in range(heads)]
    assert exponents(alibi_slopes(heads)) == expected


def test_other_counts_by_hand() -> None:
    # The slopes of 4 heads, then the first and third of 8; those of 2 heads, then the first of 4.
    assert exponents(alibi_slopes(6)) == [2, 4, 6, 8, 1, 3]
    assert exponents(alibi_slopes(3)) == [4, 8, 2]
    assert exponents(alibi_slopes(3, bias_max=4.0)) == [2, 4, 1]


@pytest.mark.parametrize("heads", COUNTS)
def test_slopes_of_bloom_and_falcon(heads: int) -> None:
    found = alibi_slopes(heads)
    assert found.dtype == torch.float32
    theirs = modeling_bloom._get_alibi_slopes(heads, torch.device("cpu"))
    # Theirs are powers of a base that was rounded: k roundings of the k-th, and one of the power.
    below = 2 ** math.floor(math.log2(heads))
    powers = torch.cat([torch.arange(1, below + 1), torch.arange(1, 2 * below, 2)])[:heads]
    assert ((found - theirs).abs() <= EPS / 2 * (powers + 2) * theirs).all()
    if heads <= 8:  # whole exponents: exact
        assert torch.equal(found, theirs)
    mask = torch.ones(1, 2)
    falcon = modeling_falcon.build_alibi_tensor(mask, heads, torch.float32)
    assert torch.equal(found.bfloat16(), falcon[:, 0, 1].bfloat16())


@pytest.mark.parametrize("bias_max", [8.0, 4.0])
@pytest.mark.parametrize("heads", COUNTS)
def test_slopes_of_mpt(heads: int, bias_max: float) -> None:
    found = alibi_slopes(heads, bias_max=bias_max)
    theirs = -modeling_mpt.build_mpt_alibi_tensor(heads, 2, bias_max)[:, 0, 0]
    # Theirs: an exponent rounded, magnified by log 2 * bias_max; a power and its reciprocal.
    bound = EPS / 2 * (math.log(2) * bias_max + 4) * theirs
    assert ((found - theirs).abs() <= bound).all()
    if heads <= 4:
        assert torch.equal(found, theirs)


# ---- the module --------------------------------------------------------------------------------


@pytest.mark.parametrize("align", ["top-left", "bottom-right"])
def test_the_bias_is_slope_times_distance(align: Any) -> None:
    module = Alibi().module(6)
    offset = 5 if align == "bottom-right" else 0
    expected = -alibi_slopes(6)[:, None] * (torch.arange(-23, 29) - offset).abs()
    assert torch.equal(table(module(align=align), 6), expected)


def test_slopes_of_another_rule() -> None:
    module, slopes = Alibi(slopes=(0.3, 0.0)).module(2), torch.tensor([0.3, 0.0])
    expected = -slopes[:, None] * torch.arange(-23, 29).abs()
    assert torch.equal(table(module(align="top-left"), 2), expected)
    rule = spec_of_layer(Attention(8, 2, score_bias=Alibi(slopes=(0.3, 0.0)))).score_bias
    assert rule == AlibiRule(slopes=(0.3, 0.0))
    assert module.double().numbers.tolist() == [0.3, 0.0]


def test_it_has_nothing_to_learn_or_save() -> None:
    module = Alibi().module(6)
    assert isinstance(Alibi(), PositionBias)
    assert not list(module.parameters())
    assert module.state_dict() == {}
    assert repr(module) == "AlibiSlopes(num_heads=6)"


CONVERSIONS: dict[str, tuple[Callable[[Any], Any], torch.dtype]] = {
    "half": (lambda m: m.half(), torch.float32),
    "bfloat16": (lambda m: m.bfloat16(), torch.float32),
    "to bfloat16": (lambda m: m.to(torch.bfloat16), torch.float32),
    "there and back": (lambda m: m.bfloat16().float(), torch.float32),
    "double": (lambda m: m.double(), torch.float64),
    "from nothing": (lambda m: m.to("meta").to_empty(device="cpu"), torch.float32),
    "a copy": (copy.deepcopy, torch.float32),
}


@pytest.mark.parametrize("heads", [6, 12])
@pytest.mark.parametrize("how", CONVERSIONS)
def test_conversions_leave_the_numbers(how: str, heads: int) -> None:
    convert, dtype = CONVERSIONS[how]
    numbers = convert(Alibi().module(heads)).numbers
    assert numbers.dtype == dtype
    assert torch.equal(numbers.float(), alibi_slopes(heads))


def test_made_in_a_dtype_and_on_a_device() -> None:
    assert Alibi().module(12, dtype=torch.bfloat16).numbers.dtype == torch.float32
    wide = Alibi().module(12, dtype=torch.float64).numbers
    assert torch.equal(wide, alibi_slopes(12).double())
    assert Alibi().module(12, device="meta").numbers.is_meta
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(Alibi().module(12).numbers, alibi_slopes(12))
    finally:
        torch.set_default_dtype(before)


# ---- whole models ------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [8, 6, 12, 7])
def test_the_weights_of_bloom(heads: int) -> None:
    batch, length, head_dim = 3, 24, 10
    config = BloomConfig(
        hidden_size=heads * head_dim, n_head=heads, attention_dropout=0.0, hidden_dropout=0.0
    )
    layer = modeling_bloom.BloomAttention(config, layer_idx=0).eval()
    x = normal(batch, length, heads * head_dim).float()
    alibi = modeling_bloom.build_alibi_tensor(torch.ones(batch, length), heads, torch.float32)
    causal = torch.full((length, length), -torch.inf).triu(1).expand(batch, 1, -1, -1)
    with torch.no_grad():
        _, theirs = layer(x, torch.zeros_like(x), alibi, causal, output_attentions=True)
        q, k, _ = layer.query_key_value(x).unflatten(-1, (heads, 3, head_dim)).unbind(3)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    bias = Alibi().module(heads)(align=None)
    budget = Budget.for_weights(q, k, mask=Mask.causal(), score_bias=bias)
    budget.assert_holds(theirs)
    other = Budget.for_weights(q, k, mask=Mask.causal())
    assert not other.check(theirs)


@pytest.mark.parametrize("heads", [8, 6, 12, 7])
def test_the_weights_of_mpt(heads: int) -> None:
    batch, length, head_dim = 3, 24, 10
    layer = modeling_mpt.MptAttention(MptConfig(d_model=heads * head_dim, n_heads=heads)).eval()
    x = normal(batch, length, heads * head_dim).float()
    alibi = modeling_mpt.build_mpt_alibi_tensor(heads, length)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        _, theirs = layer(x, alibi, attention_mask=hidden)
        q, k, _ = layer.Wqkv(x).chunk(3, dim=-1)
    q, k = (t.unflatten(-1, (heads, head_dim)).transpose(1, 2) for t in (q, k))
    bias = Alibi().module(heads)(align=None)
    budget = Budget.for_weights(q, k, mask=Mask.causal(), score_bias=bias)
    budget.assert_holds(theirs)
    other = Budget.for_weights(q, k, mask=Mask.causal())
    assert not other.check(theirs)


# ---- refusals ----------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "no heads": (lambda: alibi_slopes(0), ["0 heads", "at least one"]),
    "no heads of a module": (lambda: Alibi().module(0), ["0 heads"]),
    "bias_max 0": (lambda: Alibi(bias_max=0.0), ["bias_max=0.0"]),
    "too few slopes": (lambda: Alibi(slopes=(0.5,)).module(2), ["1 slopes for 2 heads", "each"]),
    "bias_max inf": (lambda: alibi_slopes(6, bias_max=math.inf), ["bias_max=inf"]),
}


test_what_cannot_be_meant_is_refused_with_its_numbers = refusals(REFUSED, kind=OptionError)
