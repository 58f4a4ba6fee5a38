"""``headwise convert``: weights of a stored model, written in another layout."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headwise.cli import output
from headwise.support.text import human_bytes, list_some

if TYPE_CHECKING:
    from headwise.checkpoints.conversion import ConversionReport
    from headwise.identify.detection import GivenWeights

SHOWN = 4  # unchanged names
SCHEMA = 1  # version of the JSON form of a report
PARTIAL = "Partial output is in {}. Repeat the command to resume."

Root = Annotated[
    str | None,
    typer.Option(
        help="Prefix of all names that are written, such as 'model.'.",
        show_default="that of the source",
    ),
]
Accept = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FIELD",
        help="Convert although the two layouts use the weights differently in FIELD: scale, rotary "
        "and so on. Configure the model that reads the result. Can be given several times.",
    ),
]
As = Annotated[
    Literal["safetensors", "meta", "megatron"],
    typer.Option(
        "--as",
        help="The files to write: safetensors; or those of tensor-parallel processes, "
        "consolidated.00.pth with params.json for Meta's code, or mp_rank_00 for Megatron-LM.",
    ),
]


@output.takes_counts
def convert(
    source: output.Weights,
    target: Annotated[
        Path,
        typer.Argument(
            show_default=False,
            help="A new file; a new folder if the source is a folder. Nothing is overwritten.",
        ),
    ],
    *,
    to: Annotated[str, typer.Option(help="The layout to write.", show_default=False)],
    from_: Annotated[
        str | None,
        typer.Option(
            "--from", help="The layout of the source.", show_default="what the files leave possible"
        ),
    ] = None,
    counts: output.Counts,
    root: Root = None,
    accept: Accept = None,
    as_: As = "safetensors",
    shards: Annotated[
        int, typer.Option(min=1, help="Tensor-parallel processes that will read the files.")
    ] = 1,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Read every file again after it is written, also those that an interrupted run "
            "left, and compare its CRC-32.",
        ),
    ] = False,
    as_json: output.AsJson = False,
) -> None:
    """Store the weights of a model in another layout, without loss.

    Every tensor that is rewritten is moved back and compared byte for byte.
    To resume an interrupted run, repeat the command.
    """
    options = {"root": root, "accept": accept or (), "files": as_, "shards": shards}
    _run_conversion(
        source, target, (from_, to), counts, options | {"verify": verify}, as_json=as_json
    )


def _run_conversion(
    source: Path,
    target: Path,
    layouts: tuple[str | None, str],
    counts: output.Counts,
    options: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    start, console = time.perf_counter(), output.make_console(stderr=True)
    with output.progress_bar(console, "loading torch"):
        from headwise.checkpoints import conversion, staging
        from headwise.checkpoints.source import CheckpointSource
        from headwise.identify import detection
        from headwise.layouts import registry
        from headwise.support.tracing import one_thread

        written = registry.layout(layouts[1])
        weights = detection.open_weights(source, counts, stored=layouts[0])
        stored = weights.layout(layouts[0], "from")
        assert isinstance(weights.tensors, CheckpointSource)  # since ``source`` is a path
    made_folder = output.created_folder_note(target)
    console.print(f"{source}: {stored.name} -> {written.name}", markup=False)
    try:  # memory and the disk limit the speed: a second thread takes twice the time
        with one_thread(), output.progress_bar(console, "", in_bytes=True) as progress:
            settings = {**options, **weights.known, "progress": progress}
            report = conversion.convert_checkpoint(
                weights.tensors, target, stored, written, **settings
            )
    except KeyboardInterrupt:
        console.print(PARTIAL.format(staging.staging_path(target)), markup=False)
        raise
    seconds, names = time.perf_counter() - start, (stored.name, written.name)
    time_and_size = f"{seconds:.1f} s, {human_bytes(report.nbytes)}."
    end = (made_folder, f"{time_and_size} The weights:", str(report.target))
    lines = [*filter(None, [*_describe_conversion(report, weights, counts, names), *end])]
    result = {"schema": SCHEMA, "from": names[0], "to": names[1], "seconds": seconds}
    result |= {**asdict(report), "target": str(report.target), "lines": lines}
    output.print_lines(lines, result if as_json else None)


def _describe_conversion(
    report: ConversionReport, weights: GivenWeights, counts: output.Counts, names: tuple[str, str]
) -> Iterator[str]:
    if report.earlier_run == "its beginning":
        yield "Resumed an interrupted run: the files it had finished were kept."
    if report.earlier_run == "other work":
        yield "Started anew: the interrupted run had another source, options or version."
    yield (
        f"{report.tensors} tensors: {report.rewritten} rewritten, moved back and compared byte for "
        f"byte; {report.tensors - report.rewritten} copied."
    )
    if report.example:
        yield f"Attention is stored under names such as {report.example}."
    if report.roots:
        yield f"The names begin with {', '.join(map(repr, report.roots))}, which --root can change."
    if report.unchanged_names:
        kinds = list(dict.fromkeys(re.sub(r"\d+", "{n}", name) for name in report.unchanged_names))
        more = " ..." if len(kinds) > SHOWN else ""
        yield (
            f"Names as before, since the layout {names[1]} does not describe these tensors "
            f"({len(report.unchanged_names)}): "
            f"{', '.join(kinds[:SHOWN])}{more}"
        )
    described = () if weights.description is None else weights.description.counts
    origins: dict[str, list[str]] = {}
    for name, count in weights.known.items():
        file = "metadata" if name in described else "config.json"
        origin = file if counts.get(name) is None else "given"
        origins.setdefault(origin, []).append(f"{name} {count}")
    if origins:  # such as "heads 6, kv_heads 2 (config.json)"
        read = [f"{', '.join(named)} ({origin})" for origin, named in origins.items()]
        yield f"Read with {', '.join(read)}."
    for name, (mine, theirs) in report.accepted.items():
        yield f"Accepted: {name}, {mine} in {names[0]}, {theirs} in {names[1]}."
    if report.not_copied:
        is_other = names[0] != names[1]
        why = f"since they go with {names[0]}" if is_other else "though they fit as well"
        yield f"Not copied, {why}: {list_some(report.not_copied)}."
