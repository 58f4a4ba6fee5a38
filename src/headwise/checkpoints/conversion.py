"""`convert_checkpoint`: a checkpoint in another layout, whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from headwise.checkpoints.folder import SAFETENSORS
from headwise.checkpoints.source import Source
from headwise.checkpoints.stream import Stream
from headwise.checkpoints.target import Outline, outline
from headwise.checkpoints.working import Working, require_free
from headwise.errors import CheckpointError
from headwise.layouts import convert
from headwise.layouts.layout import Layout
from headwise.layouts.places import Form
from headwise.layouts.plan import plan
from headwise.layouts.registry import layout
from headwise.layouts.steps import Step
from headwise.support.progress import Progress, no_progress


@dataclass(frozen=True)
class Converted:
    """What was done.

    Attributes:
        target: where it is.
        tensors: how many it has.
        rewritten: how many of them were taken apart, put together and compared with the source.
        nbytes: of its files.
        found: of an earlier run: "nothing", "its beginning", or "other work", which is gone.
        left: files beside the weights that were not copied: they describe the source.
    """

    target: Path
    tensors: int
    rewritten: int
    nbytes: int
    found: str
    left: tuple[str, ...]


def convert_checkpoint(
    source: Source,
    target: Path,
    source_layout: str | Layout,
    target_layout: str | Layout,
    *,
    accept: Iterable[str] = (),
    root: str | None = None,
    progress: Progress = no_progress,
    **known: int,
) -> Converted:
    """Write a checkpoint in another layout, as safetensors, in as many files as the source.

    Whatever is rewritten is moved back and compared byte for byte. The target appears under its
    name when it is whole. A run that was killed goes on where it was when it is started again, and
    ends in the same bytes. One that fails leaves nothing.

    Args:
        source: see `headwise.checkpoints.source.open_source`.
        target: a name that is free: of a folder if the source is one, else of a file. Folders above
            it that are missing are made.
        source_layout: the layout of the source, or its name.
        target_layout: the wanted one.
        accept: of what makes another function, what may differ: names of `Function`.
        root: what stands before all names of the target; that of the source if None.
        progress: told a file, and how many bytes of how many are done.
        known: heads, kv_heads, rotary_width, and what else no shape tells.

    Raises:
        CheckpointError: the target is there already or cannot be written, or the source changes.
        RoundTripError: a tensor does not lead back to the same bytes.
        HeadwiseError: see `headwise.layouts.plan.plan`.
    """
    target, accept = _place(source, target), tuple(accept)
    stored, wanted = layout(source_layout), layout(target_layout)
    steps = plan(source.headers, stored, wanted, accept=accept, form=Form(root=root), **known)
    made = outline(source, steps)
    asked = (metadata.version("headwise"), stored, wanted, accept, root, sorted(known.items()))
    with _refusing(target):
        _require_nothing_lost(source, steps)
        found = _written(source, target, steps, made, _identity(source, made, asked), progress)
    return Converted(
        target=target,
        tensors=sum(len(file.places) for file in made.files),
        rewritten=sum(len(step.outputs) for step in steps if not step.is_copy),
        nbytes=made.size,
        found=found,
        left=_left(source),
    )


def _require_nothing_lost(source: Source, steps: Iterable[Step]) -> None:
    """Biases that the target has no place for must be +0, and are looked at first."""
    for step in steps:
        if not step.outputs:
            convert.run(step, {name: source[name] for name in step.inputs})


def _written(
    source: Source,
    target: Path,
    steps: Sequence[Step],
    made: Outline,
    identity: str,
    progress: Progress,
) -> str:
    """Do it; nothing stays where it fails, and everything where it is interrupted."""
    with Working(target, made) as working:
        working.begin(identity)
        Stream(source, made, working).run(steps, progress)
        source.require_unchanged()
        working.finish(is_folder=source.is_folder)
    return working.found


def _place(source: Source, target: Path) -> Path:
    """Where the target goes, by a path without links and ``..``: a folder on it is made or used."""
    target = target.absolute()
    if target.name == "..":
        raise CheckpointError(
            saw=f"the target {target}, which ends in no name",
            needed="the name of a folder" if source.is_folder else "the name of a file",
            do="write its name at the end",
        )
    target = Path(os.path.realpath(target.parent)) / target.name
    require_free(target)
    if source.is_folder and target.is_relative_to(source.folder.resolve()):
        raise CheckpointError(
            saw=f"{target}, within the source {source.folder}",
            needed="a target outside: the source is not touched",
            do="name a folder beside it",
        )
    if source.is_folder == (target.suffix == SAFETENSORS):
        what = "a folder" if source.is_folder else f"a file, so one that ends in {SAFETENSORS}"
        name = target.stem if source.is_folder else target.name + SAFETENSORS
        raise CheckpointError(
            saw=f"the target {target.name}",
            needed=f"the name of {what}, as the source is one",
            do=str(target.with_name(name)),
        )
    return target


def _identity(source: Source, made: Outline, asked: object) -> str:
    """What makes two runs the same work."""
    found = hashlib.sha256(source.digest().encode("ascii"))
    found.update(repr(asked).encode("utf-8", "surrogateescape"))
    for file in made.files:
        found.update(repr((file.name, file.head)).encode("utf-8", "surrogateescape"))
    return found.hexdigest()


def _left(source: Source) -> tuple[str, ...]:
    if not source.is_folder:
        return ()
    files = sorted(file for file in source.folder.iterdir() if file.is_file())
    return tuple(file.name for file in files if file not in source.states)


@contextmanager
def _refusing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or target.parent
        raise CheckpointError(
            saw=f"{where}, where the system says: {error.strerror or error}",
            needed="files that can be read, and a disk that can be written to, with room",
            do="nothing was written under the target's name; make room or choose another place",
        ) from error
