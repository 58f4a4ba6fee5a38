"""The door: few names, all of them lazy, and nothing heavy behind an import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import headwise
from headwise import diagnosis, identify

HEAVY = {"beartype", "jinja2", "matplotlib", "numpy", "onnx", "torch", "transformers"}


def printed_by(code: str, *arguments: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(code: str, *arguments: str) -> set[str]:
    """The modules in a fresh interpreter after ``code``."""
    report = "import atexit, sys; atexit.register(lambda: print('\\n' + ' '.join(sys.modules)))\n"
    return set(printed_by(report + code, *arguments).splitlines()[-1].split())


def test_the_exported_names() -> None:
    assert headwise.__all__ == sorted(
        {
            "Attention",
            "AttentionMatrix",
            "HeadwiseError",
            "Layout",
            "Mask",
            "MultiheadAttention",
            "Rotary",
            "ScoreBias",
            "compare",
            "convert",
            "detect",
            "register_huggingface",
            "scan",
            "upgrade",
            "verify",
        }
    )
    assert len(headwise.__all__) <= 15
    assert dir(headwise) == headwise.__all__
    assert [getattr(headwise, name).__name__ for name in headwise.__all__] == headwise.__all__


@pytest.mark.slow
def test_each_name_arrives() -> None:
    code = "import headwise; print(*(getattr(headwise, n).__name__ for n in headwise.__all__))"
    assert printed_by(code).split() == headwise.__all__


def test_no_name_hides_a_room() -> None:
    # After `from headwise.compare import X`, `headwise.compare` is a module.
    rooms = {path.stem for path in Path(headwise.__file__).parent.iterdir()}
    assert not rooms & set(headwise.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'headwise' has no attribute 'Attentoin'"):
        headwise.Attentoin  # noqa: B018
    assert not hasattr(headwise, "attention")


def names_for_type_checkers(package: Path) -> dict[str, str]:
    """Each name below ``if TYPE_CHECKING`` of a package, with its module in the package."""
    room = ".".join(package.parent.relative_to(Path(headwise.__file__).parents[1]).parts)
    return {
        alias.name: (node.module or "").removeprefix(f"{room}.")
        for block in ast.parse(package.read_text("utf-8")).body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_rooms_export_what_type_checkers_see() -> None:
    seen = 0
    for package in sorted(Path(headwise.__file__).parent.rglob("__init__.py")):
        if "export_lazily(" not in (text := package.read_text("utf-8")):
            continue
        (table,) = re.findall(r"__name__,\s+(\{.+?\})", text, re.S)
        names = {n: module for module, ns in ast.literal_eval(table).items() for n in ns.split()}
        assert names == names_for_type_checkers(package), package
        parts = package.parent.relative_to(Path(headwise.__file__).parents[1]).parts
        room = import_module(".".join(parts))
        assert all(getattr(room, name) is not None for name in room.__all__)
        seen += 1
    assert seen >= 9


def test_names_that_moved_are_found_with_a_warning() -> None:
    moved = {name: getattr(identify, name) for name in identify.__all__}
    for name, value in moved.items():
        with pytest.warns(DeprecationWarning, match=f"{name} is headwise.identify.{name} now"):
            assert getattr(diagnosis, name) is value
    assert not {*moved} & {*diagnosis.__all__}


def test_import_headwise_loads_nothing_heavy() -> None:
    assert not HEAVY & loaded_by("import headwise")
    assert not HEAVY & loaded_by("from headwise import HeadwiseError")


@pytest.mark.slow
def test_the_check_can_fail() -> None:
    assert loaded_by("import headwise; headwise.Mask") >= {"headwise", "torch"}
    assert "jinja2" in loaded_by("import jinja2.nodes")


@pytest.mark.parametrize("argument", ["--help", "--version", "demo --help"])
def test_help_loads_nothing_heavy(argument: str) -> None:
    loaded = loaded_by("from headwise.cli import main; main()", *argument.split())
    assert "typer" in loaded
    assert not HEAVY & loaded


def test_the_layer_loads_nothing_beyond_torch() -> None:
    report = (
        "import sys, torch; print(*sys.modules); import headwise; headwise.MultiheadAttention; "
    )
    before, after = printed_by(report + "print(*sys.modules)").splitlines()
    of_torch = set(before.split())
    more = set(after.split()) - of_torch
    packages = {name.partition(".")[0] for name in more} - of_torch - set(sys.stdlib_module_names)
    assert packages <= {"headwise", "jaxtyping", "wadler_lindig"}
    # torch's compiler is a second of import time.
    assert not {name for name in more if name.startswith(("torch._dynamo", "torch._inductor"))}
