"""The encoder of the studies: read once, and open about being another one."""

from __future__ import annotations

import pytest

from headwise.models import encoder, minilm
from headwise.study import trained


def test_what_was_read_is_kept_and_says_why_it_is_not_the_trained_encoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trained, "_cache", [])
    monkeypatch.setattr(minilm, "MODULE", "a_module_that_is_not_there")
    monkeypatch.setattr(encoder, "STEPS", 10)
    assert trained.reason_for_encoder_fallback() is None
    steps: list[str] = []
    first = trained.encoder_run(lambda stage, *_: steps.append(stage))
    assert first.model == "an encoder trained on the spot"
    assert "training a small encoder" in steps
    found = trained.reason_for_encoder_fallback()
    assert found is not None
    assert found.reason == "a_module_that_is_not_there is not installed"
    steps.clear()
    assert trained.encoder_run(lambda stage, *_: steps.append(stage)) is first
    assert steps == []
