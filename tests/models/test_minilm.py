"""The trained encoder, as its package ships it."""

import subprocess
import sys
from pathlib import Path

import pytest

from headwise.errors import MissingExtraError
from headwise.models import minilm

try:
    minilm.model_folder()
except MissingExtraError as missing:
    here = pytest.mark.skip(reason=f"the trained encoder is not installed: {missing.do}")
else:
    here = pytest.mark.skipif(False, reason="")


@pytest.mark.slow
@here
def test_the_folder_is_found_without_importing_the_package() -> None:
    code = (
        "import sys; from headwise.models import minilm; print(minilm.model_folder());"
        "print(minilm.MODULE in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    place, loaded = done.stdout.splitlines()
    assert Path(place, "model.safetensors").is_file()
    assert loaded == "False False"


def test_a_package_without_weights_is_no_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.joinpath("hollow").mkdir()
    tmp_path.joinpath("hollow", "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(minilm, "MODULE", "hollow")
    with pytest.raises(MissingExtraError, match="hollow is installed without its weights"):
        minilm.model_folder()
