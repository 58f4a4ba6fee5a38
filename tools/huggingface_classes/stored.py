"""Which layout a model's weights are in once they are stored: what `headwise detect` says of it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedModel

from headwise.errors import HeadwiseError
from headwise.identify.detection import Detection, detect

BY_RUN, BY_CONFIG, REFUTED = "run", "config", "refuted"


def layout_of(model: PreTrainedModel) -> tuple[str, str]:
    """The layout of the stored weights, and what tells: its class, or its config alone.

    Both are empty where the catalogue knows none, or knows one for each of several parts.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder)
        try:
            found = detect(folder)
        except HeadwiseError:  # its counts fit no layout
            return "", ""
        if not found.fitting:
            return "", ""
        try:
            after = detect(folder, against=folder)
        except HeadwiseError:  # no layer of it could be compared
            return _name(found), BY_CONFIG if found.layout else ""
    if found.layout and not after.candidates:
        return _name(found), REFUTED
    return _name(after), BY_RUN if after.layout else ""


def _name(found: Detection) -> str:
    return "" if found.layout is None else found.layout.name
