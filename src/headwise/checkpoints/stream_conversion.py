"""`convert_checkpoint`: a checkpoint in another layout, whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

from headwise.checkpoints.description import (
    KEY,
    Description,
    as_described,
    config_of,
    describe,
    description_of,
)
from headwise.checkpoints.meta_files import params_of, write_meta
from headwise.checkpoints.output_plan import OutputPlan, bytes_of, copy, outline, write_all
from headwise.checkpoints.source import SAFETENSORS, CheckpointSource
from headwise.checkpoints.staging import StagingDir, require_free
from headwise.errors import CheckpointError, OptionError
from headwise.layouts import convert
from headwise.layouts.conversion_plan import conflicts_of, plan
from headwise.layouts.conversion_steps import ConversionStep
from headwise.layouts.layout import Layout
from headwise.layouts.module_names import NameForm, modules_of, outside
from headwise.layouts.registry import layout
from headwise.support.progress import Progress, no_progress

Files = Literal["safetensors", "meta"]
EVERY = 256 * 2**20  # bytes after which what is written is put through to the disk


@dataclass(frozen=True)
class ConversionReport:
    """What was done.

    Attributes:
        target: where it is.
        tensors: how many it has.
        rewritten: how many of them were taken apart, put together and compared with the source.
        nbytes: of its files.
        found: of an earlier run: "nothing", "its beginning", or "other work", which is gone.
        roots: what stands before all names of modules at the places that the layout knows.
        kept: names that are those of the source, since the target's layout has no others.
        accepted: fields of `Function` that differ and were accepted -> (source, target).
        left: files beside the weights that were not copied: they describe the source.
    """

    target: Path
    tensors: int
    rewritten: int
    nbytes: int
    found: str
    roots: tuple[str, ...]
    kept: tuple[str, ...]
    accepted: Mapping[str, tuple[str, str]]
    left: tuple[str, ...]


def convert_checkpoint(
    source: CheckpointSource,
    target: Path,
    source_layout: str | Layout,
    target_layout: str | Layout,
    *,
    accept: Iterable[str] = (),
    root: str | None = None,
    files: Files = "safetensors",
    progress: Progress = no_progress,
    **known: int,
) -> ConversionReport:
    """Write a checkpoint in another layout, as safetensors in as many files as the source.

    Whatever is rewritten is moved back and compared byte for byte. The target appears under its
    name when it is whole, and states what it is: see `headwise.checkpoints.description`. A run that
    was killed is continued when it is started again; one that fails leaves nothing.

    Args:
        source: see `headwise.checkpoints.source.open_source`.
        target: a name that is free: of a folder if the source is one or Meta's, else of a file.
        source_layout: the layout of the source, or its name.
        target_layout: the wanted one.
        accept: of what makes another function, what may differ: names of `Function`.
        root: what stands before all names of the target; that of the source if None.
        files: "safetensors", or "meta": a folder with what Meta's code loads.
        progress: told a file, and how many bytes of how many are done.
        known: heads, kv_heads, rotary_width, and what else no shape tells.

    Raises:
        CheckpointError: the target is there already or cannot be written, or the source changes.
        RoundTripError: a tensor does not lead back to the same bytes.
        HeadwiseError: see `layouts.conversion_plan.plan`, and `params_of` for Meta's files.
    """
    target, accept = _place(source, target, files), tuple(accept)
    description = description_of(source)
    stored, wanted = as_described(source_layout, description), layout(target_layout)
    steps = plan(source.headers, stored, wanted, accept=accept, form=NameForm(root=root), **known)
    about = describe(source.headers, stored, wanted, known, config_of(source, description))
    made = _outline(source, steps, about, files)
    work = (stored, wanted, accept, root, files, sorted(known.items()))
    found = _written(source, target, steps, made, _identity(source, made, work), progress)
    return ConversionReport(
        target=target,
        found=found,
        **_tensors(source, steps, made, wanted),
        **_files(source, target),
        accepted=conflicts_of(source.headers, stored, wanted, known),
    )


def _outline(
    source: CheckpointSource, steps: Sequence[ConversionStep], about: Description, files: str
) -> OutputPlan:
    if files not in get_args(Files):
        raise OptionError(
            saw=f"files={files!r:.60}",
            needed=" or ".join(map(repr, get_args(Files))),
            do='leave it out, or give files="meta" for what Meta\'s code loads',
        )
    made = outline(source, steps, {KEY: about.encode()})
    if files == "safetensors":
        return made
    shapes = {name: shape for step in steps for name, shape in step.outputs.items()}
    return replace(made, index=None, params=params_of(about, shapes))


def _files(source: CheckpointSource, target: Path) -> dict[str, Any]:
    """What `ConversionReport` says of files."""
    made = target.iterdir() if target.is_dir() else [target]
    beside = sorted(source.folder.iterdir()) if source.is_folder else []
    left = (file.name for file in beside if file.is_file() and file not in source.states)
    return {"nbytes": sum(file.stat().st_size for file in made), "left": tuple(left)}


def _tensors(
    source: CheckpointSource, steps: Iterable[ConversionStep], made: OutputPlan, wanted: Layout
) -> dict[str, Any]:
    """What `ConversionReport` says of the tensors of the target, and of their names."""
    names = [name for file in made.files for name in file.places]
    modules = modules_of(wanted, names)
    own = {name for module in modules for name in module.tensors}
    roots = {module.place.root for module in modules}
    kept = (name for name in names if name in source.headers and name not in own)
    named = {module.place.root for module in modules if module.place.role and module.place.root}
    return {
        "tensors": len(names),
        "rewritten": sum(len(step.outputs) for step in steps if not step.is_copy),
        "roots": tuple(sorted(named)),
        "kept": tuple(name for name in kept if outside(wanted, name, roots) is None),
    }


def _written(
    source: CheckpointSource,
    target: Path,
    steps: Sequence[ConversionStep],
    made: OutputPlan,
    identity: str,
    progress: Progress,
) -> str:
    """Do it; nothing stays where it fails, and everything where it is interrupted."""
    try:
        for step in steps:
            if not step.outputs:  # biases that the target has no place for must be +0
                convert.run(step, {name: source[name] for name in step.inputs})
        with StagingDir(target, made) as working:
            working.begin(identity)
            ConversionStream(source, made, working).run(steps, progress)
            source.require_unchanged()
            if made.params is not None:
                write_meta(working.made, [file.name for file in made.files], made.params)
            working.finish(is_folder=source.is_folder or made.params is not None)
        return working.found
    except OSError as error:
        where = error.filename or target.parent
        raise CheckpointError(
            saw=f"{where}, where the system says: {error.strerror or error}",
            needed="files that can be read, and a disk that can be written to, with room",
            do="nothing was written under the target's name; make room or choose another place",
        ) from error


def _place(source: CheckpointSource, target: Path, files: str) -> Path:
    """Where the target goes, by a path without links and ``..``: a folder on it is made or used."""
    target, is_folder = target.absolute(), source.is_folder or files == "meta"
    if target.name == "..":
        raise CheckpointError(
            saw=f"the target {target}, which ends in no name",
            needed="the name of a folder" if is_folder else "the name of a file",
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
    if is_folder == (target.suffix == SAFETENSORS):
        what = "a folder" if is_folder else f"a file, so one that ends in {SAFETENSORS}"
        whose = "the source is one" if is_folder == source.is_folder else "Meta's files need one"
        name = target.stem if is_folder else target.name + SAFETENSORS
        raise CheckpointError(
            saw=f"the target {target.name}",
            needed=f"the name of {what}, as {whose}",
            do=str(target.with_name(name)),
        )
    return target


def _identity(source: CheckpointSource, made: OutputPlan, work: object) -> str:
    """What makes two runs the same work."""
    found = hashlib.sha256(source.digest().encode("ascii"))
    found.update(repr((metadata.version("headwise"), work)).encode("utf-8", "surrogateescape"))
    for file in made.files:
        found.update(repr((file.name, file.head)).encode("utf-8", "surrogateescape"))
    return found.hexdigest()


class ConversionStream:
    """Writes tensors one step at a time; only those of one step are in memory.

    What is copied by the kernel, and what is written through, is so in threads of their own while
    the next steps are at work.
    """

    def __init__(self, source: CheckpointSource, made: OutputPlan, working: StagingDir) -> None:
        self._source, self._working = source, working
        self._files = {name: file for file in made.files for name in file.places}
        self._handles: dict[Path, int] = {}
        self._copier, self._flusher = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._copies: list[Future[None]] = []
        self._pending: Future[None] | None = None

    def run(self, steps: Sequence[ConversionStep], progress: Progress) -> None:
        """Every step that an earlier run has not done.

        Raises:
            RoundTripError: a tensor does not lead back to the same bytes.
            CheckpointError: the source becomes shorter.
            OSError: reading or writing fails.
        """
        headers = self._source.headers
        sizes = [sum(headers[name].nbytes for name in step.inputs) for step in steps]
        total, done, unsure = sum(sizes), 0, 0
        waiting: list[int] = []
        # The files are closed last: until then the copies read from them.
        with ExitStack() as stack, self._threads():
            for number, (step, size) in enumerate(zip(steps, sizes, strict=True)):
                if number + 1 < len(steps) and number + 1 not in self._working.done:
                    self._fetch(steps[number + 1], stack)
                if number not in self._working.done:
                    self._step(step, stack)
                    waiting, unsure = [*waiting, number], unsure + size
                if unsure >= EVERY:
                    self._flush(waiting)
                    waiting, unsure = [], 0
                done += size
                progress(next((self._files[n].name for n in step.outputs), ""), done, total)
            progress("waiting for the disk", total, total)
            self._flush(waiting)

    def _step(self, step: ConversionStep, stack: ExitStack) -> None:
        stored = self._source.headers[step.inputs[0]]
        if step.is_copy and stored.offset is not None:
            # From file to file, where the tensor lies in one as it is.
            source, (handle, offset) = self._handle(stored.file, stack), self._place(*step.outputs)
            given = (source, stored.offset, handle, offset, stored.nbytes, stored.file)
            self._copies.append(self._copier.submit(copy, *given))
            return
        made = convert.run(step, {name: self._source[name] for name in step.inputs})
        for name, tensor in made.items():
            assert (tuple(tensor.shape), tensor.dtype) == (tuple(step.outputs[name]), stored.dtype)
            handle, offset = self._place(name)
            write_all(handle, bytes_of(tensor), offset)

    def _place(self, name: str) -> tuple[int, int]:
        """The open file of a tensor of the target, and its first byte there."""
        file = self._files[name]
        return self._working.handles[file.name], file.places[name]

    def _fetch(self, step: ConversionStep, stack: ExitStack) -> None:
        """Let the disk read what a step needs while another one is at work."""
        for stored in (self._source.headers[name] for name in step.inputs):
            if stored.offset is not None and stored.nbytes and hasattr(os, "posix_fadvise"):
                handle = self._handle(stored.file, stack)
                os.posix_fadvise(handle, stored.offset, stored.nbytes, os.POSIX_FADV_WILLNEED)

    def _handle(self, file: Path, stack: ExitStack) -> int:
        if file not in self._handles:
            self._handles[file] = os.open(file, os.O_RDONLY)
            stack.callback(os.close, self._handles[file])
        return self._handles[file]

    def _flush(self, steps: list[int]) -> None:
        """Wait for what was asked before, and have these written through, copies among them."""
        if self._pending is not None:
            self._pending.result()
        copies, self._copies = self._copies, []
        self._pending = self._flusher.submit(self._made_sure, steps, copies)

    def _made_sure(self, steps: list[int], copies: list[Future[None]]) -> None:
        for waiting in copies:
            waiting.result()
        self._working.flush(steps)

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Until the block ends; what waits in them goes where it fails."""
        is_whole = False
        try:
            yield
            is_whole = True
        finally:
            for thread in (self._copier, self._flusher):
                thread.shutdown(cancel_futures=not is_whole)
        if self._pending is not None:
            self._pending.result()
