"""What the tests of the commands share."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headwise.scanning import plan
from headwise.surgery import folders
from tests.huggingface.stored import TEXT, bert, stored


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(tmp_path_factory.mktemp("models") / "small-bert", bert())


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "cats.txt"
    path.write_text(TEXT, "utf-8")
    return path


@pytest.fixture
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _speed_of_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate of a scan measures each product once."""
    monkeypatch.setattr(plan, "MEASURED_SECONDS", 0.0)


@pytest.fixture
def checked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of a written folder runs here: a new process imports transformers for seconds.

    The test of each command that is about this check lets the new process run.
    """

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", command[1:2] + command[3:])
        exec(command[2], {})
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(folders.subprocess, "run", run)
