"""Errors of functions and models that do not take what they are given."""

from __future__ import annotations

# An error of a model. headwise's own code runs beside it, so others are left as they are.
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
    Warning,  # where a filter makes errors of warnings
)
# An error of a caller's function, beside which nothing else runs: it may have a class of its own.
# It is shown, and kept as the cause.
FAILURES_OF_A_FUNCTION: tuple[type[Exception], ...] = (Exception,)


def describe_error(error: Exception) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
