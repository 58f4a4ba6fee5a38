"""The steps of a conversion, one after the other, from the files of one to those of the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType

from headwise.checkpoints import moving_bytes
from headwise.checkpoints.source import Source
from headwise.checkpoints.target import Outline
from headwise.checkpoints.working import Working
from headwise.layouts import convert
from headwise.layouts.steps import Step
from headwise.support.progress import Progress

EVERY = 256 * 2**20  # bytes after which what is written is put through to the disk


class Stream:
    """Writes tensors one step at a time; only those of one step are in memory."""

    def __init__(self, source: Source, made: Outline, working: Working) -> None:
        self._source, self._made, self._working = source, made, working
        self._handles: dict[Path, int] = {}

    def run(self, steps: Iterable[Step], progress: Progress) -> None:
        """Every step that an earlier run has not done.

        Raises:
            RoundTripError: a tensor does not lead back to the same bytes.
            CheckpointError: the source becomes shorter.
            OSError: reading or writing fails.
        """
        steps = list(steps)
        sizes = [self._size(step) for step in steps]
        total, done, unsure = sum(sizes), 0, 0
        waiting: list[int] = []
        # The files are closed last: until then the copies read from them.
        with ExitStack() as stack, _Disk(self._working) as disk:
            for number, (step, size) in enumerate(zip(steps, sizes, strict=True)):
                if number + 1 < len(steps) and number + 1 not in self._working.done:
                    self._fetch(steps[number + 1], stack)
                if number not in self._working.done:
                    self._step(step, stack, disk)
                    waiting, unsure = [*waiting, number], unsure + size
                if unsure >= EVERY:
                    disk.flush(waiting)
                    waiting, unsure = [], 0
                done += size
                progress(self._file(step), done, total)
            progress("waiting for the disk", total, total)
            disk.flush(waiting)

    def _step(self, step: Step, stack: ExitStack, disk: _Disk) -> None:
        stored = self._source.headers[step.inputs[0]]
        if step.is_copy and stored.offset is not None:
            # From file to file, where the tensor lies in one as it is.
            disk.copy(partial(self._copy, step, self._handle(stored.file, stack)))
            return
        made = convert.run(step, {name: self._source[name] for name in step.inputs})
        for name, tensor in made.items():
            assert (tuple(tensor.shape), tensor.dtype) == (tuple(step.outputs[name]), stored.dtype)
            file, offset = self._made.place(name)
            moving_bytes.write(self._working.handle(file.name), tensor, offset)

    def _fetch(self, step: Step, stack: ExitStack) -> None:
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

    def _copy(self, step: Step, handle: int) -> None:
        [given], [name] = step.inputs, step.outputs
        stored = self._source.headers[given]
        assert stored.offset is not None
        file, offset = self._made.place(name)
        moving_bytes.copy(
            handle,
            stored.offset,
            self._working.handle(file.name),
            offset,
            stored.nbytes,
            path=stored.file,
        )

    def _size(self, step: Step) -> int:
        return sum(self._source.headers[name].nbytes for name in step.inputs)

    def _file(self, step: Step) -> str:
        return next((self._made.place(name)[0].name for name in step.outputs), "")


class _Disk:
    """What is copied, and what is written through, while the next steps are at work."""

    def __init__(self, working: Working) -> None:
        self._working = working
        self._copier, self._flusher = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._copies: list[Future[None]] = []
        self._pending: Future[None] | None = None

    def copy(self, work: Callable[[], None]) -> None:
        """Ask for a copy, which the kernel makes by itself."""
        self._copies.append(self._copier.submit(work))

    def flush(self, steps: list[int]) -> None:
        """Wait for what was asked before, and have these written through, copies among them."""
        if self._pending is not None:
            self._pending.result()
        copies, self._copies = self._copies, []
        self._pending = self._flusher.submit(self._made_sure, steps, copies)

    def _made_sure(self, steps: list[int], copies: list[Future[None]]) -> None:
        for copy in copies:
            copy.result()
        self._working.flush(steps)

    def __enter__(self) -> _Disk:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._copier.shutdown(cancel_futures=kind is not None)
        self._flusher.shutdown(cancel_futures=kind is not None)
        if kind is None and self._pending is not None:
            self._pending.result()
