"""``headwise compare``: whether two attentions are the same function, and why not."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.checkpoint_options import NAMES, Counts, HeadDim, Heads, KvHeads, RotaryWidth
from headwise.cli.output import NO, UNDECIDED, YES, option_text, print_result, stderr_console

if TYPE_CHECKING:
    from rich.console import Console

    from headwise.diagnosis.diagnosis_result import Diagnosis

LayerInput = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.npy",
        help="Input of the layer, (batch, tokens, width), as NumPy stores it.",
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
        Path, typer.Argument(show_default=False, help="The weights in doubt: a file or a folder.")
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
    if (second is None) == (against_model is None):
        raise typer.BadParameter("Name the second weights, or --against-model MODEL_DIR.")
    if against_model is not None and layer is not None:
        raise typer.BadParameter("--against-model runs every layer: leave out --layer.")
    if inputs is not None and layer is None:
        raise typer.BadParameter("--inputs needs --layer N: weights alone take no input.")
    counts = dict(zip(NAMES, (heads, kv_heads, head_dim, rotary_width), strict=True))
    if against_model is not None and any(counts.values()):
        raise typer.BadParameter("--against-model takes counts from the files: leave them out.")
    options = {"layer": layer, "inputs": inputs, "against_model": against_model, **counts}
    diagnosis = _compare_and_report(first, second, options, page, as_json=as_json)
    raise typer.Exit(_exit_status(diagnosis))


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
        from headwise.support.atomic_write import require_writable

        require_writable(page)
    diagnosis = _compare_files(first, second, options)
    pages = [] if page is None else [_write_page(diagnosis, page, first, second, options)]
    print_result(
        *pages,
        start=start,
        show=lambda console: _print_diagnosis(diagnosis, console),
        as_json=diagnosis.as_dict if as_json else None,
    )
    return diagnosis


def _compare_files(first: Path, second: Path | None, options: Mapping[str, Any]) -> Diagnosis:
    from headwise.cli.progress_bar import progress_bar

    with progress_bar(stderr_console(), "loading torch") as progress:
        from headwise.checkpoints.attention_loading import load_attention
        from headwise.diagnosis.compare import compare as compare_layers
        from headwise.diagnosis.verify import verify

        counts: Counts = {name: options[name] for name in NAMES}
        layer, inputs = options["layer"], options["inputs"]
        if second is None:
            from headwise.checkpoints.stored_model import load

            return compare_layers(first, load(options["against_model"]).model)
        if layer is None:
            settings: dict[str, Any] = {**counts, "progress": progress}
            return verify(first, second, **settings)
        mine, theirs = (load_attention(path, layer=layer, **counts) for path in (first, second))
        return compare_layers(mine, theirs, None if inputs is None else _read_input_array(inputs))


def _read_input_array(path: Path) -> Any:
    import numpy as np
    import torch

    if path.suffix != ".npy" or not path.exists():
        raise typer.BadParameter(f"--inputs {path}: name a file that numpy.save wrote, x.npy.")
    return torch.from_numpy(np.load(path, allow_pickle=False))


def _write_page(
    diagnosis: Diagnosis, page: Path, first: Path, second: Path | None, options: Mapping[str, Any]
) -> Path:
    from headwise.reports.diagnosis_page import DiagnosisReport, save_diagnosis_page

    given = {name: value for name, value in options.items() if value is not None}
    words = [f"{option_text(name)}={value}" for name, value in given.items()]
    stored = [first] if second is None else [first, second]
    call = shlex.join(["headwise", "compare", *map(str, stored), *words])
    prefix = "" if options["layer"] is None else f"layer {options['layer']} of "
    paths = (first, second or options["against_model"])
    names = [prefix + path.resolve().name for path in paths]
    report = DiagnosisReport(diagnosis=diagnosis, first=names[0], second=names[1], call=call)
    return save_diagnosis_page(report, page)


def _print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    for line in diagnosis.lines:
        console.print(line, markup=False, soft_wrap=True)


def _exit_status(diagnosis: Diagnosis) -> int:
    from headwise.diagnosis.diagnosis_result import Verdict

    if diagnosis.verdict is Verdict.INCONCLUSIVE:
        return UNDECIDED
    return YES if diagnosis else NO
