"""`detect`: the layout that weights are in, by names, shapes, config, values or a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headwise.checkpoints.config import Config, known_counts
from headwise.checkpoints.detect import Detection
from headwise.checkpoints.evidence import by_values
from headwise.diagnosis.weights import COUNTS, Given, Weights, weights_of, whole_numbers
from headwise.errors import OptionError

if TYPE_CHECKING:
    from headwise.checkpoints.stored_model import StoredModel

LENGTH = 48  # tokens that a model is run with


def detect(
    weights: Given,
    *,
    config: Config | None = None,
    reference: Given | None = None,
    against: str | Path | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rotary_width: int | None = None,
) -> Detection:
    """Find the layout that weights are in, or the layouts that they may be in.

    Names and shapes often leave several; then a reference or a model that runs decides. The answer
    is never a guess: its `layout` is None where nothing decides, or where the config contradicts
    the names and shapes. Printed, the answer is a list of sentences.

    Args:
        weights: a file of weights, a folder with them, or a state dict.
        config: as in config.json; that beside the file if None.
        reference: the same weights elsewhere: their values decide.
        against: a folder with a model of transformers that has the same weights: what it computes
            decides.
        heads: query heads, where no config says it.
        kv_heads: heads of keys and values.
        head_dim: channels of a head, in place of ``heads``.
        rotary_width: channels of a head that are rotated.

    Raises:
        CheckpointError: a path leads to no weights.
        OptionError: counts that the config contradicts, or that fit no layout.
        UndecidedError: no layout agrees with the model of ``against``, and one could not be
            compared with it.
    """
    counts = dict(zip(COUNTS, (heads, kv_heads, head_dim, rotary_width), strict=True))
    _require_path(against)
    given = weights_of(weights, counts, config=config)
    other = None if reference is None else weights_of(reference, counts, title="the reference")
    shared = {} if other is None else other.known
    if against is None:
        return _by_values(given, other, shared)
    from headwise.checkpoints.stored_model import load

    stored = load(Path(against))
    # The same weights have the same counts: what is known of one is known of all.
    shared = known_counts(stored.config, whole_numbers(counts), place=Path(against)) | shared
    return _by_run(given, _by_values(given, other, shared), stored, title=str(against))


def _require_path(against: str | Path | None) -> None:
    if against is not None and not isinstance(against, (str, Path)):
        raise OptionError(
            saw=f"against of type {type(against).__name__}",
            needed="the path of a folder with a model of transformers",
            do="save the model with save_pretrained, and give that folder",
        )


def _by_run(given: Weights, found: Detection, stored: StoredModel, *, title: str) -> Detection:
    import torch

    from headwise.diagnosis.behaviour import INSTEAD, by_behaviour
    from headwise.scanning.inputs import on_tokens

    length = min(LENGTH, stored.positions or LENGTH)
    ids = torch.randint(stored.vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    inputs = stored.inputs(ids)
    with on_tokens(title, length, do=INSTEAD), torch.no_grad():
        stored.model(**inputs)
    return by_behaviour(found, given.tensors, stored.model, inputs, stored.config)


def _by_values(given: Weights, other: Weights | None, shared: dict[str, int]) -> Detection:
    found = given.detection(**shared)
    given.require_fit(found, **shared)
    if other is None:
        return found
    theirs = other.detection(**{**shared, **given.known})
    return by_values(found, given.tensors, theirs, other.tensors)
