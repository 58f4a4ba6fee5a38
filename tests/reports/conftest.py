"""One browser for all tests of pages that a worker runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.reports.browser import Chromium, chromium


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    with chromium() as started:
        yield started
