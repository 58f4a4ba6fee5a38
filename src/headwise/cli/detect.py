"""``headwise detect``: the layout of stored weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.counts import NAMES, Counts, HeadDim, Heads, KvHeads, RotaryWidth
from headwise.cli.output import NO, UNDECIDED, YES, stderr_console


def detect(
    place: Annotated[
        Path, typer.Argument(show_default=False, help="A file of weights, or a folder with them.")
    ],
    *,
    reference: Annotated[
        Path | None,
        typer.Option(help="Another copy of the weights: values decide.", show_default=False),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL_DIR",
            help="A model folder with the same weights: the outputs of its attention decide.",
            show_default=False,
        ),
    ] = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = None,
    rotary_width: RotaryWidth = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Detect the layout of weights, or list the layouts that fit, with the reasons.

    Names and shapes often fit several; then a reference or a model that runs
    decides. Nothing is guessed.
    """
    counts = dict(zip(NAMES, (heads, kv_heads, head_dim, rotary_width), strict=True))
    raise typer.Exit(_run_detection(place, reference, against, counts, as_json=as_json))


def _run_detection(
    place: Path, reference: Path | None, against: Path | None, counts: Counts, *, as_json: bool
) -> int:
    from headwise.cli.progress import progress_bar

    with progress_bar(stderr_console(), "loading torch"):
        from rich.console import Console

        from headwise.diagnosis._detect import detect as detect_layout
        from headwise.diagnosis.results.detection import describe_detection

        detection = detect_layout(place, reference=reference, against=against, **counts)
    if as_json:
        import json

        typer.echo(json.dumps(detection.to_json(), ensure_ascii=False))
    else:
        for line in describe_detection(detection, title=str(place)):
            Console(highlight=False, soft_wrap=True).print(line, markup=False)
    if detection.layout:
        return YES
    if detection.fitting and not as_json:
        typer.echo(f"With other weights of the same model: headwise compare {place} OTHER_WEIGHTS")
    return UNDECIDED if detection.fitting else NO
