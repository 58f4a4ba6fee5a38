"""``headwise compare``: whether two attentions are the same function, and why not."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli import output
from headwise.support.files import make_parent_and_require_writable, write_whole

Layer = Annotated[
    int | None,
    typer.Option(
        help="Run this layer of both and name the cause of a difference.",
        show_default="compare the weights of all layers",
    ),
]
Inputs = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.npy",
        help="Input of the layer, (batch, tokens, width), as NumPy stores it; with "
        "--against-model token ids, (batch, tokens).",
        show_default="inputs that headwise makes",
    ),
]
AgainstModel = Annotated[
    Path | None,
    typer.Option(
        metavar="MODEL_DIR",
        help="Run this model of transformers in place of the second, on random tokens.",
        show_default=False,
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        min=1,
        help="Stop the search for causes after this time, and print what is known.",
        show_default="everything is tried",
    ),
]


@output.takes_counts
def compare(
    first: Annotated[
        Path,
        typer.Argument(
            show_default=False,
            help="The weights in doubt: a file or a folder; or activations that were recorded.",
        ),
    ],
    second: Annotated[
        Path | None, typer.Argument(show_default=False, help="The weights that they should equal.")
    ] = None,
    *,
    layer: Layer = None,
    inputs: Inputs = None,
    against_model: AgainstModel = None,
    budget: Budget = None,
    counts: output.Counts,
    trust_remote_code: output.TrustRemoteCode = False,
    page: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Write an HTML page too.", show_default="no page"),
    ] = None,
    as_json: output.AsJson = False,
) -> None:
    """Say whether two attentions are the same function, and if not, why.

    Without --layer, weights are compared byte for byte, as verify does. With it,
    both layers run on the same inputs, and a cause is named with its repair.
    With --against-model, each layer runs on the input that it has in the model.
    """
    start = time.perf_counter()
    options = {"layer": layer, "inputs": inputs, "against_model": against_model, **counts}
    options["trust_remote_code"] = trust_remote_code or None
    _require_options_that_agree(second, options, counts)
    if page is not None:
        make_parent_and_require_writable(page)
    diagnosis = _compare_files(first, second, {**options, "budget": budget}, counts)
    lines = diagnosis.lines
    if second is not None and layer is None:
        lines = lines + output.suggest_comparison(diagnosis, first, second)
    output.print_result(
        *([] if page is None else [_write_page(diagnosis, page, first, second, options)]),
        start=start,
        show=lambda console: console.print(*lines, sep="\n", markup=False, soft_wrap=True),
        as_json=diagnosis.as_dict if as_json else None,
    )
    raise typer.Exit(output.exit_status_of_diagnosis(diagnosis))


def _require_options_that_agree(
    second: Path | None, options: Mapping[str, Any], counts: output.Counts
) -> None:
    by_model = options["against_model"] is not None
    if (second is None) != by_model:
        raise typer.BadParameter("Name the second weights, or --against-model MODEL_DIR.")
    if by_model and options["layer"] is not None:
        raise typer.BadParameter("--against-model runs every layer: leave out --layer.")
    if options["inputs"] is not None and options["layer"] is None and not by_model:
        raise typer.BadParameter(
            "--inputs needs --layer N or --against-model: weights alone take no input."
        )
    if by_model and any(counts.values()):
        raise typer.BadParameter("--against-model takes counts from the files: leave them out.")


def _compare_files(
    first: Path, second: Path | None, options: Mapping[str, Any], counts: output.Counts
) -> output.Diagnosis:
    console = output.make_console(stderr=True)
    with output.progress_bar(console, "loading torch") as progress:
        from headwise.checkpoints import loading, transformers
        from headwise.diagnosis import _compare
        from headwise.diagnosis.subjects.recording import is_recording
        from headwise.identify import _verify
        from headwise.scanning import labels

        layer, inputs = options["layer"], options["inputs"]
        trusted: dict[str, Any] = {"trust_remote_code": bool(options["trust_remote_code"])}
        limits = {"budget": options["budget"], "progress": progress, **trusted}
        if second is None:
            model = transformers.load(options["against_model"], **trusted).model
            return _compare.compare(first, model, _read_input_array(inputs), **limits)
        if layer is None:
            for path in filter(is_recording, (first, second)):
                raise typer.BadParameter(
                    f"{path} holds recorded activations: --layer N names the layer that they are "
                    "of."
                )
            return _verify.verify(first, second, progress=progress, **counts)
        settings = {"layer": layer, **counts, **trusted}
        mine, theirs = (
            path if is_recording(path) else loading.load_attention(path, **settings)
            for path in (first, second)
        )
        for path, made in ((first, mine), (second, theirs)):
            if proof := getattr(made, "proof", ""):
                console.print(f"{path}: {proof}", markup=False, highlight=False, soft_wrap=True)
        diagnosis = _compare.compare(mine, theirs, _read_input_array(inputs), **limits)
        return diagnosis.with_notes(labels.describe_cuts(first, second))


def _read_input_array(path: Path | None) -> Any:
    if path is None:
        return None
    import numpy as np
    import torch

    if path.suffix != ".npy" or not path.exists():
        raise typer.BadParameter(f"--inputs {path}: name a file that numpy.save wrote, x.npy.")
    return torch.from_numpy(np.load(path, allow_pickle=False))


def _write_page(
    diagnosis: output.Diagnosis,
    page: Path,
    first: Path,
    second: Path | None,
    options: Mapping[str, Any],
) -> Path:
    from headwise.reports.diagnosis import DiagnosisReport, render_diagnosis_page

    words = [
        output.option_text(name) + ("" if value is True else f"={value}")
        for name, value in options.items()
        if value is not None
    ]
    stored = [first] if second is None else [first, second]
    call = shlex.join(["headwise", "compare", *map(str, stored), *words])
    prefix = "" if options["layer"] is None else f"layer {options['layer']} of "
    paths = (first, second or options["against_model"])
    names = [prefix + path.resolve().name for path in paths]
    report = DiagnosisReport(diagnosis=diagnosis, first=names[0], second=names[1], call=call)
    return write_whole(page, render_diagnosis_page(report))
