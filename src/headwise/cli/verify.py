"""``headwise verify``: byte-for-byte comparison of two stored checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli import output
from headwise.support.files import make_parent_and_require_writable

SHOWN = 8  # tensors; more are only counted
DIGESTS = ".json"
SCHEMA = 1  # version of the JSON form of an answer about digests
LayoutName = Annotated[str | None, typer.Option(show_default="what the files leave possible")]


@output.takes_counts
def verify(
    first: Annotated[Path, typer.Argument(show_default=False, help="A file or folder of weights.")],
    second: Annotated[
        Path | None,
        typer.Argument(show_default=False, help="Likewise, or digests: a file that ends in .json."),
    ] = None,
    *,
    first_layout: LayoutName = None,
    second_layout: LayoutName = None,
    outputs: Annotated[
        bool, typer.Option("--outputs", help="Run every layer of both in float64 as well.")
    ] = False,
    write_digests: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Store the SHA-256 of every tensor of FIRST in a new file; with SECOND, only if "
            "both are the same function.",
            show_default=False,
        ),
    ] = None,
    counts: output.Counts,
    as_json: output.AsJson = False,
) -> None:
    """Compare two checkpoints byte for byte.

    The first is converted to the layout of the second, tensor by tensor. With
    digests as the second, every byte of the first must be as when they were
    written.
    """
    layouts = (first_layout, second_layout)
    if second is None and write_digests is None:
        raise typer.BadParameter("Name SECOND, to compare with, or --write-digests FILE.json.")
    made_folder = "" if write_digests is None else _require_new(write_digests)
    if second is None or _is_digests(second):
        if outputs or any(value is not None for value in (*layouts, *counts.values())):
            raise typer.BadParameter("Digests need no options of layouts, counts and outputs.")
        status, lines = (output.YES, []) if second is None else _verify_digests(first, second)
        result: dict[str, Any] = {"schema": SCHEMA, "same": status == output.YES}
    else:
        status, result, lines = _run_verification(first, second, layouts, counts, outputs=outputs)
    if write_digests is not None and not status:
        lines += _write_digests_file(first, write_digests, made_folder)
    output.print_lines(lines, {**result, "lines": lines} if as_json else None)
    raise typer.Exit(status)


def _is_digests(path: Path) -> bool:
    from headwise.checkpoints.source import INDEX

    return path.suffix == DIGESTS and not path.name.endswith(INDEX)


def _require_new(path: Path) -> str:
    """Return a line on the folder that is made for a new file of digests, or "".

    Raises:
        BadParameter: the name is not that of digests, or is used.
    """
    from headwise.checkpoints.staging import require_unused_name

    if not _is_digests(path):
        raise typer.BadParameter(
            f"--write-digests {path}: name a file that ends in {DIGESTS}; verify recognizes "
            "digests by that ending."
        )
    require_unused_name(path)
    made_folder = output.created_folder_note(path)
    make_parent_and_require_writable(path)
    return made_folder


def _write_digests_file(weights: Path, path: Path, made_folder: str) -> list[str]:
    from headwise.checkpoints import safetensors, source

    made = safetensors.compute_digests(source.open_source(weights))
    written = f"{len(made)} digests: {safetensors.write_digests(path, made)}"
    return [*filter(None, [made_folder]), written]


def _verify_digests(weights: Path, path: Path) -> tuple[int, list[str]]:
    from headwise.checkpoints import safetensors, source

    before = safetensors.read_digests(path)
    now = safetensors.compute_digests(source.open_source(weights))
    names = {**before, **now}
    changed = [name for name in names if before.get(name) != now.get(name)]
    lines = []
    for name in changed[:SHOWN]:
        word = "changed" if name in before and name in now else "gone" if name in before else "new"
        lines.append(f"  {name}: {word}")
    if len(changed) > SHOWN:
        lines.append(f"  and {len(changed) - SHOWN} more")
    unchanged = len(names) - len(changed)
    answer = (
        f"Not the same: {unchanged} of {len(names)}" if changed else f"The same: all {unchanged}"
    )
    lines.append(f"{answer} tensors are as in the digests.")
    return output.NO if changed else output.YES, lines


def _run_verification(
    first: Path,
    second: Path,
    layouts: tuple[str | None, str | None],
    counts: output.Counts,
    *,
    outputs: bool,
) -> tuple[int, dict[str, Any], list[str]]:
    with output.progress_bar(output.make_console(stderr=True), "loading torch") as progress:
        from headwise.identify._verify import verify as compare_weights

        named = dict(zip(("first_layout", "second_layout"), layouts, strict=True))
        settings = {**counts, **named, "outputs": outputs, "progress": progress}
        diagnosis = compare_weights(first, second, **settings)
    lines = [*diagnosis.lines, *output.suggest_comparison(diagnosis, first, second)]
    return output.exit_status_of_diagnosis(diagnosis), diagnosis.as_dict(), lines
