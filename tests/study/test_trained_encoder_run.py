"""The encoder of the studies: read once, and open about being another one."""

from __future__ import annotations

import pytest

from headwise.bundled_models import minilm, small_encoder
from headwise.study import trained_encoder_run


def test_what_was_read_is_kept_and_says_why_it_is_not_the_trained_encoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trained_encoder_run, "_cache", [])
    monkeypatch.setattr(minilm, "MODULE", "a_module_that_is_not_there")
    monkeypatch.setattr(small_encoder, "STEPS", 10)
    assert trained_encoder_run.reason_for_encoder_fallback() is None
    steps: list[str] = []
    first = trained_encoder_run.encoder_run(lambda stage, *_: steps.append(stage))
    assert first.model == "an encoder trained on the spot"
    assert "training a small encoder" in steps
    found = trained_encoder_run.reason_for_encoder_fallback()
    assert found is not None
    assert found.reason == "a_module_that_is_not_there is not installed"
    steps.clear()
    assert trained_encoder_run.encoder_run(lambda stage, *_: steps.append(stage)) is first
    assert steps == []
