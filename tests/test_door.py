"""The door: few names, all of them lazy, and nothing heavy behind an import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import headwise
from headwise.testing import Budget

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
    assert dir(headwise) == sorted([*headwise.__all__, "__version__"])
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


def test_a_name_that_moved_says_where_it_is() -> None:
    with pytest.raises(AttributeError, match=r"from headwise\.testing import Budget$"):
        headwise.Budget  # noqa: B018
    assert Budget.__name__ == "Budget"


def test_import_headwise_loads_nothing_heavy() -> None:
    assert not HEAVY & loaded_by("import headwise")
    assert not HEAVY & loaded_by("from headwise import HeadwiseError")


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
