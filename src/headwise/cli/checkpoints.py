"""Options that the commands about stored weights share, and their names in messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from headwise.errors import HeadwiseError

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
Counts = dict[str, Any]  # int, or None where it is not given

# What a call in Python names -> the option, and what config.json calls it.
NAMES = ("heads", "kv_heads", "head_dim", "rotary_width")
OPTIONS = {name: f"--{name.replace('_', '-')}" for name in NAMES}
IN_CONFIG = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
_COUNT = re.compile(rf"(?<![-\w])({'|'.join(OPTIONS)})\b")
_WANTED = re.compile(rf"give ({'|'.join(IN_CONFIG)})\b(, ({'|'.join(IN_CONFIG)})\b)*")
_ACCEPT = re.compile(r"\baccept (\w+(?:, \w+)*)$")


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
