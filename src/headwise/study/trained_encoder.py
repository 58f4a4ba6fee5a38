"""The encoder that the studies look at, and what it read."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.bundled_models import demo_text, minilm, small_encoder
from headwise.bundled_models.recorded_run import RecordedRun
from headwise.errors import MissingExtraError
from headwise.layers.torch_api.layer import MultiheadAttention
from headwise.support.progress import Progress, no_progress


@dataclass(frozen=True)
class Fallback:
    """Why the trained encoder could not be had, and the command that gets it."""

    reason: str
    remedy: str


def trained(progress: Progress = no_progress) -> RecordedRun:
    """Read the text with all-MiniLM-L6-v2.

    Raises:
        MissingExtraError: as `headwise.bundled_models.minilm.read`.
    """
    whole, first = " ".join(demo_text.paragraphs()), demo_text.paragraphs()[0]
    return minilm.read(whole, first, progress=progress)


_once: list[tuple[RecordedRun, Fallback | None]] = []


def reading(progress: Progress = no_progress) -> RecordedRun:
    """What all-MiniLM-L6-v2 read, or a small encoder trained on the spot; it is read once."""
    if not _once:
        try:
            _once.append((trained(progress), None))
        except MissingExtraError as missing:
            whole = " ".join(demo_text.paragraphs())
            small_one = small_encoder.read(whole, attention=MultiheadAttention, progress=progress)
            _once.append((small_one, Fallback(missing.saw, missing.do)))
    return _once[0][0]


def fallback() -> Fallback | None:
    """Why `reading` is not that of the trained encoder; None where it is, or nothing was read."""
    return _once[0][1] if _once else None
