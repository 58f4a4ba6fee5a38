"""Files and names of headwise in the documentation, in examples and in docstrings exist."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name

import pytest

from tests.root import ROOT

PACKAGE = ROOT / "src" / "headwise"
FOLDERS = ("src", "tests", "tools", "docs", "benchmarks", "examples", "viewer")
ROOMS = tuple(path.parent.name for path in sorted(PACKAGE.glob("*/__init__.py")))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted(ROOT.joinpath("docs").rglob("*.md")),
    *sorted(PACKAGE.rglob("*.md")),
]
SOURCES = sorted(PACKAGE.rglob("*.py"))
NOTEBOOKS = sorted(ROOT.joinpath("docs").rglob("*.ipynb"))
PROGRAMS = [*PAGES, *NOTEBOOKS, *sorted(ROOT.glob("examples/**/*.py"))]

# What the reader makes, and files of other projects.
PLACEHOLDERS = re.compile(r"your_|NAME|NN-name|^script\.py$")
OF_OTHERS = {ROOT / "docs" / "catalogue.md"}

CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")
FENCE = re.compile(r"^ *```.*?^ *```$", re.M | re.S)
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)")
DOTTED = re.compile(r"(?<![\w./@-])headwise(?:\.[A-Za-z_]\w*)+")
PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join([*FOLDERS, *ROOMS])})/[\w./*-]*")
FILE = re.compile(r"(?<![\w./*-])\w+\.py\b")
LISTED = re.compile(r"^ *([\w/]+\.py|\w+/)  +\S", re.M)
OF_THE_REPOSITORY = re.compile(r"(?<![\w./-])(?:src/headwise|tests|tools|docs)/[\w./-]+\.(?:py|md)")
IMPORT = re.compile(r"from (headwise[\w.]*) import (\([^)]*\)|[\w, ]+)")


@cache
def program_names() -> set[str]:
    """Names of all files of Python in the repository."""
    homes = [ROOT.joinpath(folder).rglob("*.py") for folder in FOLDERS if folder != "viewer"]
    return {path.name for path in chain(ROOT.glob("*.py"), *homes)}


@cache
def is_file_or_folder(path: str) -> bool:
    """True if the path is one of the repository, or of the package."""
    return any([*root.glob(path.rstrip("/."))] for root in (ROOT, PACKAGE))


def is_name(name: str) -> bool:
    """True if the dotted name can be imported or read."""
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def missing(text: str) -> Iterator[str]:
    """Yield the paths, files and dotted names in backticks that do not exist."""
    for _, code in CODE.findall(FENCE.sub("", text)):
        yield from (name for name in DOTTED.findall(code) if not is_name(name))
        yield from (path for path in PATH.findall(code) if not is_file_or_folder(path))
        yield from (name for name in FILE.findall(code) if name not in program_names())


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in OF_OTHERS], ids=lambda page: page.name
)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    assert [name for name in missing(text) if not PLACEHOLDERS.search(name)] == []
    assert [link for link in LINK.findall(text) if not page.parent.joinpath(link).exists()] == []


@pytest.mark.parametrize("package", [p for p in SOURCES if p.name == "__init__.py"])
def test_a_package_lists_files_that_exist(package: Path) -> None:
    listed = LISTED.findall(ast.get_docstring(ast.parse(package.read_text("utf-8"))) or "")
    assert [name for name in listed if not package.parent.joinpath(name).exists()] == []


def test_paths_in_the_source_exist() -> None:
    found = {
        path for file in SOURCES for path in OF_THE_REPOSITORY.findall(file.read_text("utf-8"))
    }
    assert "docs/log.md" in found
    assert [path for path in sorted(found) if not ROOT.joinpath(path).exists()] == []


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_imports_are_those_of_rooms(program: Path) -> None:
    deep = []
    for home, names in IMPORT.findall(program.read_text("utf-8")):
        room = ".".join(home.split(".")[:2])
        exported = set(getattr(import_module(room), "__all__", ())) if room != home else set()
        deep += [f"from {room} import {n}" for n in re.findall(r"\w+", names) if n in exported]
    assert deep == []


def test_contributors_see_every_room_on_its_floor() -> None:
    project = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text("utf-8"))
    floors = project["tool"]["importlinter"]["contracts"][0]["layers"]
    table = (
        ROOT.joinpath("CONTRIBUTING.md").read_text("utf-8").split("| room |")[1].split("\n\n")[0]
    )
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    assert [row.replace("`", "").split(", ") for row in rows] == [f.split(" | ") for f in floors]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`src/headwise/masks/gone.py`", ["src/headwise/masks/gone.py"]),
        ("`masks/gone/` and `tests/test_gone_*.py`", ["masks/gone/", "tests/test_gone_*.py"]),
        ("`masks/mask.py`, `tests/masks/`, `tests/test_*.py`, `rotary.py`", []),
        ("``gone_too.py``, `headwise.masks.gone`", ["gone_too.py", "headwise.masks.gone"]),
        ("`headwise.masks.mask.Mask`, `torch.ops.headwise.sweep`, `models/gpt2`", ["models/gpt2"]),
        ("```python\nheadwise.gone\n```\n`headwise.Gone()`", ["headwise.Gone"]),
    ],
)
def test_what_is_missing_is_found(text: str, found: list[str]) -> None:
    assert [*missing(text)] == found
