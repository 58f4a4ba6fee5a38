"""Measures of a model on data."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from headwise.errors import OptionError, ShapeError
from headwise.surgery import quality
from headwise.surgery.quality import Data, Quality, interval
from tests.scanning import models
from tests.surgery import small


def test_a_language_model_is_measured_by_its_next_token() -> None:
    model, given = small.grouped(), small.text()
    logits, ids, mask = small.run(model, given), given["input_ids"], given["attention_mask"].bool()
    quality = Quality.of(model, [given])
    assert not quality.is_likeness
    for row, value in enumerate(quality.values(model, [given])):
        count = int(mask[row].sum())
        loss = F.cross_entropy(logits[row, : count - 1], ids[row, 1:count])
        assert float(value) == pytest.approx(-float(loss), rel=1e-6)
    tiny = small.tiny()
    assert "next-token loss" in Quality.of(tiny, [small.ids(2, 7)]).title


def test_an_encoder_is_measured_by_its_mean_state_over_real_tokens() -> None:
    model, given = models.bert(), small.text()
    other = models.bert()
    quality = Quality.of(model, [given])
    assert quality.title == "cosine similarity of the mean last hidden state to the original's"
    assert torch.allclose(quality.values(model, [given]), torch.ones(4).double(), atol=1e-12)
    real, pooled = given["attention_mask"].bool(), []
    for each in (model, other):
        states = small.run(each, given)
        pooled.append(torch.stack([states[row][real[row]].mean(0) for row in range(4)]))
    expected = F.cosine_similarity(*pooled, dim=-1)
    assert float(expected.max()) < 0.9
    torch.testing.assert_close(quality.values(other, [given]), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["vit", "t5", "bart"])
def test_other_models_are_measured_by_their_first_output(family: str) -> None:
    make, data = small.FAMILIES[family]
    model, other, given = make(), make(), data(0)
    quality = Quality.of(model, [given])
    assert quality.title == "cosine similarity of the first output to the original's"
    outputs = [small.run(each, given).flatten(1) for each in (model, other)]
    expected = F.cosine_similarity(*outputs, dim=-1)
    torch.testing.assert_close(quality.values(other, [given]), expected, rtol=1e-12, atol=1e-12)


def test_a_masked_language_model_is_no_causal_one() -> None:
    import transformers

    model = models.spread(transformers.BertForMaskedLM(transformers.BertConfig(**models.SMALL)))
    quality = Quality.of(model, [small.text()])
    assert quality.is_likeness


def test_padding_does_not_count() -> None:
    model, other, given = models.bert(), models.bert(), small.text()
    longer = {name: F.pad(x, (0, 5), value=0) for name, x in given.items()}
    values = [Quality.of(model, [x]).values(other, [x]) for x in (given, longer)]
    torch.testing.assert_close(*values, rtol=1e-10, atol=1e-10)


def test_a_function_of_the_caller() -> None:
    model, given = models.bert(), small.text()
    quality = Quality.of(model, [given], lambda output, given: output[0][:, 0, 0])
    assert torch.equal(quality.values(model, [given]), small.run(model, given)[:, 0, 0])
    with pytest.raises(ShapeError, match="a measure that gave"):
        Quality.of(model, [given], lambda output, given: output[0].mean()).values(model, [given])


def test_the_interval_is_that_of_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interval(torch.full((7,), 0.25)) == (0.25, 0.25)
    monkeypatch.setattr(quality, "RESAMPLES", 8000)
    values = torch.randn(400, generator=torch.Generator().manual_seed(3)).double()
    low, high = interval(values)
    # The bootstrap of a mean approaches mean ± 1.96 standard errors; its quantiles have an error
    # of sqrt(0.025 * 0.975 / 8000) / density(1.96) = 0.0299 standard errors.
    error = float(values.std(correction=0)) / 20
    assert abs(low - float(values.mean()) + 1.96 * error) < 4 * 0.0299 * error
    assert abs(high - float(values.mean()) - 1.96 * error) < 4 * 0.0299 * error
    assert interval(values) == (low, high)


def test_halves_and_turns() -> None:
    given = small.text(batch=5)
    data = Data.of(given)
    assert [len(x["input_ids"]) for x in (*data.fit, *data.held_out)] == [2, 3]
    whole = torch.cat([data.fit[0]["attention_mask"], data.held_out[0]["attention_mask"]])
    assert torch.equal(whole, given["attention_mask"])
    parts = [small.ids(2, 6, seed=seed) for seed in range(5)]
    data = Data.of(parts)
    assert [any(x is part for x in data.fit) for part in parts] == [True, False, True, False, True]
    assert "half" in Data.of(small.images()).note


def test_sequences_in_both_parts_are_refused() -> None:
    given = small.text(batch=5)
    padded: Any = {name: F.pad(x[3:4], (0, 4), value=0) for name, x in given.items()}
    with pytest.raises(OptionError, match="1 held-out sequence that the cut is fitted to"):
        Data.of(given, padded)
    with pytest.raises(OptionError, match="2 held-out sequences"):
        Data.of(small.images(), {"pixel_values": small.images()["pixel_values"][1:3]})
    with pytest.raises(OptionError, match="one sequence, of which no half"):
        Data.of(small.ids(1, 8))
