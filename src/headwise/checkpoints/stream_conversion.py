"""`convert_checkpoint`: atomic conversion of a checkpoint to another layout."""

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

from headwise.checkpoints import output_plan
from headwise.checkpoints.config import layout_name
from headwise.checkpoints.megatron_files import require_megatron, write_megatron_files
from headwise.checkpoints.meta_files import divides_columns, make_meta_params, write_meta_files
from headwise.checkpoints.output_plan import OutputPlan
from headwise.checkpoints.safetensors_file import KEY
from headwise.checkpoints.source import SAFETENSORS, CheckpointSource
from headwise.checkpoints.staging import StagingDir, require_unused_name
from headwise.checkpoints.stored_description import (
    Description,
    describe_target,
    layout_of_description,
    read_description,
    read_stored_config,
)
from headwise.errors import CheckpointError, OptionError
from headwise.layouts import convert
from headwise.layouts.conversion_plan import find_spec_conflicts, plan_conversion
from headwise.layouts.conversion_steps import ConversionStep
from headwise.layouts.layout import Layout
from headwise.layouts.module_names import NameForm, find_modules, locate_other_weight
from headwise.layouts.registry import layout
from headwise.layouts.shard_map import map_whole_tensors
from headwise.support.atomic_write import write_whole
from headwise.support.progress import Progress, no_progress

Files = Literal["safetensors", "meta", "megatron"]
FLUSH_SIZE = 256 * 2**20  # bytes between two flushes to the disk


@dataclass(frozen=True)
class ConversionReport:
    """Result of a conversion.

    Attributes:
        target: the path of the target.
        tensors: the number of tensors in the target.
        rewritten: how many of them were converted, converted back and compared with the source.
        nbytes: bytes of the target's files.
        earlier_run: files of an earlier run: "nothing", "its beginning", or "other work", removed.
        roots: prefixes before the module names of the layout.
        unchanged_names: names as in the source, because the target layout has no other names.
        accepted: fields of `AttentionSpec` that differ and were accepted -> (source, target).
        not_copied: files beside the weights that were not copied: they describe the source.
    """

    target: Path
    tensors: int
    rewritten: int
    nbytes: int
    earlier_run: str
    roots: tuple[str, ...]
    unchanged_names: tuple[str, ...]
    accepted: Mapping[str, tuple[str, str]]
    not_copied: tuple[str, ...]


def convert_checkpoint(
    source: CheckpointSource,
    target: Path,
    source_layout: str | Layout,
    target_layout: str | Layout,
    *,
    accept: Iterable[str] = (),
    root: str | None = None,
    files: Files = "safetensors",
    shards: int = 1,
    progress: Progress = no_progress,
    **known: int,
) -> ConversionReport:
    """Write a checkpoint in another layout, as safetensors in as many files as the source.

    Rewritten tensors are converted back and compared byte for byte. The target appears under its
    name only when it is complete, with a `Description` in its metadata. A run that was killed
    resumes when you start it again; a run that fails leaves nothing.

    Args:
        source: the checkpoint, see `headwise.checkpoints.source.open_source`.
        target: a new path: a file if the source is one and ``files`` "safetensors", else a folder.
        source_layout: the layout of the source, or its name.
        target_layout: the layout of the target, or its name.
        accept: fields of `AttentionSpec` that may differ between the layouts.
        root: the prefix of all names in the target; that of the source if None.
        files: "safetensors", or files of tensor-parallel processes: "meta" or "megatron".
        shards: the number of these processes.
        progress: called with a file's name, the bytes done, and the bytes in all.
        known: heads, kv_heads, rotary_width, and other counts that no shape gives.

    Raises:
        CheckpointError: the target exists already or cannot be written, or the source changes.
        RoundTripError: a tensor does not convert back to the same bytes.
        HeadwiseError: see `plan_conversion`, and `make_meta_params` for Meta's files.
    """
    _require_files(files, shards)
    target, accept = _require_usable_target(source, target, files), tuple(accept)
    before = layout_of_description(source_layout, read_description(source))
    after, form = layout(target_layout), NameForm(root=root)
    steps = plan_conversion(source.headers, before, after, accept=accept, form=form, **known)
    output = _plan_files(source, steps, _describe(source, before, after, known), files, shards)
    options = (before, after, accept, root, files, shards, sorted(known.items()))
    return ConversionReport(
        target=target,
        earlier_run=_write_target(source, target, steps, output, options, progress),
        **_report_tensors(source, steps, output, after),
        **_report_files(source, target),
        accepted=find_spec_conflicts(source.headers, before, after, known),
    )


def _describe(
    source: CheckpointSource, before: Layout, after: Layout, known: Mapping[str, int]
) -> Description:
    config = read_stored_config(source, read_description(source))
    return describe_target(source.headers, before, after, known, config)


