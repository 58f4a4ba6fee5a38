"""Arguments of other libraries are refused with what to pass instead, and nothing else changes."""

import inspect
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from headwise import Attention, Mask
from headwise.errors import ArgumentError
from headwise.layers.base import CONSTRUCTOR
from headwise.layers.checks import CALL
from tests.refusals import refusals
from tests.root import ROOT

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

LAYER = Attention(42, 6, num_kv_heads=2)
X = torch.randn(3, 24, 42)
Q = torch.randn(3, 6, 24, 7)

REFUSED: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "bias": (
        lambda: Attention(42, 6, bias=False),  # type: ignore[call-arg]
        ("got bias=False", "q_bias=False, k_bias=False, v_bias=False, out_bias=False"),
    ),
    "batch_first": (
        lambda: Attention(42, 6, batch_first=False),  # type: ignore[call-arg]
        ("batch_first=False", "x.transpose(0, 1)"),
    ),
    "dropout by position": (
        lambda: Attention(42, 6, 0.1),  # type: ignore[misc]
        ("takes 2 arguments by position, got 3", "dropout=0.1"),
    ),
    "transformers": (
        lambda: Attention(42, num_attention_heads=6),  # type: ignore[call-arg]
        ("num_heads=6",),
    ),
    "misspelt": (lambda: Attention(42, 6, droput=0.1), ("dropout=0.1",)),  # type: ignore[call-arg]
    "self-attention": (lambda: LAYER(X, X, X), ("got 3", "layer(x): pass x once")),
    "key is value": (lambda: LAYER(X, Q, Q), ("layer(query, key)",)),
    "three tensors": (lambda: LAYER(X, Q, X), ("layer(query, key, value_source=value)",)),
    "mask by position": (lambda: LAYER(X, X, Mask.causal()), ("layer(x, source, mask=...",)),
    "query": (lambda: LAYER(query=X, key=X, value=X), ("layer(x), layer(x, source), or",)),
    "attn_mask": (
        lambda: LAYER(X, attn_mask=torch.zeros(24, 24)),
        ("torch.float32 tensor of shape (24, 24)", "Mask.from_torch(m)", "ScoreBias.dense"),
    ),
    "padding": (lambda: LAYER(X, key_padding_mask=None), ("Mask.from_torch_padding(m)",)),
    "attention_mask": (lambda: LAYER(X, attention_mask=None), ('axes="batch keys"',)),
    "need_weights": (lambda: LAYER(X, need_weights=True), ("layer.matrix(x).head_average()",)),
    "is_causal": (lambda: LAYER(X, is_causal=True), ("mask=Mask.causal()",)),
    "of a reading": (
        lambda: LAYER.matrix(X, attn_mask=None),  # type: ignore[call-arg]
        ("Attention.matrix has no argument", "Mask.from_torch(m)"),
    ),
}


test_an_argument_of_another_library_gets_its_answer = refusals(REFUSED, kind=ArgumentError)


def test_every_word_of_torch_has_an_answer() -> None:
    own = set(inspect.signature(Attention).parameters)
    theirs = set(inspect.signature(nn.MultiheadAttention).parameters)
    assert theirs - own <= CONSTRUCTOR.keys()
    assert (
        set(inspect.signature(nn.MultiheadAttention.forward).parameters) - {"self"} <= CALL.keys()
    )


@pytest.mark.parametrize("answers", [CONSTRUCTOR, CALL], ids=["constructor", "call"])
def test_no_word_is_an_argument_and_every_renamed_one_is_known(answers: dict) -> None:
    function = Attention.__init__ if answers is CONSTRUCTOR else Attention.forward
    own = set(inspect.signature(function).parameters)
    assert answers.keys() & own == set()
    named = {n for answer in answers.values() for n in re.findall(r"^(\w+)=", answer.do)}
    assert named <= own
    page = ROOT.joinpath("docs", "migrating.md").read_text("utf-8")
    absent = {"nhead", "n_heads", "d_model", "n_kv_heads", "softmax_scale", "logit_cap"}  # no table
    absent |= {"is_causal", "causal", "dropout_p", "attn_mask", "past_key_value"}
    assert [word for word in answers if f"`{word}" not in page and word not in absent] == []


def test_what_is_taken_stays_as_it_was() -> None:
    assert list(inspect.signature(Attention.forward).parameters)[:3] == ["self", "x", "source"]
    assert next(iter(inspect.signature(Attention).parameters)) == "embed_dim"
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'num_heads'"):
        Attention(42)  # type: ignore[call-arg]
