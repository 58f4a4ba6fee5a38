"""Progress of long work, reported to a function of (stage, steps done, steps in all)."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]


def no_progress(stage: str, done: int, total: int) -> None:
    """Ignore the report."""
