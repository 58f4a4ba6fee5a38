"""Signs of life of a comparison, and its end before all is tried: by a budget or by Ctrl-C."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

from headwise.errors import OptionError
from headwise.support.progress import Progress, no_progress

QUIET = 2.0  # seconds without a sign of life
INTERRUPTED = "interrupted"


class OutOfTimeError(Exception):
    """The budget of a comparison is spent."""


STOPS = (OutOfTimeError, KeyboardInterrupt)


class Watch:
    """The time of a comparison, and the report of what it does.

    Attributes:
        stopped: the reason why the comparison ended before all was tried; "" for none.
        untried: what was left out, in words.
    """

    def __init__(self, budget: float | None, progress: Progress) -> None:
        self.start = time.monotonic()
        self.budget, self.progress = budget, progress
        self.stopped = ""
        self.untried: list[str] = []

    def is_spent(self, share: float = 1.0) -> bool:
        """True if a share of the budget is spent, or the caller interrupted."""
        seconds = time.monotonic() - self.start
        over = self.budget is not None and seconds > share * self.budget
        return over or bool(self.stopped)

    def stop(self, error: BaseException, untried: str) -> None:
        """Note that an interruption or the end of the budget left something out."""
        spent = f"the budget of {self.budget:g} s is spent" if self.budget is not None else ""
        self.stopped = self.stopped or (spent if isinstance(error, OutOfTimeError) else INTERRUPTED)
        self.untried += [untried] if untried not in self.untried else []


_NONE = Watch(None, no_progress)
_current: ContextVar[Watch] = ContextVar("watch", default=_NONE)


def current() -> Watch:
    """Return the watch of the comparison that runs."""
    return _current.get()


def look(stage: str = "", done: int = 0, total: int = 0) -> None:
    """Report what is tried, if anything; raise OutOfTimeError when the budget is spent."""
    watch = _current.get()
    if stage:
        watch.progress(stage, done, total)
    if (watch.stopped or watch.budget is not None) and watch.is_spent():
        raise OutOfTimeError


@contextmanager
def watching(budget: float | None, progress: Progress | None) -> Iterator[Watch]:
    """Watch a comparison; without a callback, a line on a terminal says what is tried.

    Raises:
        OptionError: a budget that is not positive.
    """
    if budget is not None and budget <= 0:
        raise OptionError(
            saw=f"budget={budget}",
            needed="seconds, more than 0",
            do="budget=60 stops after a minute; without it, everything is tried",
        )
    with ExitStack() as stack:
        if progress is None:
            progress = stack.enter_context(_line_on_terminal())
        token = _current.set(Watch(budget, progress))
        try:
            yield current()
        finally:
            _current.reset(token)


@contextmanager
def _line_on_terminal() -> Iterator[Progress]:
    """Yield a callback that draws one line on standard error, where somebody looks on."""
    if not sys.stderr.isatty():
        yield no_progress
        return
    from rich.console import Console
    from rich.status import Status

    status = Status("compare", console=Console(stderr=True))
    timer = threading.Timer(QUIET, status.start)
    timer.daemon = True

    def report(stage: str, done: int, total: int) -> None:
        counted = f", {done} of {total}" if total else ""
        status.update(f"compare: {stage}{counted}")

    timer.start()
    try:
        yield report
    finally:
        timer.cancel()
        timer.join()
        status.stop()
