"""Each example has a test, and runs where only what it says is installed."""

import subprocess

import pytest

from tests.examples.environment import python_with
from tests.root import ROOT

LOOK = "from importlib.util import find_spec as f; print(*(bool(f(n)) for n in {names}))"


@pytest.mark.parametrize(
    ("extra", "there"), [("", "True True False False"), ("huggingface", "True True True False")]
)
def test_an_environment_holds_its_extra_alone(extra: str, there: str) -> None:
    names = ("headwise", "torch", "transformers", "pytest")
    command = [python_with(extra), "-E", "-c", LOOK.format(names=names)]
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == there


def test_every_example_is_tested() -> None:
    tests = {path.name for path in (ROOT / "tests" / "examples").glob("test_*.py")}
    assert {f"test_{path.name}" for path in (ROOT / "examples").glob("*.py")} <= tests
