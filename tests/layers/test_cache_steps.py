"""Token by token with a cache is the full forward pass, whatever the layer's options."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from headwise import Attention, Mask, Rotary
from headwise.errors import MaskError, OptionError
from headwise.layers.distance import Alibi, T5Bias
from headwise.layers.norm import QKNorm
from tests.layers.test_options import bound

EMBED, HEADS, BATCH, LENGTH = 40, 6, 3, 24
CAUSAL = Mask.causal()
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped rotary": {"num_kv_heads": 2, "rotary": Rotary(), "qk_norm": QKNorm()},
    "one kv head, widths": {"num_kv_heads": 1, "value_dim": 7, "out_dim": 17, "softcap": 5.0},
    "interleaved, after": {
        "rotary": Rotary(pairing="interleaved"),
        "qk_norm": QKNorm(place="after"),
    },
    "alibi, sink": {"score_bias": Alibi(), "sink": True},
    "t5": {"score_bias": T5Bias(buckets=8, max_distance=9, bidirectional=False), "scale": 1.0},
    "window": {"window": (5, 0), "num_kv_heads": 3, "rotary": Rotary(width=4)},
    "window, alibi, sink": {"window": (4, 0), "score_bias": Alibi(bias_max=4.0), "sink": True},
}


def made(options: dict[str, Any]) -> tuple[Attention, Tensor]:
    torch.manual_seed(1)
    layer = Attention(EMBED, HEADS, head_dim=10, **options, dtype=torch.float64).requires_grad_(
        False
    )
    for parameter in layer.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return layer, torch.randn(BATCH, LENGTH, EMBED, dtype=torch.float64)


def assert_same(layer: Attention, found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    # A token's place in the buffers is not its place in the text: the angles are rounded anew.
    assert (found - expected).abs().max() <= LENGTH * bound(layer, expected, torch.float64)


@pytest.mark.parametrize("steps", [(24,), (1,) * 24, (9, 1, 1, 6, 1, 6), (2, 22)], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps_are_the_full_forward(options: dict[str, Any], steps: tuple[int, ...]) -> None:
    layer, x = made(options)
    cache = layer.cache(batch=BATCH, length=LENGTH)
    parts = [layer(part, mask=CAUSAL, cache=cache) for part in x.split(steps, dim=1)]
    assert_same(layer, torch.cat(parts, dim=1), layer(x, mask=CAUSAL))
    assert cache.seen == LENGTH


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_sequences_of_unequal_lengths_are_each_their_own(options: dict[str, Any]) -> None:
    layer, x = made(options)
    cache = layer.cache(batch=BATCH, length=30)
    given = [(10, [5, 10, 7]), (1, None), (3, [2, 0, 3]), (2, None), (4, [4, 4, 1])]
    texts: list[list[Tensor]] = [[] for _ in range(BATCH)]
    outputs: list[list[Tensor]] = [[] for _ in range(BATCH)]
    at = 0
    for count, lengths in given:
        new, at = x[:, at : at + count], at + count
        mask = CAUSAL
        if lengths is not None:
            real = torch.tensor(lengths)
            mask = CAUSAL & Mask.lengths(queries=real, keys=real)
        out = layer(new, mask=mask, cache=cache)
        for row in range(BATCH):
            n = count if lengths is None else lengths[row]
            texts[row].append(new[row, :n])
            outputs[row].append(out[row, :n])
            # What was given up has no head outputs: the bias is all that is left.
            assert torch.equal(out[row, n:], layer.out_proj.bias.expand(count - n, -1))
    for text, found in zip(texts, outputs, strict=True):
        assert_same(layer, torch.cat(found), layer(torch.cat(text)[None], mask=CAUSAL)[0])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_left_padded_sequences_are_each_their_own(options: dict[str, Any]) -> None:
    """As transformers pads for generation: once without a cache, then with one and more steps."""
    layer, x = made(options)
    lengths, first = torch.tensor([5, 10, 1]), 10
    starts = first - lengths
    for told in (
        Mask.lengths(queries=lengths, keys=lengths, side="left"),
        Mask.starts(queries=starts, keys=starts),
    ):
        cache = layer.cache(batch=BATCH, length=30)
        prompt = layer(x[:, :first], mask=CAUSAL & told, cache=cache)
        steps = [layer(x[:, i : i + 1], mask=CAUSAL, cache=cache) for i in range(first, LENGTH)]
        found = torch.cat([prompt, *steps], dim=1)
        whole = layer(x[:, :first], mask=CAUSAL & told)
        for row, start in enumerate(starts.tolist()):
            alone = layer(x[row : row + 1, start:], mask=CAUSAL)[0]
            assert_same(layer, found[row, start:], alone)
            assert_same(layer, whole[row, start:], alone[: first - start])
            padding = layer.out_proj.bias.expand(start, -1)
            assert torch.equal(found[row, :start], padding)
            assert torch.equal(whole[row, :start], padding)


def test_left_padding_and_a_window_that_drops_tokens() -> None:
    layer, _ = made(OPTIONS["window"])
    x, starts = torch.randn(BATCH, 60, EMBED, dtype=torch.float64), torch.tensor([4, 0, 9])
    cache = layer.cache(batch=BATCH, length=1000)
    prompt = layer(x[:, :12], mask=Mask.starts(queries=starts, keys=starts), cache=cache)
    found = torch.cat(
        [prompt, *(layer(x[:, i : i + 4], cache=cache) for i in range(12, 60, 4))], dim=1
    )
    for row, start in enumerate(starts.tolist()):
        assert_same(layer, found[row, start:], layer(x[row : row + 1, start:])[0])
    assert cache.dropped > 0
    for mask in (Mask.prefix(3), Mask.where(lambda batch, head, query, key: key <= query)):
        with pytest.raises(MaskError, match="has dropped tokens"):
            layer(x[:, :1], mask=mask, cache=cache)


def test_lengths_of_two_kinds_with_a_cache_are_refused() -> None:
    layer, x = made(OPTIONS["plain"])
    n = torch.tensor([5, 10, 7])
    for mask in (
        Mask.lengths(queries=n) & Mask.lengths(keys=n, side="left"),
        Mask.lengths(queries=n, keys=n) & Mask.starts(keys=10 - n),
        Mask.starts(keys=n),
    ):
        with pytest.raises(MaskError, match="with the same lengths"):
            layer(x[:, :10], mask=mask, cache=layer.cache(batch=BATCH, length=30))


def test_a_window_lets_any_number_of_tokens_pass() -> None:
    layer, _ = made(OPTIONS["window"])
    x = torch.randn(1, 300, EMBED, dtype=torch.float64)
    cache = layer.cache(batch=1, length=10_000)
    parts = [layer(part, cache=cache) for part in x.split([3, 40, *[1] * 257], dim=1)]
    assert_same(layer, torch.cat(parts, dim=1), layer(x))
    assert cache._k.shape[2] == 11
    assert cache.seen == 300


def test_a_window_wider_than_the_cache_drops_nothing() -> None:
    layer, x = made({"window": (16, 0)})
    cache = layer.cache(batch=BATCH, length=12)
    parts = [layer(x[:, i : i + 1], cache=cache) for i in range(12)]
    assert_same(layer, torch.cat(parts, dim=1), layer(x[:, :12]))
    with pytest.raises(OptionError, match="1 more tokens for a cache that holds 12 of 12"):
        layer(x[:, 12:13], cache=cache)
    longer = layer.cache(batch=BATCH, length=17)
    parts = [layer(x[:, i : i + 1], cache=longer) for i in range(LENGTH)]
    assert_same(layer, torch.cat(parts, dim=1), layer(x))


def test_beams_are_chosen_by_select() -> None:
    layer, x = made(OPTIONS["grouped rotary"])
    cache = layer.cache(batch=BATCH, length=LENGTH)
    layer(x[:, :9], mask=CAUSAL, cache=cache)
    beams = torch.tensor([2, 0, 0, 1])
    chosen = cache.select(beams)
    new = torch.randn(4, 2, EMBED, dtype=torch.float64)
    found = layer(new, mask=CAUSAL, cache=chosen)
    whole = layer(torch.cat([x[beams, :9], new], dim=1), mask=CAUSAL)
    assert_same(layer, found, whole[:, 9:])
    assert cache.seen == 9


def test_a_mask_over_the_caches_keys() -> None:
    """Without lengths a mask names the slots: here the second token is hidden from all."""
    layer, x = made(OPTIONS["plain"])
    cache = layer.cache(batch=BATCH, length=LENGTH)
    layer(x[:, :9], mask=CAUSAL, cache=cache)
    hidden = torch.arange(12) == 1
    mask = CAUSAL & Mask.may_attend(~hidden, axes="keys")
    found = layer(x[:, 9:12], mask=mask, cache=cache)
    assert_same(layer, found, layer(x[:, :12], mask=mask)[:, 9:])


def test_a_mask_that_hid_padding_is_needed_in_every_call() -> None:
    """The cache stores lengths, and no boolean mask: without one a step would attend to padding."""
    layer, x = made(OPTIONS["plain"])
    real = torch.ones(BATCH, 11, dtype=torch.bool)
    real[1, :4] = False
    cache = layer.cache(batch=BATCH, length=LENGTH)
    mask = CAUSAL & Mask.may_attend(real[:, :9], axes="batch keys")
    layer(x[:, :9], mask=mask, cache=cache)
    for step in (cache, cache.select(torch.tensor([1, 0]))):
        with pytest.raises(MaskError, match=r"a boolean mask over all 10 keys"):
            layer(x[: step._k.shape[0], 9:10], mask=CAUSAL, cache=step)
    assert cache.seen == 9
    mask = CAUSAL & Mask.may_attend(real, axes="batch keys")
    found = layer(x[:, 9:11], mask=mask, cache=cache)
    assert_same(layer, found, layer(x[:, :11], mask=mask)[:, 9:])
    cache.clear()
    layer(x[:, :9], mask=CAUSAL & Mask.may_attend(real[0, :9], axes="keys"), cache=cache)
    layer(x[:, 9:10], mask=CAUSAL, cache=cache)  # nothing was hidden


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cache_has_the_dtype_of_its_layer(dtype: torch.dtype) -> None:
    layer, x = made(OPTIONS["grouped rotary"])
    layer, x = layer.to(dtype), x.to(dtype)
    cache = layer.cache(batch=BATCH, length=LENGTH)
    found = torch.cat([layer(t, mask=CAUSAL, cache=cache) for t in x.split(8, dim=1)], dim=1)
    assert found.dtype == dtype
    expected = layer.double()(x.double(), mask=CAUSAL)
    assert (found - expected).abs().max() <= bound(layer, expected, dtype)


@pytest.mark.parametrize("length", [LENGTH, 8], ids=["whole", "full"])
@pytest.mark.parametrize("options", [{}, {"window": (5, 0)}, {"window": (1, 0)}], ids=str)
@pytest.mark.parametrize("lengths", [None, torch.tensor([1, 3, 4])], ids=["equal", "unequal"])
def test_a_call_that_failed_can_be_repeated(
    options: dict[str, Any], length: int, lengths: Tensor | None
) -> None:
    """Whatever fails once the keys are computed, the cache holds the tokens of the calls before."""
    layer, x = made({"rotary": Rotary(), **options})
    mask = CAUSAL if lengths is None else CAUSAL & Mask.lengths(queries=lengths, keys=lengths)
    parts = x[:, :9].split((4, 4, 1), dim=1)[: 2 if length == 8 and not options else 3]
    masks = (mask, mask, CAUSAL)
    undisturbed, cache = (layer.cache(batch=BATCH, length=length) for _ in range(2))
    for part, own in zip(parts, masks, strict=False):
        expected = layer(part, mask=own, cache=undisturbed)
        failing = layer.out_proj.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            layer(part, mask=own, cache=cache)
        failing.remove()
        assert torch.equal(layer(part, mask=own, cache=cache), expected)


def fail(*_: object) -> None:
    raise RuntimeError("out of memory")


def test_a_function_that_raises_leaves_the_cache_as_it_was() -> None:
    layer, x = made({})
    cache = layer.cache(batch=BATCH, length=LENGTH)
    layer(x[:, :9], mask=CAUSAL, cache=cache)
    with pytest.raises(MaskError, match="bool tensor"):
        layer(x[:, 9:], mask=Mask.where(lambda b, h, q, k: q - k), cache=cache)
    assert cache.seen == 9
    found = layer(x[:, 9:], mask=Mask.where(lambda b, h, q, k: k <= q), cache=cache)
    assert_same(layer, found, layer(x, mask=CAUSAL)[:, 9:])


def test_a_function_keeps_the_alignment_that_was_named() -> None:
    layer, x = made({})
    cache = layer.cache(batch=BATCH, length=LENGTH)
    layer(x[:, :9], mask=CAUSAL, cache=cache)
    mask = Mask.where(lambda b, h, q, k: k <= q).aligned("top-left")
    assert mask.aligned("bottom-right").draw(2, 4) == "1 0 0 0\n1 1 0 0"
    with pytest.raises(MaskError, match='align="top-left" with a cache that holds 9 tokens'):
        layer(x[:, 9:], mask=mask, cache=cache)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("window", [None, (3, 0)])
def test_nan_in_padding_stays_out_of_a_cache(
    side: Literal["left", "right"], window: tuple[int, int] | None
) -> None:
    layer = Attention(16, 2, rotary=Rotary(), window=window).eval()
    x, lengths = torch.randn(3, 5, 16), torch.tensor([5, 3, 0])
    place = torch.arange(5) if side == "right" else torch.arange(5).flip(0)
    padding = (place >= lengths[:, None])[..., None]
    mask = Mask.lengths(queries=lengths, keys=lengths, side=side) & CAUSAL
    outputs = []
    for filling in (0.0, torch.nan):
        cache = layer.cache(batch=3, length=9)
        filled = torch.cat([x.masked_fill(padding, filling), x.flip(0)[:, :2]], 1)
        with torch.no_grad():
            first = layer(filled[:, :5], mask=mask, cache=cache)
            steps = [layer(each, mask=CAUSAL, cache=cache) for each in filled[:, 5:].split(1, 1)]
        outputs.append(torch.cat([first, *steps], 1))
    assert torch.equal(*outputs)
