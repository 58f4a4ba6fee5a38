"""Options that the commands about stored weights share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

SAID = "what the weights or config.json say"
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

NAMES = ("heads", "kv_heads", "head_dim", "rotary_width")