def _plan_files(
    source: CheckpointSource,
    steps: Sequence[ConversionStep],
    description: Description,
    files: str,
    shards: int,
) -> OutputPlan:
    metadata = {KEY: description.encode()}
    if files == "safetensors":
        output = output_plan.plan_output(source, steps, metadata)
        is_its_own = layout_name(description.config) == description.layout.name
        loads = source.is_folder and is_its_own and output.is_found_by_transformers
        return replace(output, config=description.config_json() if loads else None)
    shapes = {name: tuple(shape) for step in steps for name, shape in step.outputs.items()}
    if files == "megatron":
        require_megatron(description.layout)
        division = map_whole_tensors(description.layout, shapes, shards, description.counts)
        return output_plan.plan_shares(source, steps, metadata, division)
    params = make_meta_params(description, shapes)
    by_columns = divides_columns(params, shapes)
    division = map_whole_tensors(
        description.layout, shapes, shards, description.counts, also=by_columns
    )
    return replace(output_plan.plan_shares(source, steps, metadata, division), params=params)


def _require_files(files: str, shards: int) -> None:
    if files not in get_args(Files):
        raise OptionError(
            saw=f"files={files!r:.60}",
            needed=" or ".join(map(repr, get_args(Files))),
            do='leave it out, or pass files="meta" for Meta\'s code',
        )
    if shards < 1 or (shards > 1 and files == "safetensors"):
        raise OptionError(
            saw=f"{{shards}} of {shards}, of {files} files",
            needed="1 for safetensors, and 1 or more for files of tensor-parallel processes",
            do="leave out {shards}, or choose the files of Meta's code or of Megatron-LM",
            parameter={"shards": ()},
        )


def _report_files(source: CheckpointSource, target: Path) -> dict[str, Any]:
    """Return the fields of `ConversionReport` about files."""
    written = filter(Path.is_file, target.rglob("*")) if target.is_dir() else [target]
    beside = sorted(source.folder.iterdir()) if source.is_folder else []
    others = (file.name for file in beside if file.is_file() and file not in source.states)
    not_copied = tuple(name for name in others if not (target / name).exists())
    return {"nbytes": sum(file.stat().st_size for file in written), "not_copied": not_copied}


def _report_tensors(
    source: CheckpointSource, steps: Iterable[ConversionStep], output: OutputPlan, target: Layout
) -> dict[str, Any]:
    """Return the fields of `ConversionReport` about tensors and their names."""
    names = list(dict.fromkeys(name for file in output.files for name in file.offsets))
    modules = find_modules(target, names)
    attention = {name for module in modules for name in module.tensors}
    roots = {module.place.root for module in modules}
    unchanged = (name for name in names if name in source.headers and name not in attention)
    shown = {module.place.root for module in modules if module.place.role and module.place.root}
    return {
        "tensors": len(names),
        "rewritten": sum(len(step.outputs) for step in steps if not step.is_copy),
        "roots": tuple(sorted(shown)),
        "unchanged_names": tuple(
            n for n in unchanged if locate_other_weight(target, n, roots) is None
        ),
    }


def _write_target(
    source: CheckpointSource,
    target: Path,
    steps: Sequence[ConversionStep],
    output: OutputPlan,
    options: object,
    progress: Progress,
) -> str:
    """Write the target, and return the state of an earlier run, see `StagingDir`."""
    try:
        for step in steps:
            if not step.outputs:  # checks that biases without a place in the target are +0
                convert.run_checked_step(step, {name: source[name] for name in step.inputs})
        with StagingDir(target, output) as staging:
            staging.begin(_hash_run_identity(source, output, options))
            ConversionStream(source, output, staging).run(steps, progress)
            source.require_unchanged()
            if output.division is not None:
                _write_shares(staging.files_path, output)
            if output.config is not None:
                write_whole(staging.files_path / "config.json", output.config)
            staging.finish(is_folder=source.is_folder or output.division is not None)
        return staging.earlier_run
    except OSError as error:
        raise CheckpointError(
            saw=f"{error.filename or target.parent}: {error.strerror or error}",
            needed="readable files, and a writable disk with enough free space",
            do="free disk space or choose another target; the target was not created",
        ) from error


def _write_shares(folder: Path, output: OutputPlan) -> None:
    """Replace the safetensors files of a folder by those of tensor-parallel processes."""
    names = [file.name for file in output.files]
    if output.params is None:
        write_megatron_files(folder, names)
    else:
        write_meta_files(folder, names, output.params)


def _require_usable_target(source: CheckpointSource, target: Path, files: str) -> Path:
    """Return the target's path without links and ``..``; raise CheckpointError if unusable."""
    target, is_folder = target.absolute(), source.is_folder or files != "safetensors"
    if target.name == "..":
        raise CheckpointError(
            saw=f"the target {target} ends in no name",
            needed="the name of a folder" if is_folder else "the name of a file",
            do="write its name at the end",
        )
    target = Path(os.path.realpath(target.parent)) / target.name
    require_unused_name(target)
    if source.is_folder and target.is_relative_to(source.folder.resolve()):
        raise CheckpointError(
            saw=f"the target {target} is within the source {source.folder}",
            needed="a target outside of the source",
            do="name a folder beside the source",
        )
    if is_folder == (target.suffix == SAFETENSORS):
        form = "a folder" if is_folder else f"a file, ending in {SAFETENSORS}"
        owner = "Megatron" if files == "megatron" else "Meta"
        reason = (
            "the source is one" if is_folder == source.is_folder else f"{owner}'s files need one"
        )
        name = target.stem if is_folder else target.name + SAFETENSORS
        raise CheckpointError(
            saw=f"the target {target.name}",
            needed=f"the name of {form}, because {reason}",
            do=str(target.with_name(name)),
        )
    return target


