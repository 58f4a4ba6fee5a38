"""What a user installs: the package, its types and its templates, and nothing of the repository."""

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import headwise
from tests.root import ROOT


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(tmp_path)]
    done = subprocess.run([*command, str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"headwise-{headwise.__version__}-py3-none-any.whl"
    names = set(ZipFile(wheel).namelist())
    metadata = f"headwise-{headwise.__version__}.dist-info"
    package = {
        str(path.relative_to(ROOT / "src"))
        for path in ROOT.joinpath("src").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {name for name in names if not name.startswith(metadata)} == package
    assert {"headwise/py.typed", f"{metadata}/licenses/LICENSE"} <= names
