"""A checkpoint on disk, opened with its description, config and counts; no tensor is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headwise.checkpoints import config as config_json
from headwise.checkpoints.config import Config, ConfigFields
from headwise.checkpoints.description import (
    Description,
    read_config_file_or_description,
    read_description,
)
from headwise.checkpoints.shares import JoinedSource, join_shares, open_shares, require_all_shares
from headwise.checkpoints.source import CheckpointSource, open_source
from headwise.layouts._layout import Layout
from headwise.layouts.registry import layout


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Tensors of a path, with their description, config and counts.

    Attributes:
        source: the tensors.
        description: the description in the files; None where they carry none.
        config: the caller's, else the one beside the files, else the one in the description.
        known: the counts of the caller, the config and the description.
    """

    source: CheckpointSource
    description: Description | None
    config: ConfigFields
    known: dict[str, int]


def open_checkpoint(
    path: Path,
    counts: Mapping[str, int | None],
    *,
    config: Config | None = None,
    stored: str | Layout | None = None,
) -> Checkpoint:
    """Open a checkpoint with its description and config; no tensor is read.

    Args:
        path: a file, an index or a folder; also a folder with shares of tensor-parallel processes.
        counts: the caller's counts, named as in ``COUNTS``; None where a count is unknown.
        config: the fields of config.json; those of the files if None.
        stored: the layout of shares; the one that the files state or fit if None.

    Raises:
        CheckpointError: no weights, or a description that does not fit them.
        OptionError: counts that contradict each other.
    """
    shares = open_shares(path)
    source = open_source(path) if shares is None else shares
    description = read_description(source)
    stated = (
        read_config_file_or_description(source, description)
        if config is None
        else ConfigFields.wrap(config)
    )
    if shares is not None:
        source = _join_shares(shares, stored, description, stated, counts)
    if description is not None:
        if shares is None:
            require_all_shares(source, description.layout, description.counts)
        description.require_fit_to_headers(source.headers)
        description.merge_known_counts(
            counts
        )  # report the caller's wrong counts before the config's
    known = config_json.merge_counts(stated, counts, origin=source.folder)
    if description is not None:
        known = description.merge_known_counts(known)
    return Checkpoint(source, description, stated, known)


def _join_shares(
    shares: JoinedSource,
    stored: str | Layout | None,
    description: Description | None,
    config: ConfigFields,
    counts: Mapping[str, int | None],
) -> JoinedSource:
    described = {} if description is None else description.counts
    given = {name: count for name, count in counts.items() if count is not None}
    name = description.layout if stored is None and description is not None else stored
    known = {**config_json.read_stated_counts(config), **described, **given}
    return join_shares(shares, None if name is None else layout(name), known)
