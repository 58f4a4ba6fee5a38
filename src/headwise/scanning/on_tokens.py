"""A run of a model on tokens alone, and the error where the model fails on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headwise.errors import HeadwiseError, OptionError


@contextmanager
def on_tokens(title: str, count: int, *, do: str) -> Iterator[None]:
    """Refuse a model that fails in the block, which gives it ``count`` tokens and nothing else.

    Args:
        title: what the model is called.
        count: how many tokens it is given.
        do: what to do instead.
    """
    try:
        yield
    except HeadwiseError:
        raise
    except (TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        raise OptionError(
            saw=f"{title}, which fails on {count} tokens: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}",
            needed="a model that reads tokens and nothing else",
            do=do,
        ) from error
