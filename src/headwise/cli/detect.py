"""``headwise detect``: the layout of stored weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli import output


@output.takes_counts
def detect(
    place: output.Weights,
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
    counts: output.Counts,
    trust_remote_code: output.TrustRemoteCode = False,
    as_json: output.AsJson = False,
) -> None:
    """Detect the layout of weights, or list the layouts that fit, with the reasons.

    Names and shapes often fit several; then a reference or a model that runs
    decides. Nothing is guessed.
    """
    with output.progress_bar(output.make_console(stderr=True), "loading torch"):
        from headwise.identify import detection

        options = {**counts, "trust_remote_code": trust_remote_code}
        result = detection.detect(place, reference=reference, against=against, **options)
    lines = detection.describe_detection(result, title=str(place))
    if result.fitting and not result.layout:
        lines += [f"With other weights of the same model: headwise compare {place} OTHER_WEIGHTS"]
    output.print_lines(lines, result.to_json() if as_json else None)
    if not result.layout:
        raise typer.Exit(output.UNDECIDED if result.fitting else output.NO)
