"""What contradicts itself is refused, with both values, at construction where that is possible."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from headwise import Attention, HeadwiseError, Mask, Rotary, ScoreBias
from headwise.errors import DeviceError, DTypeError, MaskError, OptionError, ShapeError
from headwise.layers.cache import Cache
from headwise.layers.distance import Alibi
from headwise.layers.norm import QKNorm
from tests.refusals import refusals

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

CONSTRUCTIONS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"embed_dim": 500, "num_heads": 7}, ("embed_dim=500", "num_heads=7", "head_dim=71")),
    ({"num_kv_heads": 4}, ("num_heads=6", "num_kv_heads=4", "1, 2, 3, 6")),
    ({"num_kv_heads": 0}, ("num_kv_heads=0",)),
    ({"num_heads": 0}, ("num_heads=0",)),
    ({"head_dim": 0}, ("head_dim=0",)),
    ({"value_dim": -3}, ("value_dim=-3",)),
    ({"out_dim": 0}, ("out_dim=0",)),
    ({"head_dim": 7, "rotary": Rotary()}, ("width of 7", "head_dim of 7")),
    ({"head_dim": 8, "rotary": Rotary(width=10)}, ("width of 10", "head_dim of 8")),
    ({"source_dim": 33, "window": (5, 0)}, ("window=(5, 0)", "source_dim=33")),
    ({"source_dim": 33, "rotary": Rotary()}, ("rotary=Rotary", "source_dim=33")),
    ({"source_dim": 33, "score_bias": Alibi()}, ("score_bias=Alibi", "source_dim=33")),
    ({"window": (-1, 0)}, ("left=-1",)),
    ({"softcap": 0.0}, ("softcap=0.0",)),
    ({"softcap": 1e39}, ("softcap=1e+39", "torch.float32")),
    ({"scale": 1e39, "dtype": torch.bfloat16}, ("scale=1e+39", "torch.bfloat16")),
    ({"scale": float("nan")}, ("scale=nan",)),
    ({"dropout": 1.5}, ("1.5",)),
    ({"window": 4}, ("window=4", "(W - 1, 0)")),
    ({"window": Mask.window(4, 0)}, ("window=Mask(", "(left, right)")),
    ({"rotary": True}, ("rotary=True", "a Rotary")),
    ({"qk_norm": "rms"}, ("qk_norm='rms'", "a QKNorm")),
    ({"score_bias": ScoreBias()}, ("score_bias=ScoreBias(zero)", "argument of the call")),
    ({"score_bias": Alibi}, ("Alibi", "score_bias=Alibi()")),
    ({"num_kv_heads": 2.0}, ("num_kv_heads=2.0", "whole number")),
    ({"init": "kaiming"}, ("init='kaiming'", "torch-packed")),
]


test_a_construction_is_refused = refusals(
    {
        str(options): (partial(Attention, **{"embed_dim": 42, "num_heads": 6, **options}), words)
        for options, words in CONSTRUCTIONS
    },
    kind=OptionError,
)


def test_embed_dim_500_with_7_heads_of_48_works() -> None:
    layer = Attention(500, 7, head_dim=48)
    assert layer(torch.randn(2, 5, 500)).shape == (2, 5, 500)


LAYER = Attention(42, 6, num_kv_heads=2)
OTHER = Attention(42, 6, num_kv_heads=2)
ACROSS = Attention(42, 6, source_dim=33)
PLACED = Attention(42, 6, head_dim=8, rotary=Rotary(), qk_norm=QKNorm())
X = torch.randn(3, 24, 42)
LENGTHS = torch.tensor([24, 5, 0])
Call = Callable[[], object]


def fresh() -> Cache:
    return LAYER.cache(batch=3, length=24)


CALLS: dict[str, tuple[Call, type[HeadwiseError], tuple[str, ...]]] = {
    "unbatched": (lambda: LAYER(X[0]), ShapeError, ("x of shape (24, 42)", "embed_dim 42")),
    "width": (lambda: LAYER(X[..., :40]), ShapeError, ("(3, 24, 40)", "embed_dim 42")),
    "dtype": (lambda: LAYER(X.double()), DTypeError, ("torch.float64", "torch.float32")),
    "integers": (lambda: LAYER(X.long()), DTypeError, ("torch.int64",)),
    "device": (lambda: LAYER(X.to("meta")), DeviceError, ("meta", "cpu")),
    "source width": (lambda: ACROSS(X, X), ShapeError, ("(3, 24, 42)", "source_dim 33")),
    "no source": (lambda: ACROSS(X), OptionError, ("source_dim=33", "embed_dim=42")),
    "source batch": (
        lambda: ACROSS(X, torch.randn(2, 29, 33)),
        ShapeError,
        ("batch 3", "batch 2"),
    ),
    "rotary and source": (
        lambda: PLACED(X, torch.randn(3, 29, 42)),
        OptionError,
        ("rotary=Rotary", "a source"),
    ),
    "bare mask": (
        lambda: LAYER(X, mask=torch.ones(24, 24, dtype=torch.bool)),
        MaskError,
        ("True = may attend", "True = blocked"),
    ),
    "mask of other sizes": (
        lambda: LAYER(X, mask=Mask.may_attend(torch.ones(23, dtype=torch.bool), axes="keys")),
        MaskError,
        ("23", "keys 24"),
    ),
    "bias of other sizes": (
        lambda: LAYER(
            X, score_bias=ScoreBias.dense(torch.zeros(5, 24, 24), axes="heads queries keys")
        ),
        MaskError,
        ("heads 5", "heads 6"),
    ),
    "lengths": (
        lambda: LAYER(X, mask=Mask.lengths(keys=torch.tensor([24, 25, 3]))),
        MaskError,
        ("25", "24 keys"),
    ),
    "rotary and x as source": (lambda: PLACED(X, X), OptionError, ("rotary=Rotary", "a source")),
    "mask in the place of source": (
        lambda: LAYER(X, Mask.causal()),
        ShapeError,
        ("source=Mask(causal)", "mask=..."),
    ),
    "gate that is no tensor": (lambda: LAYER(X, gate=[1] * 6), DeviceError, ("list",)),
    "gate": (lambda: LAYER(X, gate=torch.ones(5)), ShapeError, ("(5,)", "heads 6")),
    "gate of sequences": (
        lambda: LAYER(X, gate=torch.ones(2, 6)),
        ShapeError,
        ("(2, 6)", "batch 3"),
    ),
    "cache of another layer": (
        lambda: LAYER(X, cache=OTHER.cache(batch=3, length=24)),
        OptionError,
        ("this layer did not make", "0 of 24 slots"),
    ),
    "cache of another dtype": (
        lambda: LAYER(X, cache=LAYER.cache(batch=3, length=24, dtype=torch.bfloat16)),
        DTypeError,
        ("torch.float32", "torch.bfloat16"),
    ),
    "cache of another batch": (
        lambda: LAYER(X, cache=LAYER.cache(batch=2, length=24)),
        ShapeError,
        ("(3, 2, 24, 7)", "batch 2"),
    ),
    "cache too short": (
        lambda: LAYER(X, cache=LAYER.cache(batch=3, length=23)),
        OptionError,
        ("24 more tokens", "0 of 23", "length=24"),
    ),
    "no cache": (lambda: LAYER(X, cache={}), OptionError, ("cache={}",)),
    "cache and source": (
        lambda: LAYER(X, torch.randn(3, 29, 42), cache=LAYER.cache(batch=3, length=24)),
        OptionError,
        ("a cache and a source",),
    ),
    "cache and lengths of keys alone": (
        lambda: LAYER(X, mask=Mask.lengths(keys=LENGTHS), cache=fresh()),
        MaskError,
        ("lengths(keys)", "this call's tokens", "Mask.lengths(queries=n, keys=n)"),
    ),
    "cache and two lengths": (
        lambda: LAYER(X, mask=Mask.lengths(keys=LENGTHS, queries=LENGTHS // 2), cache=fresh()),
        MaskError,
        ("lengths(keys) & lengths(queries)", "with the same lengths"),
    ),
    "cache and lengths so far": (
        lambda: LAYER(X, mask=Mask.lengths(keys=LENGTHS + 24, queries=LENGTHS), cache=fresh()),
        MaskError,
        ("lengths up to 48", "24 new tokens", "Mask.causal() in later calls"),
    ),
    "cache and negative lengths": (
        lambda: LAYER(X, mask=Mask.lengths(keys=LENGTHS - 1, queries=LENGTHS), cache=fresh()),
        MaskError,
        ("between -1 and 23", "24 keys"),
    ),
    "cache and lengths of another batch": (
        lambda: LAYER(X, mask=Mask.lengths(keys=LENGTHS[:1], queries=LENGTHS[:1]), cache=fresh()),
        MaskError,
        ("(1,)", "batch 3"),
    ),
    "cache, lengths and places": (
        lambda: LAYER(
            X,
            mask=Mask.lengths(queries=LENGTHS, keys=LENGTHS)
            & Mask.may_attend(torch.ones(24).bool(), axes="keys"),
            cache=LAYER.cache(batch=3, length=24),
        ),
        MaskError,
        ("lengths(keys) & lengths(queries) & may_attend",),
    ),
    "cache sizes": (lambda: LAYER.cache(batch=0, length=24), OptionError, ("batch=0",)),
    "cache length": (lambda: LAYER.cache(batch=3, length=-1), OptionError, ("length=-1",)),
}


test_a_call_is_refused = refusals(CALLS)


def test_a_cache_needs_no_gradient() -> None:
    with pytest.raises(OptionError, match="no_grad"):
        LAYER(X, cache=LAYER.cache(batch=3, length=24))


@pytest.mark.parametrize("shape", [(0, 24, 42), (3, 0, 42)])
def test_empty_batches_and_lengths_are_no_error(shape: tuple[int, int, int]) -> None:
    assert LAYER(torch.randn(shape)).shape == shape


def test_an_all_masked_batch_gives_the_bias() -> None:
    out = LAYER(X, mask=Mask.lengths(keys=torch.zeros(3, dtype=torch.long)))
    assert torch.equal(out, LAYER.out_proj.bias.expand_as(out))


def test_a_refused_call_leaves_the_cache_as_it_was() -> None:
    layer = Attention(42, 6, window=(3, 0)).requires_grad_(False)
    cache = layer.cache(batch=3, length=24)
    layer(X[:, :5], cache=cache)
    before = copy.deepcopy(cache)
    wrong: list[dict[str, Any]] = [
        {"mask": Mask.may_attend(torch.ones(3, 9, dtype=torch.bool), axes="batch keys")},
        {"mask": Mask.causal(align="top-left")},
        {"score_bias": ScoreBias.dense(torch.zeros(9), axes="keys")},
        {"gate": torch.ones(5)},
        {"mask": Mask.lengths(keys=LENGTHS)},
    ]
    for options in wrong:
        with pytest.raises(HeadwiseError):
            layer(X[:, 5:8], cache=cache, **options)
        assert repr(cache) == repr(before)
    found, expected = (layer(X[:, 5:8], cache=c) for c in (cache, before))
    assert torch.equal(found, expected)


def test_a_step_cannot_be_aligned_at_the_top_left() -> None:
    layer = Attention(42, 6).requires_grad_(False)
    cache, mask = layer.cache(batch=3, length=24), Mask.causal(align="top-left")
    layer(X[:, :5], mask=mask, cache=cache)
    with pytest.raises(MaskError, match="a cache that holds 5 tokens"):
        layer(X[:, 5:6], mask=mask, cache=cache)


def test_a_copy_of_a_cache_is_for_the_same_layer_and_a_copied_layer_has_its_own() -> None:
    layer = Attention(42, 6).requires_grad_(False)
    cache = layer.cache(batch=3, length=24)
    layer(X[:, :5], mask=Mask.causal(), cache=cache)
    branch = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
    both = copy.deepcopy((layer, cache))
    steps = [
        own(X[:, 5:7], mask=Mask.causal(), cache=c)
        for own, c in ((layer, branch), both, (layer, cache))
    ]
    assert torch.equal(steps[0], steps[2])
    assert torch.equal(steps[1], steps[2])
    with pytest.raises(OptionError, match="did not make"):
        copy.deepcopy(layer)(X[:, 7:8], cache=cache)
