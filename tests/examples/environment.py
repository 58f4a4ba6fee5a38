"""Environments with headwise and what an example names alone, of links to installed packages."""

import tomllib
import venv
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.requirements import Requirement

from tests.root import ROOT

Found = set[tuple[str, str]]  # a distribution, and an extra of it or ""


@cache
def environment(extra: str, packages: tuple[str, ...]) -> TemporaryDirectory[str]:
    """Return a virtual environment with what headwise declares, an extra or "", and packages."""
    folder = TemporaryDirectory(prefix=f"headwise-{extra}-")
    venv.create(folder.name, symlinks=True)
    (site,) = Path(folder.name).glob("lib/python*/site-packages")
    (site / "headwise").symlink_to(ROOT / "src" / "headwise")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found: Found = {("headwise", "")}  # what it declares may be older where it was installed
    add_needed([*project["dependencies"], *project["optional-dependencies"].get(extra, ())], found)
    add_needed(list(packages), found)
    for name in {name for name, _ in found}:
        installed = distribution(name)
        assert installed.files is not None, name
        for entry in {file.parts[0] for file in installed.files} - {"..", "__pycache__"}:
            link = site / entry
            # Several distributions may fill one folder; a .pth file would add folders.
            if link.suffix != ".pth" and not link.exists():
                link.symlink_to(str(installed.locate_file(entry)))
    return folder


def add_needed(requirements: list[str], found: Found, *, extra: str = "") -> None:
    """Add the distributions of these requirements, and what they need in turn."""
    for requirement in map(Requirement, requirements):
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in {"", *requirement.extras}:
            if (requirement.name, wanted) not in found:
                found.add((requirement.name, wanted))
                add_needed(distribution(requirement.name).requires or [], found, extra=wanted)


def python_with(extra: str, *packages: str) -> str:
    """Return the interpreter of an environment with one extra alone, or with none for ""."""
    return str(Path(environment(extra, packages).name, "bin", "python"))
