"""`convert_checkpoint`: atomic conversion of a checkpoint to another layout, file by file."""

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from headwise.checkpoints import foreign, safetensors
from headwise.checkpoints import plan as plans
from headwise.checkpoints.plan import Files, OutputFile, WritePlan
from headwise.checkpoints.source import CheckpointSource, explained_os_errors
from headwise.checkpoints.staging import PartialFile, StagingDir, write_synced
from headwise.function.weights import State
from headwise.layouts._layout import Layout
from headwise.layouts.plan import ConversionStep, run_round_trip_checked_step
from headwise.support.progress import Progress, no_progress

NEEDED = "readable files, and a writable disk with enough free space"
FREE_SPACE = "free disk space or choose another target; the target was not created"


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
    verify: bool = False,
    progress: Progress = no_progress,
    **known: int,
) -> plans.ConversionReport:
    """Write a checkpoint in another layout, as safetensors in as many files as the source.

    Rewritten tensors are converted back and compared byte for byte. The target appears under its
    name only when it is complete, with a `Description` in its metadata. A run that was killed
    resumes with the first unfinished file when you start it again; a run that fails leaves nothing.

    Args:
        source: the checkpoint, see `headwise.checkpoints.source.open_source`.
        target: a new path: a file if the source is one and ``files`` "safetensors", else a folder.
        source_layout: the layout of the source, or its name.
        target_layout: the layout of the target, or its name.
        accept: settings of `AttentionSpec` that may differ between the layouts.
        root: the prefix of all names in the target; as its layout or the source has it if None.
        files: "safetensors", or files of tensor-parallel processes: "meta" or "megatron".
        shards: the number of these processes.
        verify: True to read each file again, also of an earlier run, and compare its CRC-32.
        progress: called with a file's name, the bytes done, and the bytes in all.
        known: heads, kv_heads, rotary_width, and other counts that no shape gives.

    Raises:
        CheckpointError: the target exists already or cannot be written, or the source changes.
        RoundTripError: a tensor does not convert back to the same bytes.
        HeadwiseError: see `plan_conversion`, and `make_meta_params` for Meta's files.
    """
    options: dict[str, Any] = {"accept": accept, "root": root, "files": files, "shards": shards}
    options |= known
    plan = plans.plan_checkpoint_conversion(source, target, source_layout, target_layout, **options)
    with explained_os_errors(plan.target.parent, problem="", needed=NEEDED, do=FREE_SPACE):
        for step in (step for step in plan.steps if not step.outputs):  # biases left out, if +0
            _convert(source, step)
    return plans.report_conversion(plan, write_target(plan, progress, verify=verify))


def write_target(plan: WritePlan, progress: Progress, *, verify: bool = False) -> str:
    """Write the files of a plan, all or none; return what `StagingDir.earlier_run` was."""
    with (
        explained_os_errors(plan.target.parent, problem="", needed=NEEDED, do=FREE_SPACE),
        StagingDir(plan.target, plan.output.peak_size) as staging,
    ):
        staging.begin(plan.identity)
        _write_files(plan, staging, progress, verify=verify)
        plan.source.require_unchanged()
        staging.finish(_complete_files(plan, staging))
    return staging.earlier_run


def _write_files(plan: WritePlan, staging: StagingDir, progress: Progress, *, verify: bool) -> None:
    """Write the files that an earlier run has not finished.

    Another thread reads what is written for its checksum, and forces finished files to the disk.
    """
    done, total = 0, plan.output.nbytes
    with ExitStack() as stack, _background_thread() as run_later:
        for files in plan.output.shards:
            name = files[0].name
            if all(staging.is_finished(file.name, verify=verify) for file in files):
                done += sum(file.nbytes for file in files)
                progress(name, done, total)
                continue
            parts = [PartialFile(staging.path / f"{file.name}.part") for file in files]
            for part in parts:
                stack.callback(part.close)
            for size in _write_steps(plan, files, parts):
                for part in parts:
                    run_later(part.checksum, part.size)
                done += size
                progress(name, done, total)
            for part in parts:
                run_later(partial(staging.finish_file, part, verify=verify))
        progress("waiting for the disk", total, total)


@contextmanager
def _background_thread() -> Iterator[Callable[..., None]]:
    """Yield a function that runs others in a thread, in order; at the end, wait for all of them.

    On an error, those that have not begun are cancelled.
    """
    pending: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1) as pool:

        def run_later(function: Callable[..., None], *arguments: object) -> None:
            while pending and pending[0].done():
                pending.popleft().result()
            pending.append(pool.submit(function, *arguments))

        try:
            yield run_later
            for running in pending:
                running.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _write_steps(
    plan: WritePlan, files: Sequence[OutputFile], parts: Sequence[PartialFile]
) -> Iterator[int]:
    """Write the tensors of each step into the files of a shard, and yield their bytes."""
    for file, part in zip(files, parts, strict=True):
        part.write(file.head)
    headers, names, steps = plan.source.headers, iter(files[0].tensors), files[0].steps
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if following is not None:
            _prefetch(headers[name] for name in following.inputs)
        before, first = sum(part.size for part in parts), headers[step.inputs[0]]
        if step.is_copy and first.offset is not None and plan.output.division is None:
            next(names)
            parts[0].append_range(first.file, first.offset, first.nbytes)
        else:
            tensors = _convert(plan.source, step)
            for name in islice(names, len(step.outputs)):
                assert tensors[name].dtype == first.dtype
                assert tuple(tensors[name].shape) == tuple(step.outputs[name])
                for part, share in zip(parts, plan.output.divide(name, tensors[name]), strict=True):
                    part.write(safetensors.tensor_bytes(share))
        yield sum(part.size for part in parts) - before


def _convert(source: CheckpointSource, step: ConversionStep) -> State:
    """Run a step and its inverse, compare the bytes, and return its tensors."""
    return run_round_trip_checked_step(step, {name: source[name] for name in step.inputs})


def _prefetch(tensors: Iterable[safetensors.StoredTensor]) -> None:
    for stored in tensors:
        if stored.offset is not None and stored.nbytes and hasattr(os, "posix_fadvise"):
            with stored.file.open("rb") as file:
                place = stored.offset, stored.nbytes
                os.posix_fadvise(file.fileno(), *place, os.POSIX_FADV_WILLNEED)


def _complete_files(plan: WritePlan, staging: StagingDir) -> Path:
    output, folder = plan.output, staging.files_path
    if output.division is not None:
        shares = [safetensors.read_safetensors_header(folder / file.name) for file in output.files]
        target = staging.path / "target"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        if output.params is None:
            foreign.write_megatron_files(target, shares)
        else:
            foreign.write_meta_files(target, shares, output.params)
        return target
    if output.index is not None:
        write_synced(folder / output.index[0], output.index[1])
    for name, content in output.beside.items():
        made = folder / name
        made.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, made)
        else:
            write_synced(made, content)
    return folder if plan.source.is_folder else folder / output.files[0].name
