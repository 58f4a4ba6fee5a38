"""The encoder of the studies: read once, and open about being another one."""

from __future__ import annotations

import pytest

from headwise.bundled_models import encoder_trained_on_the_spot, minilm
from headwise.study import run_pretrained_or_small_encoder


def test_what_was_read_is_kept_and_says_why_it_is_not_the_trained_encoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_pretrained_or_small_encoder, "_cache", [])
    monkeypatch.setattr(minilm, "MODULE", "a_module_that_is_not_there")
    monkeypatch.setattr(encoder_trained_on_the_spot, "STEPS", 10)
    assert run_pretrained_or_small_encoder.reason_for_encoder_fallback() is None
    steps: list[str] = []
    first = run_pretrained_or_small_encoder.encoder_run(lambda stage, *_: steps.append(stage))
    assert first.model == "an encoder trained on the spot"
    assert "training a small encoder" in steps
    found = run_pretrained_or_small_encoder.reason_for_encoder_fallback()
    assert found is not None
    assert found.reason == "a_module_that_is_not_there is not installed"
    steps.clear()
    assert (
        run_pretrained_or_small_encoder.encoder_run(lambda stage, *_: steps.append(stage)) is first
    )
    assert steps == []
