"""What the tests of ``headwise scan`` share."""

from pathlib import Path

import pytest

from headwise.scanning import plan
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
