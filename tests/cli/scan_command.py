"""``headwise scan`` as a test calls it."""

from pathlib import Path

from headwise.cli.scan import scan
from headwise.errors import HeadwiseError
from tests.cli.alone import Alone

_SCAN = Alone(scan)
invoke, run = _SCAN.invoke, _SCAN.run


def refused(*arguments: object) -> HeadwiseError:
    """The error of a run that writes no page."""
    error = _SCAN.refused(*arguments)
    assert not Path("headwise-scan/index.html").exists()
    return error
