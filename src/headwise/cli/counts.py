"""Options shared by the commands for stored weights."""

from __future__ import annotations

from typing import Annotated, Any

import typer

FILES = "from the weights or config.json"
Heads = Annotated[int | None, typer.Option("--heads", help="Query heads.", show_default=FILES)]
KvHeads = Annotated[
    int | None, typer.Option("--kv-heads", help="Heads of keys and values.", show_default=FILES)
]
HeadDim = Annotated[
    int | None,
    typer.Option("--head-dim", help="Channels of a head, in place of heads.", show_default=FILES),
]
RotaryWidth = Annotated[
    int | None,
    typer.Option("--rotary-width", help="Rotated channels of a head.", show_default=FILES),
]
Counts = dict[str, Any]  # int, or None without the option

NAMES = ("heads", "kv_heads", "head_dim", "rotary_width")
