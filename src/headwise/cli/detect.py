"""``headwise detect``: which layout stored weights are in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.checkpoints import NAMES, Counts, HeadDim, Heads, KvHeads, RotaryWidth

if TYPE_CHECKING:
    from rich.console import Console

    from headwise.cli.checkpoints import Opened
    from headwise.huggingface.folder import StoredModel
    from headwise.layouts.detect import Candidate, Detection

LENGTH = 48  # tokens that a model is asked with


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
    runs decides. It is never guessed. Exit status: 0 one layout, 1 none, 2 several.
    """
    given = dict(zip(NAMES, (heads, kv_heads, head_dim, rotary_width), strict=True))
    raise typer.Exit(_detect(place, reference, against, given, as_json=as_json))


def _detect(
    place: Path, reference: Path | None, against: Path | None, given: Counts, *, as_json: bool
) -> int:
    from headwise.cli.checkpoints import in_options
    from headwise.cli.ending import aside
    from headwise.cli.progress import on_a_bar

    with in_options(), on_a_bar(aside(), "loading torch"):
        from rich.console import Console

        from headwise.cli.checkpoints import opened
        from headwise.layouts.checkpoint.counts import known_counts

        asked = opened(place, given)
        other = None if reference is None else opened(reference, given)
        stored = None if against is None else _loaded(against)
        shared = known_counts(stored.config, given, place=against) if stored and against else {}
        found = _found(asked, other, stored, shared, title=str(against))
    if as_json:
        import json

        typer.echo(json.dumps(_as_json(found), ensure_ascii=False))
    else:
        _show(place, found, Console(highlight=False, soft_wrap=True))
    return 0 if found.layout else min(2, len(found.candidates) + 1)


def _loaded(folder: Path) -> StoredModel:
    from headwise.huggingface.folder import load

    return load(folder)


def _found(
    asked: Opened,
    other: Opened | None,
    stored: StoredModel | None,
    shared: dict[str, int],
    *,
    title: str,
) -> Detection:
    """The same weights have the same counts: what is known of one is known of all."""
    from headwise.layouts.evidence import by_values

    shared = shared | (other.known if other else {})
    found = asked.detection(**shared)
    asked.require_fit(found, **shared)
    if other is not None:
        theirs = other.detection(**{**shared, **asked.known})
        found = by_values(found, asked.source, theirs, other.source)
    return found if stored is None else _by_behaviour(asked, found, stored, title)


def _by_behaviour(asked: Opened, found: Detection, stored: StoredModel, title: str) -> Detection:
    import torch

    from headwise.cli.on_tokens import on_tokens
    from headwise.scanning.behaviour import INSTEAD, by_behaviour

    length = min(LENGTH, stored.positions or LENGTH)
    ids = torch.randint(stored.vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    inputs = stored.inputs(ids)
    with on_tokens(title, length, do=INSTEAD), torch.no_grad():
        stored.model(**inputs)
    return by_behaviour(found, asked.source, stored.model, inputs, stored.config)


def _show(place: Path, found: Detection, console: Console) -> None:
    if found.layout is not None:
        group = found.candidates[0]
        names = " = ".join(one.layout.name for one in group)
        same = " (the same map and function here)" if len(group) > 1 else ""
        console.print(f"{place} is in the layout {names}{same}", markup=False)
        _print_reasons(group[0], console)
    elif found.candidates:
        several = f"{len(found.candidates)} layouts, which names and shapes cannot tell apart"
        unknown = f"the layout of a {found.unknown} model, which is not known; its names fit"
        saw = several if found.unknown is None else unknown
        console.print(f"{place} may be in {saw}:", markup=False)
        for group in found.candidates:
            console.print("  " + " = ".join(one.layout.name for one in group), markup=False)
            _print_reasons(group[0], console, indent="    ")
        console.print(
            "It is undecidable without a reference (--reference, the same weights elsewhere) or a "
            "forward check (--against, a model that runs).",
            markup=False,
        )
    elif found.refuted:
        console.print(
            f"{place} is in none of the layouts that its names and shapes fit: another model?",
            markup=False,
        )
    else:
        console.print(f"{place} holds no attention that the catalogue knows", markup=False)
    for name, why in found.refuted.items():
        console.print(f"  not {name}: {why}", markup=False)


def _print_reasons(one: Candidate, console: Console, indent: str = "  ") -> None:
    for reason in one.reasons:
        console.print(f"{indent}{reason}", markup=False)


def _as_json(found: Detection) -> dict[str, Any]:
    return {
        "layout": found.layout.name if found.layout else None,
        "candidates": [
            [
                {"layout": one.layout.name, "sizes": _sizes(one), "reasons": one.reasons}
                for one in group
            ]
            for group in found.candidates
        ],
        "refuted": dict(found.refuted),
        "unknown": found.unknown,
    }


def _sizes(one: Candidate) -> dict[str, int | list[int]]:
    """Each by its name: a number, or a list of all that fit."""
    names = dict.fromkeys(name for fit in one.fits for name in fit)
    values = {name: sorted({fit[name] for fit in one.fits if name in fit}) for name in names}
    return {name: some[0] if len(some) == 1 else some for name, some in values.items()}
