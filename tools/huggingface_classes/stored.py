"""Which layout a model's weights are in once they are stored: what `headwise detect` says of it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedModel

from headwise.errors import HeadwiseError
from headwise.identify.detection import Detection, narrow_by_running, open_weights

BY_RUN, BY_CONFIG, REFUTED = "run", "config", "refuted"


def layout_of(model: PreTrainedModel, given: dict[str, Any]) -> tuple[str, str]:
    """The layout of the stored weights, and what tells: a run of the model, or its config alone.

    Both are empty where the catalogue knows none, or knows one for each of several parts.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder)
        asked = open_weights(folder, {})
        found = asked.detection()
        if not found.fitting:
            return "", ""
        try:
            after = narrow_by_running(found, asked.tensors, model, given, asked.config)
        except HeadwiseError:  # no layer of it could be compared
            return _name(found), BY_CONFIG if found.layout else ""
    if found.layout and not after.candidates:
        return _name(found), REFUTED
    return _name(after), BY_RUN if after.layout else ""


def _name(found: Detection) -> str:
    return "" if found.layout is None else found.layout.name
