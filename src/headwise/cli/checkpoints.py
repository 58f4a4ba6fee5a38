"""What the commands about stored weights share: a checkpoint, opened, and what it may be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.errors import HeadwiseError, OptionError

if TYPE_CHECKING:
    from headwise.layouts.checkpoint.source import Source
    from headwise.layouts.detect import Detection
    from headwise.layouts.layout import Layout

SAID = "what config.json says"
Heads = Annotated[int | None, typer.Option("--heads", help="Query heads.", show_default=SAID)]
KvHeads = Annotated[
    int | None, typer.Option("--kv-heads", help="Heads of keys and values.", show_default=SAID)
]
HeadDim = Annotated[
    int | None,
    typer.Option(
        "--head-dim",
        help="Channels of a head, in place of heads.",
        show_default=SAID,
    ),
]
RotaryWidth = Annotated[
    int | None,
    typer.Option("--rotary-width", help="Channels of a head that turn.", show_default=SAID),
]
Counts = dict[str, int | None]

# What a call in Python names -> the option, and what config.json calls it.
NAMES = ("heads", "kv_heads", "head_dim", "rotary_width")
OPTIONS = {name: f"--{name.replace('_', '-')}" for name in NAMES}
IN_CONFIG = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
_COUNT = re.compile(rf"(?<![-\w])({'|'.join(OPTIONS)})\b")
_WANTED = re.compile(rf"give ({'|'.join(IN_CONFIG)})\b(, ({'|'.join(IN_CONFIG)})\b)*")
_ACCEPT = re.compile(r"\baccept (\w+(?:, \w+)*)$")


@dataclass(frozen=True)
class Opened:
    """A checkpoint, with what its config and the command say of it."""

    source: Source
    config: dict[str, Any]
    known: dict[str, int]

    def detection(self, **also: int) -> Detection:
        """The layouts that it may be in; ``also`` is known of it, too."""
        from headwise.layouts.detect import detect

        counts = {**also, **self.known}
        return detect(self.source.headers, said=None, config=self.config, **counts)

    def require_fit(self, found: Detection, **also: int) -> None:
        """Refuse counts with which no layout fits, where layouts do without them.

        Raises:
            OptionError: see above.
        """
        from headwise.layouts.detect import detect

        counts = {**also, **self.known}
        if found.candidates or found.refuted or not counts:
            return
        fitting = detect(self.source.headers).candidates
        if fitting:
            names = [one.layout.name for group in fitting for one in group]
            raise OptionError(
                saw=", ".join(f"{name} {count}" for name, count in counts.items()),
                needed=f"counts that fit the shapes in {self.source.path}: by its names it is in "
                f"{', '.join(names)}",
                do="give the model's own counts, in its config.json or in the call",
            )

    def named(self, name: str, option: str) -> Layout:
        """The layout of a name that was given.

        Raises:
            OptionError: there is none, or the config says another one, which fits the file.
        """
        from headwise.layouts.registry import layout

        found = layout(name)
        if (why := self.detection().refuted.get(found.name)) is not None:
            raise OptionError(
                saw=f"{option} {name}, where in {self.source.folder} {why}",
                needed="one layout: read as another one, rows are moved to wrong places",
                do=f"leave out {option}, or mend the config",
            )
        return found

    def layout(self, name: str | None, option: str) -> Layout:
        """The layout that it is in: as it is named, or the only one that it may be.

        Raises:
            OptionError: there are none, or several, or what is said contradicts itself.
        """
        if name is not None:
            return self.named(name, option)
        found = self.detection()
        self.require_fit(found)
        return found.require(file=str(self.source.path), option=option)


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


@contextmanager
def in_options() -> Iterator[None]:
    """What an error says to do, with the options of the command in place of a call's arguments."""
    try:
        yield
    except HeadwiseError as error:
        do = _COUNT.sub(lambda name: OPTIONS[name[0]], error.do)
        do = _ACCEPT.sub(lambda names: f"--accept {names[1].replace(', ', ' --accept ')}", do)
        wanted = _WANTED.match(error.do)
        if wanted:
            called = [IN_CONFIG[name] for name in _COUNT.findall(wanted[0])]
            do += f"; config.json calls it {' and '.join(called)}"
        if do == error.do:
            raise
        raise type(error)(saw=error.saw, needed=error.needed, do=do) from error
