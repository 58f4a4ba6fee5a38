"""What the commands about stored weights share: a checkpoint, opened, and what it may be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from headwise.layouts.checkpoint.source import Source
    from headwise.layouts.detect import Detection

SAID = "what config.json says"
Heads = Annotated[int | None, typer.Option("--heads", help="Query heads.", show_default=SAID)]
KvHeads = Annotated[
    int | None, typer.Option("--kv-heads", help="Heads of keys and values.", show_default=SAID)
]
RotaryWidth = Annotated[
    int | None,
    typer.Option("--rotary-width", help="Channels of a head that turn.", show_default=SAID),
]
Counts = dict[str, int | None]


@dataclass(frozen=True)
class Opened:
    """A checkpoint, with what its config and the command say of it."""

    source: Source
    config: dict[str, Any]
    known: dict[str, int]

    def detection(self, **also: int) -> Detection:
        """The layouts that it may be in; ``also`` is known of it, too."""
        from headwise.layouts.config import layout_of
        from headwise.layouts.detect import detect

        return detect(self.source.headers, said=layout_of(self.config), **{**also, **self.known})


def opened(place: Path, given: Counts) -> Opened:
    """Read the heads of its files and its config, and no tensor.

    Raises:
        CheckpointError, OptionError: it is none, or its config contradicts ``given``.
    """
    from headwise.layouts.checkpoint.counts import known_counts
    from headwise.layouts.checkpoint.source import open_source
    from headwise.layouts.config import read_config

    source = open_source(place)
    config = dict(read_config(source.folder))
    return Opened(source, config, known_counts(config, given, place=source.folder))
