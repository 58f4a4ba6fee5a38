"""``headwise detect``: the layout of stored weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.counts import NAMES, Counts, HeadDim, Heads, KvHeads, RotaryWidth
from headwise.cli.output import NO, UNDECIDED, YES, print_lines, stderr_console


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
    from headwise.cli.progress import progress_bar

    counts: Counts = dict(zip(NAMES, (heads, kv_heads, head_dim, rotary_width), strict=True))
    with progress_bar(stderr_console(), "loading torch"):
        from headwise.diagnosis._detect import detect as detect_layout
        from headwise.diagnosis.detection import describe_detection

        detection = detect_layout(place, reference=reference, against=against, **counts)
    lines = describe_detection(detection, title=str(place))
    if detection.fitting and not detection.layout:
        lines += [f"With other weights of the same model: headwise compare {place} OTHER_WEIGHTS"]
    print_lines(lines, detection.to_json() if as_json else None)
    raise typer.Exit(YES if detection.layout else UNDECIDED if detection.fitting else NO)