def _hash_run_identity(source: CheckpointSource, output: OutputPlan, options: object) -> str:
    """Return the hash that equal conversions share: of version, source, options and headers."""
    digest = hashlib.sha256(source.digest().encode("ascii"))
    digest.update(repr((metadata.version("headwise"), options)).encode("utf-8", "surrogateescape"))
    for file in output.files:
        digest.update(repr((file.name, file.head)).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


class ConversionStream:
    """Writer of converted tensors, with the tensors of only one step in memory.

    Two threads copy unchanged tensors and flush files while the next steps run.
    """

    def __init__(self, source: CheckpointSource, output: OutputPlan, staging: StagingDir) -> None:
        self._source, self._staging = source, staging
        self._output = output
        self._handles: dict[Path, int] = {}
        self._copier, self._flusher = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._copies: list[Future[None]] = []
        self._pending: Future[None] | None = None

    def run(self, steps: Sequence[ConversionStep], progress: Progress) -> None:
        """Run every step that an earlier run has not finished.

        Raises:
            RoundTripError: a tensor does not convert back to the same bytes.
            CheckpointError: the source becomes shorter.
            OSError: reading or writing fails.
        """
        headers = self._source.headers
        sizes = [sum(headers[name].nbytes for name in step.inputs) for step in steps]
        total, done, unflushed_size = sum(sizes), 0, 0
        unflushed: list[int] = []
        # close the files after the threads, which copy from them
        with ExitStack() as stack, self._stop_threads_at_exit():
            for number, (step, size) in enumerate(zip(steps, sizes, strict=True)):
                if number + 1 < len(steps) and number + 1 not in self._staging.done:
                    self._prefetch_inputs(steps[number + 1], stack)
                if number not in self._staging.done:
                    self._run_step(step, stack)
                    unflushed, unflushed_size = [*unflushed, number], unflushed_size + size
                if unflushed_size >= FLUSH_SIZE:
                    self._flush_in_background(unflushed)
                    unflushed, unflushed_size = [], 0
                done += size
                progress(self._output.file_of(step), done, total)
            progress("waiting for the disk", total, total)
            self._flush_in_background(unflushed)

    def _run_step(self, step: ConversionStep, stack: ExitStack) -> None:
        stored = self._source.headers[step.inputs[0]]
        if step.is_copy and stored.offset is not None and self._output.division is None:
            # copy from file to file, not through memory
            [(file, offset)] = self._output.file_offsets(*step.outputs)
            source, target = self._open_source_file(stored.file, stack), self._staging.handles[file]
            arguments = (source, stored.offset, target, offset, stored.nbytes, stored.file)
            self._copies.append(self._copier.submit(output_plan.copy_bytes, *arguments))
            return
        tensors = convert.run_checked_step(step, {name: self._source[name] for name in step.inputs})
        for name, tensor in tensors.items():
            assert (tuple(tensor.shape), tensor.dtype) == (tuple(step.outputs[name]), stored.dtype)
            parts = self._output.split_checked(name, tensor)
            for (file, offset), part in zip(self._output.file_offsets(name), parts, strict=True):
                handle = self._staging.handles[file]
                output_plan.write_all_bytes(handle, output_plan.tensor_bytes(part), offset)

    def _prefetch_inputs(self, step: ConversionStep, stack: ExitStack) -> None:
        """Start reading the inputs of a step from the disk while the step before it runs."""
        for stored in (self._source.headers[name] for name in step.inputs):
            if stored.offset is not None and stored.nbytes and hasattr(os, "posix_fadvise"):
                handle = self._open_source_file(stored.file, stack)
                os.posix_fadvise(handle, stored.offset, stored.nbytes, os.POSIX_FADV_WILLNEED)

    def _open_source_file(self, file: Path, stack: ExitStack) -> int:
        if file not in self._handles:
            self._handles[file] = os.open(file, os.O_RDONLY)
            stack.callback(os.close, self._handles[file])
        return self._handles[file]

    def _flush_in_background(self, steps: list[int]) -> None:
        """Wait for the flush before, then start one for these steps and the copies so far."""
        if self._pending is not None:
            self._pending.result()
        copies, self._copies = self._copies, []
        self._pending = self._flusher.submit(self._finish_copies, steps, copies)

    def _finish_copies(self, steps: list[int], copies: list[Future[None]]) -> None:
        for copying in copies:
            copying.result()
        self._staging.flush(steps)

    @contextmanager
    def _stop_threads_at_exit(self) -> Iterator[None]:
        """Stop the threads at the end of the block; on an error, cancel their pending work."""
        has_succeeded = False
        try:
            yield
            has_succeeded = True
        finally:
            for thread in (self._copier, self._flusher):
                thread.shutdown(cancel_futures=not has_succeeded)
        if self._pending is not None:
            self._pending.result()
