"""``headwise compare``: whether two attentions are the same function, and why not."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.counts import NAMES, Counts, HeadDim, Heads, KvHeads, RotaryWidth
from headwise.cli.output import (
    exit_status_of_diagnosis,
    option_text,
    print_result,
    stderr_console,
    suggest_comparison,
)

if TYPE_CHECKING:
    from headwise.diagnosis.results import Diagnosis

LayerInput = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.npy",
        help="Input of the layer, (batch, tokens, width), as NumPy stores it; with "
        "--against-model token ids, (batch, tokens).",
        show_default="inputs that headwise makes",
    ),
]
ReferenceModel = Annotated[
    Path | None,
    typer.Option(
        metavar="MODEL_DIR",
        help="Run this model of transformers in place of the second, on random tokens.",
        show_default=False,
    ),
]


def compare(
    first: Annotated[
        Path,
        typer.Argument(
            show_default=False,
            help="The weights in doubt: a file or a folder; or activations that were recorded.",
        ),
    ],
    second: Annotated[
        Path | None,
        typer.Argument(show_default=False, help="The weights that they should equal."),
    ] = None,
    *,
    layer: Annotated[
        int | None,
        typer.Option(
            help="Run this layer of both and name the cause of a difference.",
            show_default="compare the weights of all layers",
        ),
    ] = None,
    inputs: LayerInput = None,
    against_model: ReferenceModel = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = None,
    rotary_width: RotaryWidth = None,
    page: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Write an HTML page too.", show_default="no page"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Say whether two attentions are the same function, and if not, why.

    Without --layer, weights are compared byte for byte, as verify does. With it,
    both layers run on the same inputs, and a cause is named with its repair.
    With --against-model, each layer runs on the input that it has in the model.
    """
    counts = dict(zip(NAMES, (heads, kv_heads, head_dim, rotary_width), strict=True))
    options = {"layer": layer, "inputs": inputs, "against_model": against_model, **counts}
    _require_options_that_agree(second, options)
    diagnosis = _compare_and_report(first, second, options, page, as_json=as_json)
    raise typer.Exit(exit_status_of_diagnosis(diagnosis))


def _require_options_that_agree(second: Path | None, options: Mapping[str, Any]) -> None:
    """Raise a usage error for options that cannot be combined."""
    by_model = options["against_model"] is not None
    if (second is None) != by_model:
        raise typer.BadParameter("Name the second weights, or --against-model MODEL_DIR.")
    if by_model and options["layer"] is not None:
        raise typer.BadParameter("--against-model runs every layer: leave out --layer.")
    if options["inputs"] is not None and options["layer"] is None and not by_model:
        raise typer.BadParameter(
            "--inputs needs --layer N or --against-model: weights alone take no input."
        )
    if by_model and any(options[name] for name in NAMES):
        raise typer.BadParameter("--against-model takes counts from the files: leave them out.")


def _compare_and_report(
    first: Path,
    second: Path | None,
    options: Mapping[str, Any],
    page: Path | None,
    *,
    as_json: bool,
) -> Diagnosis:
    start = time.perf_counter()
    if page is not None:
        from headwise.support.files import make_parent_and_require_writable

        make_parent_and_require_writable(page)
    diagnosis = _compare_files(first, second, options)
    lines = diagnosis.lines
    if second is not None and options["layer"] is None:
        suggested = suggest_comparison(diagnosis, first, second)
        lines = lines + ([suggested] if suggested else [])
    pages = [] if page is None else [_write_page(diagnosis, page, first, second, options)]
    print_result(
        *pages,
        start=start,
        show=lambda console: console.print(*lines, sep="\n", markup=False, soft_wrap=True),
        as_json=diagnosis.as_dict if as_json else None,
    )
    return diagnosis


def _compare_files(first: Path, second: Path | None, options: Mapping[str, Any]) -> Diagnosis:
    from headwise.cli.progress import progress_bar

    with progress_bar(stderr_console(), "loading torch") as progress:
        from headwise.checkpoints.attention import load_attention
        from headwise.diagnosis._compare import compare as compare_layers
        from headwise.diagnosis._verify import verify
        from headwise.diagnosis.subjects.recording import is_recording

        counts: Counts = {name: options[name] for name in NAMES}
        layer, inputs = options["layer"], options["inputs"]
        if second is None:
            from headwise.checkpoints.transformers import load

            model = load(options["against_model"]).model
            return compare_layers(first, model, _read_input_array(inputs))
        if layer is None:
            for path in filter(is_recording, (first, second)):
                raise typer.BadParameter(
                    f"{path} holds recorded activations: --layer N names the layer that they are "
                    "of."
                )
            settings: dict[str, Any] = {**counts, "progress": progress}
            return verify(first, second, **settings)
        mine, theirs = (
            path if is_recording(path) else load_attention(path, layer=layer, **counts)
            for path in (first, second)
        )
        return compare_layers(mine, theirs, _read_input_array(inputs))


def _read_input_array(path: Path | None) -> Any:
    """Return the array of a file; None without one."""
    if path is None:
        return None
    import numpy as np
    import torch

    if path.suffix != ".npy" or not path.exists():
        raise typer.BadParameter(f"--inputs {path}: name a file that numpy.save wrote, x.npy.")
    return torch.from_numpy(np.load(path, allow_pickle=False))


def _write_page(
    diagnosis: Diagnosis, page: Path, first: Path, second: Path | None, options: Mapping[str, Any]
) -> Path:
    from headwise.reports.diagnosis import DiagnosisReport, save_diagnosis_page

    given = {name: value for name, value in options.items() if value is not None}
    words = [f"{option_text(name)}={value}" for name, value in given.items()]
    stored = [first] if second is None else [first, second]
    call = shlex.join(["headwise", "compare", *map(str, stored), *words])
    prefix = "" if options["layer"] is None else f"layer {options['layer']} of "
    paths = (first, second or options["against_model"])
    names = [prefix + path.resolve().name for path in paths]
    report = DiagnosisReport(diagnosis=diagnosis, first=names[0], second=names[1], call=call)
    return save_diagnosis_page(report, page)
