"""Checks of the shapes in annotations, at a function's first calls in each test.

`jaxtyping` checks every function of a module. A function without a shape has been checked by mypy
already, and the later calls of one test seldom have other axes than the first: together they would
be a third of the time of the tests.
"""

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxtyping
import torch

FIRST_CALLS = 10  # of each function in each test
SHAPE = re.compile(r"\b(Float|Int|Integer|Bool|Shaped|Num|Real|Inexact|Complex)\[")

_test = 0  # counts the tests


def begin_test() -> None:
    """Check the first calls of each function again."""
    global _test
    _test += 1


def check_shapes(source: Path) -> None:
    """Check the shapes of a package that is imported from now on."""
    found = [p for p in source.rglob("*.py") if "from jaxtyping import" in p.read_text("utf-8")]
    modules = [p.relative_to(source.parent).with_suffix("").parts for p in sorted(found)]
    make = jaxtyping.jaxtyped

    def jaxtyped(*, typechecker: Any) -> Callable[[Any], Any]:
        return lambda function: _checked(function, make(typechecker=typechecker))

    jaxtyping.jaxtyped = jaxtyped  # type: ignore[assignment]
    jaxtyping.install_import_hook([".".join(parts) for parts in modules], "beartype.beartype")


def _checked(function: Any, make_check: Callable[[Any], Any]) -> Any:
    annotations = getattr(function, "__annotations__", {}).values()
    if not any(SHAPE.search(str(annotation)) for annotation in annotations):
        return function
    if not inspect.isfunction(function):  # a class, whose fields have shapes, or a property
        return make_check(function)
    check: Any = None
    last, calls = -1, 0

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        nonlocal check, last, calls
        if torch.compiler.is_compiling():  # a graph has no place for counts
            return function(*args, **options)
        if last != _test:
            last, calls = _test, 0
        calls += 1
        if calls > FIRST_CALLS:
            return function(*args, **options)
        check = check or make_check(function)  # takes a millisecond
        return check(*args, **options)

    return checked
