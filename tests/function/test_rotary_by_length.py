"""Rotations that change with the length of a sequence, and those in which some pairs stay."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import Attention, Mask, Rotary
from headwise.errors import OptionError
from headwise.function import DynamicScaling, LongScaling, NTKScaling, ProportionalScaling
from headwise.function.rotary import frequencies_of_rule

BATCH, HEADS, LENGTH, EMBED, WIDTH = 3, 6, 24, 40, 8
SHORT, LONG = (1.0, 1.1, 1.3, 1.2), (2.0, 3.0, 4.0, 6.0)
SCALINGS = [LongScaling(SHORT, LONG, 16, 4.0), DynamicScaling(4.0, 16)]


def printed(values: Tensor) -> list[float]:
    return [round(float(x), 9) for x in values]


def test_dynamic_frequencies() -> None:
    rule = Rotary(width=8, scaling=DynamicScaling(4.0, 16)).rule
    found = frequencies_of_rule(rule, torch.tensor([40, 16, 9]))
    expected = torch.tensor([1.0, 0.052275795, 0.002732759, 0.000142857]).double()
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-9)
    assert torch.equal(found[1], found[2])
    assert printed(found[1]) == [1.0, 0.1, 0.01, 0.001]
    at_one_length = NTKScaling(4.0 * 40 / 16 - 3.0)
    same = frequencies_of_rule(Rotary(width=8, scaling=at_one_length).rule)
    torch.testing.assert_close(found[0], same, rtol=1e-14, atol=0)


def test_long_factors_begin_beyond_the_border() -> None:
    scaling = LongScaling(SHORT, LONG, 4096, 32.0)
    assert round(scaling.amplitude, 9) == 1.190238071
    plain = Rotary(width=8).frequencies(8)
    found = Rotary(width=8, scaling=scaling).frequencies(8, length=torch.tensor([4096, 4097]))
    for row, factors in zip(found, (SHORT, LONG), strict=True):
        torch.testing.assert_close(row * torch.tensor(factors), plain, rtol=1e-6, atol=0)
    assert torch.equal(found[0], Rotary(width=8, scaling=scaling).frequencies(8))
    assert LongScaling(SHORT, LONG, 4096, 0.5).amplitude == 1.0


def test_proportional_frequencies() -> None:
    found = Rotary(scaling=ProportionalScaling(0.5)).frequencies(16)
    assert [round(x, 4) for x in found.tolist()] == [1.0, 0.3162, 0.1, 0.0316, 0, 0, 0, 0]
    x = torch.randn(2, 3, 5, 16)
    turned = Rotary(scaling=ProportionalScaling(0.5)).rotate(x, torch.arange(5))
    narrow = Rotary(width=8, exponent_width=16, span=8).rotate(x, torch.arange(5))
    torch.testing.assert_close(turned, narrow, rtol=0, atol=1e-6)
    assert torch.equal(turned[..., 4:8], x[..., 4:8])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LongScaling(SHORT, LONG[:3], 16, 4.0), "4 short_factors and 3 long_factors"),
        (lambda: LongScaling(SHORT, LONG, 16, 0.0), "factor=0.0"),
        (lambda: DynamicScaling(4.0, 0), "original_length=0"),
        (lambda: ProportionalScaling(1.5), "share=1.5"),
        (lambda: Rotary(width=6, scaling=SCALINGS[0]).frequencies(8), "4 factors of a rotary"),
    ],
)
def test_what_is_refused(make: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        make()


# ---- layers ------------------------------------------------------------------------------------


def layer(scaling: Any, width: int = EMBED, heads: int = HEADS) -> Attention:
    torch.manual_seed(0)
    rotary = Rotary(500.0, WIDTH, scaling=scaling)
    made = Attention(width, heads, head_dim=10, rotary=rotary, dtype=torch.float64)
    return made.requires_grad_(False)


def tokens(length: int = LENGTH, width: int = EMBED) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, length, width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_all_tokens_of_a_long_sequence_turn_by_its_frequencies(scaling: Any) -> None:
    made, x = layer(scaling), tokens()
    for length in (16, 17, 24):
        rule = made.rotary.rule
        frequencies = frequencies_of_rule(rule, torch.tensor(length))
        angles = torch.arange(length)[:, None] * frequencies
        q = made.q_proj(x[:, :length]).unflatten(-1, (HEADS, 10)).transpose(1, 2)
        first, second = q[..., :4], q[..., 4:8]
        expected = rule.amplitude * (first * angles.cos() - second * angles.sin())
        found = made.matrix(x[:, :length]).q[..., :4]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("width", [EMBED, 256], ids=["padded", "packed"])
def test_a_sequence_is_the_same_alone_and_in_a_batch(scaling: Any, side: Any, width: int) -> None:
    made, x, lengths = layer(scaling, width, 8), tokens(96, width), torch.tensor([96, 13, 17])
    mask = Mask.lengths(queries=lengths, keys=lengths, side=side) & Mask.causal()
    assert ("padding is skipped" in str(made.explain(x, mask=mask))) == (width == 256)
    for cache in (None, made.cache(batch=BATCH, length=96)):
        found = made(x, mask=mask, cache=cache)
        for row, n in enumerate(lengths.tolist()):
            real = slice(96 - n, 96) if side == "left" else slice(0, n)
            alone = made(x[row : row + 1, real], mask=Mask.causal())
            torch.testing.assert_close(found[row : row + 1, real], alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_cache_refuses_the_step_by_which_frequencies_change(scaling: Any) -> None:
    made, x = layer(scaling), tokens()
    cache = made.cache(batch=BATCH, length=LENGTH)
    whole = made(x[:, :16], mask=Mask.causal())
    steps = [made(x[:, part], mask=Mask.causal(), cache=cache) for part in (slice(15), [15])]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-12, atol=1e-14)
    with pytest.raises(OptionError, match=r"rotated for 16 tokens, and a sequence of 17: \w+ ch"):
        made(x[:, 16:17], mask=Mask.causal(), cache=cache)
    assert cache.length == 16
    cache.clear()
    made(x[:, :17], mask=Mask.causal(), cache=cache)
    if isinstance(scaling, DynamicScaling):
        with pytest.raises(OptionError, match="rotated for 17 tokens, and a sequence of 18"):
            made(x[:, 17:18], cache=cache)
        return
    last = made(x[:, 17:18], mask=Mask.causal(), cache=cache)
    usual = made(x[:, :18], mask=Mask.causal())[:, 17:]
    torch.testing.assert_close(last, usual, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_report_on_a_call_says_the_border(scaling: Any) -> None:
    words = "for sequences of more than 16 tokens, and the longest has 24"
    assert words in str(layer(scaling).explain(tokens()))


def test_the_amplitude_is_that_of_the_paper() -> None:
    expected = math.sqrt(1 + math.log(4.0) / math.log(16))
    assert layer(SCALINGS[0]).rotary.amplitude == expected
