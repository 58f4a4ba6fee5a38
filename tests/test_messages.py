"""A message shows a value in a few words, however large it is, and its advice works."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import (
    Attention,
    AttentionMatrix,
    HeadwiseError,
    Layout,
    Mask,
    MultiheadAttention,
    Rotary,
    ScoreBias,
)
from headwise.function.scaling import LinearScaling
from headwise.layers.distance import Alibi, T5Bias
from headwise.layers.norm import QKNorm
from headwise.support.text import LONGEST_VALUE, describe_value

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

LAYER = Attention(42, 6)
DROP_IN = MultiheadAttention(42, 6, batch_first=True)
X = torch.randn(3, 24, 42)
Q = torch.randn(3, 6, 24, 7)

HUGE: dict[str, Any] = {
    "list": [[0.1] * 64] * 2000,
    "tensors": [torch.zeros(9)] * 3000,
    "string": "word " * 10_000,
    "tensor": torch.zeros(300, 300),
    "dict": {str(i): i for i in range(3000)},
    "number": 1 << 60_000,
}


@pytest.mark.parametrize("name", HUGE)
def test_a_huge_value_is_described_in_a_few_words(name: str) -> None:
    assert len(describe_value(HUGE[name])) <= LONGEST_VALUE


def test_a_small_value_is_shown_as_it_is() -> None:
    for value in (None, 3, 0.5, "rms", (4, None), [1, 2], {"a": 1}, Rotary(), Alibi, True):
        assert describe_value(value) == repr(value)
    assert describe_value(torch.zeros(2, 3)) == "a torch.float32 tensor of shape (2, 3)"
    assert describe_value(torch.zeros(2, 3).numpy()) == (
        "an array of type ndarray, dtype float32 and shape (2, 3)"
    )
    assert describe_value([torch.zeros(2)]) == "a list of length 1"
    assert describe_value(nn.Linear(2, 3)) == "a module of type Linear"


SIZES = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "value_dim", "out_dim", "source_dim")
OPTIONS = (
    "rotary",
    "score_bias",
    "qk_norm",
    "window",
    "scale",
    "softcap",
    "dropout",
    "init",
    "bias",
)

CALLS: dict[str, Callable[[Any], object]] = {
    **{
        f"Attention({name})": lambda value, name=name: Attention(
            **{"embed_dim": 42, "num_heads": 6, name: value}
        )
        for name in (*SIZES, *OPTIONS)
    },
    **{
        f"layer({name})": lambda value, name=name: LAYER(X, **{name: value})
        for name in ("source", "mask", "score_bias", "gate", "cache", "attn_mask")
    },
    **{
        f"AttentionMatrix({name})": lambda value, name=name: AttentionMatrix(Q, Q, **{name: value})
        for name in ("mask", "score_bias", "scale", "softcap", "is_causal")
    },
    **{
        f"drop-in({name})": lambda value, name=name: DROP_IN(X, X, X, **{name: value})
        for name in ("key_padding_mask", "attn_mask")
    },
    "layer(x)": lambda value: LAYER(value),
    "A.rows": lambda value: AttentionMatrix(Q, Q).rows(value),
    "Mask.window": lambda value: Mask.window(value, 0),
    "Mask.causal": lambda value: Mask.causal(align=value),
    "Mask.lengths": lambda value: Mask.lengths(keys=value),
    "Mask &": lambda value: Mask.causal() & value,
    "axes": lambda value: Mask.may_attend(torch.ones(3, dtype=torch.bool), axes=value),
    "alibi": lambda value: ScoreBias.alibi(torch.ones(6), align=value),
    "theta": lambda value: Rotary(theta=value),
    "width": lambda value: Rotary(width=value),
    "pairing": lambda value: Rotary(pairing=value),
    "scaling": lambda value: Rotary(scaling=value),
    "factor": lambda value: LinearScaling(value),
    "bias_max": lambda value: Alibi(bias_max=value),
    "buckets": lambda value: T5Bias(buckets=value),
    "norm": lambda value: QKNorm(kind=value),
    "eps": lambda value: QKNorm(eps=value),
    "layout": lambda value: Attention.from_layout({}, layout=value, num_heads=6),
    "pattern": lambda value: Layout(name="x", patterns={"w": value}),
}


def refuse(call: Callable[[Any], object], value: object) -> None:
    call(value)
    raise ValueError("taken as it is")


REFUSALS = (HeadwiseError, AttributeError, OverflowError, RuntimeError, TypeError, ValueError)


@pytest.mark.parametrize("name", CALLS)
def test_no_message_prints_the_input(name: str) -> None:
    for value in HUGE.values():
        with pytest.raises(REFUSALS) as error:
            refuse(CALLS[name], value)
        assert len(str(error.value)) < 1500


SHAPES = {
    "a sequence": (X[0], "x[None]"),
    "a token": (X[0, 0], "x[None, None]"),
    "two batches": (X[None], "x.flatten(0, 1)"),
    "width second": (X.mT, "x.transpose(1, 2)"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_advice_for_a_shape_works(name: str) -> None:
    x, advice = SHAPES[name]
    with pytest.raises(HeadwiseError) as error:
        LAYER(x)
    assert error.value.do.startswith(advice)
    taken: Tensor = eval(advice, {"x": x})
    assert LAYER(taken).shape == (*taken.shape[:2], 42)


def test_advice_for_a_width_names_no_axis() -> None:
    with pytest.raises(HeadwiseError) as error:
        LAYER(X[..., :40])
    assert "[None]" not in error.value.do
    assert "width 42" in error.value.do


@pytest.mark.parametrize(
    "call",
    [lambda: LAYER(X.long()), lambda: DROP_IN(X.long(), X, X)],
    ids=["native", "drop-in"],
)
def test_integers_are_no_reason_for_a_layer_of_integers(call: Callable[[], object]) -> None:
    with pytest.raises(HeadwiseError) as error:
        call()
    assert "torch.int64" in error.value.saw
    assert "torch.int64" not in error.value.do
    assert "nn.Embedding" in error.value.do
