"""Tables of what is refused: each row is a call, its error, and words of the message."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from headwise.errors import HeadwiseError


def refusals(
    rows: Mapping[str, tuple[Any, ...]], *, kind: type[HeadwiseError] = HeadwiseError
) -> Callable[..., None]:
    """A test that runs each row, ``(call, words)`` or ``(call, kind, words)``, as a user would.

    The error has the row's kind and three lines, among them all words. A call may need no_grad.
    """

    @pytest.mark.usefixtures("shapes_unchecked")
    @pytest.mark.parametrize("row", rows.values(), ids=rows)
    def test(row: tuple[Any, ...]) -> None:
        call, words = row[0], row[-1]
        with torch.no_grad(), pytest.raises(row[1] if len(row) == 3 else kind) as error:
            call()
        message = str(error.value)
        assert [word for word in words if word not in message] == [], message
        starts = [line[:10] for line in message.splitlines()[1:]]
        assert starts == ["  needed: ", "  do:     "]

    return test
