"""Probes of a function that no cause explains: the tokens it mixes, its values, its weights."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headwise import Attention, Mask, compare
from headwise.diagnosis.functions import BlackBoxComparison
from headwise.diagnosis.subjects.function import BlackBox
from headwise.diagnosis.subjects.layers import NativeSubject
from headwise.identify.results import Verdict

WIDTH, HEADS = 40, 5


@pytest.fixture
def layer() -> Attention:
    torch.manual_seed(0)
    return Attention(WIDTH, HEADS)


def isolate(function: Callable[..., Tensor], layer: Attention) -> tuple[str, ...]:
    model = NativeSubject(layer).model
    return BlackBoxComparison(
        BlackBox(function), model, (WIDTH, WIDTH), "first", torch.float32
    ).sentences


def test_tokens_that_do_not_see_themselves_are_named(layer: Attention) -> None:
    def port(x: Tensor) -> Tensor:
        tokens = x.shape[1]
        allowed = ~torch.eye(tokens, dtype=torch.bool) if tokens > 1 else torch.ones(1, 1).bool()
        output: Tensor = layer(x, mask=Mask.may_attend(allowed, axes="queries keys"))
        return output

    pairs = "query 0 of the first does not see key 0, and so for 4 more pairs"
    assert pairs in isolate(port, layer)


def disturbed(layer: Attention, projection: str, rows: slice) -> Attention:
    other = copy.deepcopy(layer)
    with torch.no_grad():
        weight = other.get_submodule(projection).weight
        assert isinstance(weight, Tensor)
        weight[rows] += 0.3 * torch.randn_like(weight[rows])
    return other


def test_an_equal_function_parts_nowhere(layer: Attention) -> None:
    [sentence] = isolate(lambda x: layer(x), layer)
    assert "with one token, which has all the weight, the outputs agree" in sentence


def test_a_function_that_mixes_no_tokens_is_told(layer: Attention) -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    first, *_ = isolate(lambda x: linear(x), layer)
    assert first == "each output of the first depends on its own token alone: it mixes none"


@pytest.mark.slow
def test_a_function_that_mixes_no_tokens_is_no_attention(layer: Attention) -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    diagnosis = compare(lambda x: linear(x), layer)
    assert diagnosis.verdict is Verdict.UNKNOWN
    assert "each output of the first depends on its own token alone" in str(diagnosis)
    assert "causes were tried, alone and in pairs" in str(diagnosis)


def test_the_head_whose_scores_differ_is_found(layer: Attention) -> None:
    """Rows 16 to 23 are those of head 2."""
    other = disturbed(layer, "q_proj", slice(16, 24))
    one_token, weights = isolate(lambda x: other(x), layer)
    assert "values and the output projection are right" in one_token
    assert weights == "weights, computed from outputs of 5 tokens, differ in head 2"


@pytest.mark.parametrize("projection", ["v_proj", "out_proj"])
def test_values_are_told_from_scores(layer: Attention, projection: str) -> None:
    other = disturbed(layer, projection, slice(16, 24))
    [sentence] = isolate(lambda x: other(x), layer)
    assert "look at values, the output projection and what is around" in sentence


def test_hidden_tokens_are_read(layer: Attention) -> None:
    """Query 0 sees itself alone, and query 4 does not see key 5: 15 pairs are hidden."""

    def causal(x: Tensor) -> Tensor:
        output: Tensor = layer(x, mask=Mask.causal(align="top-left"))
        return output

    seen, *_ = isolate(causal, layer)
    assert seen == "query 0 of the first does not see key 1, and so for 14 more pairs"


def test_groups_of_heads_are_told_apart() -> None:
    torch.manual_seed(0)
    layer = Attention(48, 6, num_kv_heads=2)
    other = disturbed(layer, "q_proj", slice(8, 16))
    model = NativeSubject(layer).model
    function = BlackBox(lambda x: other(x))
    sentences = BlackBoxComparison(function, model, (48, 48), "first", torch.float32).sentences
    assert sentences[-1].endswith("differ in head 1")


def test_a_function_that_fails_on_one_token_says_less(layer: Attention) -> None:
    def fails(x: Tensor) -> Tensor:
        if x.shape[1] == 1:
            raise ValueError("one token")
        output: Tensor = layer(x)
        return output

    assert isolate(fails, layer) == ()
