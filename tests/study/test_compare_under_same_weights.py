"""Whether headwise's layers are the same function as a model's own, and what is then said."""

import pytest

from headwise.errors import MissingExtraError
from headwise.study import encoder
from headwise.study.questions.implementations import compare_with_model_layers
from tests.study.readings import small_reading


def test_the_layers_with_the_models_weights_are_the_same_function() -> None:
    same = compare_with_model_layers(small_reading())
    assert list(same.shares) == [
        "headwise.MultiheadAttention",
        "headwise.Attention",
        "the model's own layers",
    ]
    assert same.holds
    assert 0 < max(same.shares.values()) <= 1
    assert same.summary_sentences.startswith(
        "The same function. In all 1 layers headwise.MultiheadAttention"
    )
    assert f"headwise.Attention {same.shares['headwise.Attention']:.2f}" in same.summary_sentences


def test_a_model_that_computes_with_other_weights_is_not() -> None:
    same = compare_with_model_layers(small_reading(exchanged=True))
    assert not same.holds
    assert same.shares["headwise.Attention"] <= 1 < same.shares["the model's own layers"]
    assert same.summary_sentences.startswith("Not the same function.")


@pytest.mark.slow
def test_every_layer_of_the_trained_encoder() -> None:
    try:
        reading = encoder.run_minilm()
    except MissingExtraError as missing:
        pytest.skip(str(missing))
    assert 200 <= len(reading.tokens) <= 400
    same = compare_with_model_layers(reading)
    assert (same.model, same.layers) == ("all-MiniLM-L6-v2", 6)
    assert same.holds, same.summary_sentences
