"""``headwise detect``: which layout stored weights are in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.checkpoint_options import NAMES, Counts, HeadDim, Heads, KvHeads, RotaryWidth
from headwise.cli.output import NO, UNDECIDED, YES, stderr_console


def detect(
    place: Annotated[
        Path, typer.Argument(show_default=False, help="A file of weights, or a folder with them.")
    ],
    *,
    reference: Annotated[
        Path | None,
        typer.Option(help="The same weights elsewhere: values decide.", show_default=False),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL_DIR",
            help="A model that runs with the same weights: what it computes decides.",
            show_default=False,
        ),
    ] = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = None,
    rotary_width: RotaryWidth = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Say which layout weights are in, with the reasons, or which ones they may be in.

    Names and shapes often leave several; then a reference or a model that
    runs decides. It is never guessed.
    """
    given = dict(zip(NAMES, (heads, kv_heads, head_dim, rotary_width), strict=True))
    raise typer.Exit(_detect(place, reference, against, given, as_json=as_json))


def _detect(
    place: Path, reference: Path | None, against: Path | None, given: Counts, *, as_json: bool
) -> int:
    from headwise.cli.progress_bar import progress_bar

    with progress_bar(stderr_console(), "loading torch"):
        from rich.console import Console

        from headwise.diagnosis.detect import detect as ask
        from headwise.diagnosis.detection_result import lines_of

        found = ask(place, reference=reference, against=against, **given)
    if as_json:
        import json

        typer.echo(json.dumps(found.to_json(), ensure_ascii=False))
    else:
        for line in lines_of(found, title=str(place)):
            Console(highlight=False, soft_wrap=True).print(line, markup=False)
    if found.layout:
        return YES
    return UNDECIDED if found.candidates else NO
