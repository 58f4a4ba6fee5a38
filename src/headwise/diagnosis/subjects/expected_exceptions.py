"""Errors of functions and models that do not take what they are given."""

from __future__ import annotations

# The code of callers may raise errors of its own classes; each is shown, and kept as the cause.
FAILURES: tuple[type[Exception], ...] = (Exception,)


def describe_error(error: Exception) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
