"""The steps of a conversion, one after the other, from the files of one to those of the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from headwise.layouts import convert
from headwise.layouts.checkpoint import moving_bytes
from headwise.layouts.checkpoint.source import Source
from headwise.layouts.checkpoint.target import Outline
from headwise.layouts.checkpoint.working import Working
from headwise.layouts.plan import Step

EVERY = 256 * 2**20  # bytes after which what is written is made sure of
Progress = Callable[[str, int, int], None]


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
        with ExitStack() as stack:
            sure = stack.enter_context(_Sure(self._working))
            for number, (step, size) in enumerate(zip(steps, sizes, strict=True)):
                for later in steps[number + 1 : number + 2]:
                    self._fetch(later, stack)
                if number not in self._working.done:
                    self._step(step, stack)
                    waiting, unsure = [*waiting, number], unsure + size
                if unsure >= EVERY:
                    sure.of(waiting)
                    waiting, unsure = [], 0
                done += size
                progress(self._file(step), done, total)
            progress("waiting for the disk", total, total)
            sure.of(waiting)

    def _step(self, step: Step, stack: ExitStack) -> None:
        if step.is_copy and self._copied(step, stack):
            return
        made = convert.run(step, {name: self._source[name] for name in step.inputs})
        for name, tensor in made.items():
            dtype = self._source.headers[step.inputs[0]].dtype
            assert (tuple(tensor.shape), tensor.dtype) == (tuple(step.outputs[name]), dtype)
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

    def _copied(self, step: Step, stack: ExitStack) -> bool:
        """Copy from file to file where the tensor lies in one as it is."""
        [given], [name] = step.inputs, step.outputs
        stored = self._source.headers[given]
        if stored.offset is None:
            return False
        file, offset = self._made.place(name)
        moving_bytes.copy(
            self._handle(stored.file, stack),
            stored.offset,
            self._working.handle(file.name),
            offset,
            stored.nbytes,
            path=stored.file,
        )
        return True

    def _size(self, step: Step) -> int:
        return sum(self._source.headers[name].nbytes for name in step.inputs)

    def _file(self, step: Step) -> str:
        return next((self._made.place(name)[0].name for name in step.outputs), "")


class _Sure:
    """Makes sure of what is written while the next steps are at work."""

    def __init__(self, working: Working) -> None:
        self._working = working
        self._pool = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def of(self, steps: list[int]) -> None:
        """Wait for what was asked before, and ask for these."""
        if self._pending is not None:
            self._pending.result()
        self._pending = self._pool.submit(self._working.flush, steps)

    def __enter__(self) -> _Sure:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown()
        if kind is None and self._pending is not None:
            self._pending.result()
