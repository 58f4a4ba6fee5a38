"""Trained encoder of the study, and its recorded run over the demo text."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.errors import MissingExtraError
from headwise.layers.torch_api.layer import MultiheadAttention
from headwise.models import encoder, minilm, text
from headwise.models.recorded import RecordedRun
from headwise.support.progress import Progress, no_progress


@dataclass(frozen=True)
class Fallback:
    """The reason why the trained encoder is missing, and the command that installs it."""

    reason: str
    remedy: str


def run_minilm(progress: Progress = no_progress) -> RecordedRun:
    """Run all-MiniLM-L6-v2 over the demo text.

    Raises:
        MissingExtraError: as `headwise.models.minilm.record_run`.
    """
    whole, first = (
        " ".join(text.read_opening_paragraphs()),
        text.read_opening_paragraphs()[0],
    )
    return minilm.record_run(whole, first, progress=progress)


_cache: list[tuple[RecordedRun, Fallback | None]] = []


def encoder_run(progress: Progress = no_progress) -> RecordedRun:
    """Return the cached run of all-MiniLM-L6-v2, or of a small encoder trained now."""
    if not _cache:
        try:
            _cache.append((run_minilm(progress), None))
        except MissingExtraError as missing:
            whole = " ".join(text.read_opening_paragraphs())
            small = encoder.train_and_record_run(
                whole, attention=MultiheadAttention, progress=progress
            )
            _cache.append((small, Fallback(missing.saw, missing.do)))
    return _cache[0][0]


def reason_for_encoder_fallback() -> Fallback | None:
    """Return the reason why `encoder_run` used the small encoder, or None if it did not."""
    return _cache[0][1] if _cache else None
