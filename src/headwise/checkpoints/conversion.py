"""`convert_checkpoint`: atomic conversion of a checkpoint to another layout."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from headwise.checkpoints import output as output_plan
from headwise.checkpoints.output import OutputPlan
from headwise.checkpoints.plan import ConversionReport, Files, plan_checkpoint_conversion
from headwise.checkpoints.source import CheckpointSource
from headwise.checkpoints.staging import StagingDir, StagingShare
from headwise.layouts import _convert as convert
from headwise.layouts._layout import Layout
from headwise.layouts.steps import ConversionStep
from headwise.support.progress import Progress, no_progress

FLUSH_SIZE = 256 * 2**20  # bytes between two flushes to the disk


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
        accept: settings of `AttentionSpec` that may differ between the layouts.
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
    options: dict[str, Any] = {"accept": accept, "root": root, "files": files, "shards": shards}
    options |= known
    conversion = plan_checkpoint_conversion(source, target, source_layout, target_layout, **options)
    with conversion.explain_os_errors():
        conversion.require_zero_dropped_biases()
        with StagingDir(conversion.target, conversion.output) as staging:
            staging.begin(conversion.identity)
            stream = ConversionStream(source, conversion.output, staging)
            stream.run(conversion.steps, progress)
            conversion.complete(staging)
    return conversion.report(staging.earlier_run)


class ConversionStream:
    """Writer of converted tensors, with the tensors of only one step in memory.

    Two threads copy unchanged tensors and flush files while the next steps run.
    """

    def __init__(
        self, source: CheckpointSource, output: OutputPlan, staging: StagingDir | StagingShare
    ) -> None:
        self._source, self._staging = source, staging
        self._output = output
        self._handles: dict[Path, int] = {}
        self._copier, self._flusher = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._copies: list[Future[None]] = []
        self._pending: Future[None] | None = None

    def run(
        self,
        steps: Sequence[ConversionStep],
        progress: Progress,
        *,
        chosen: Collection[int] | None = None,
    ) -> None:
        """Run every step that an earlier run has not finished.

        Args:
            steps: all steps of the conversion.
            progress: called with a file's name, the bytes done, and the bytes in all.
            chosen: the numbers of the steps to run; all if None.

        Raises:
            RoundTripError: a tensor does not convert back to the same bytes.
            CheckpointError: the source becomes shorter.
            OSError: reading or writing fails.
        """
        headers = self._source.headers
        numbered = [(n, step) for n, step in enumerate(steps) if chosen is None or n in chosen]
        sizes = [sum(headers[name].nbytes for name in step.inputs) for _, step in numbered]
        total, done, unflushed_size = sum(sizes), 0, 0
        unflushed: list[int] = []
        following = [*numbered[1:], None][: len(numbered)]
        # close the files after the threads, which copy from them
        with ExitStack() as stack, self._stop_threads_at_exit():
            for (number, step), after, size in zip(numbered, following, sizes, strict=True):
                if after is not None and after[0] not in self._staging.done:
                    self._prefetch_inputs(after[1], stack)
                if number not in self._staging.done:
                    self._run_step(step, stack)
                    unflushed, unflushed_size = [*unflushed, number], unflushed_size + size
                if unflushed_size >= FLUSH_SIZE:
                    self._flush_in_background(unflushed)
                    unflushed, unflushed_size = [], 0
                done += size
                progress(self._output.file_of_step(step), done, total)
            progress("waiting for the disk", total, total)
            self._flush_in_background(unflushed)

    def _run_step(self, step: ConversionStep, stack: ExitStack) -> None:
        stored = self._source.headers[step.inputs[0]]
        if step.is_copy and stored.offset is not None and self._output.division is None:
            # copy from file to file, not through memory
            [(file, offset)] = self._output.locate_tensor_in_files(*step.outputs)
            source, target = self._open_source_file(stored.file, stack), self._staging.handles[file]
            arguments = (source, stored.offset, target, offset, stored.nbytes, stored.file)
            self._copies.append(self._copier.submit(output_plan.copy_bytes, *arguments))
            return
        tensors = convert.run_round_trip_checked_step(
            step, {name: self._source[name] for name in step.inputs}
        )
        for name, tensor in tensors.items():
            assert (tuple(tensor.shape), tensor.dtype) == (tuple(step.outputs[name]), stored.dtype)
            parts = self._output.split_tensor_into_verified_shares(name, tensor)
            for (file, offset), part in zip(
                self._output.locate_tensor_in_files(name), parts, strict=True
            ):
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
        self._pending = self._flusher.submit(self._finish_copies_and_record_steps, steps, copies)

    def _finish_copies_and_record_steps(self, steps: list[int], copies: list[Future[None]]) -> None:
        for copying in copies:
            copying.result()
        self._staging.flush_and_record_steps(steps)

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
