"""A scan that was made up, and its page, for all tests that change neither."""

from pathlib import Path

import pytest

from headwise.reports.page import save_scan_page
from headwise.scanning.result import HeadScan
from tests.reports.viewer_scans import viewer_report, viewer_scan


@pytest.fixture(scope="session")
def scan() -> HeadScan:
    return viewer_scan()


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory, scan: HeadScan) -> Path:
    return save_scan_page(tmp_path_factory.mktemp("viewer") / "page.html", viewer_report(scan))
