"""Check ports and cases against the formulas: ``python -m benchmarks.field.check [PORT ...]``.

A port without edits agrees with the formulas in float64, and so does a case of the kind "same". All
other cases differ clearly on at least one input.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.field import formulas
from benchmarks.field.case import SETS, FieldCase, load_port, read_cases

AGREES, DIFFERS = 1e-6, 1e-4  # rotary tables are often float32
CHUNKS = ((1,) * 9, (4, 1, 1, 3), (9,))  # tokens of each call with a cache


class Input(NamedTuple):
    """One input of a port."""

    name: str
    x: formulas.Array
    mask: Any = None
    source: formulas.Array | None = None


def main(names: list[str]) -> int:
    """Print a line for each case, and return 1 if one of them is not what it says."""
    wrong = 0
    ports = [path for folder in SETS.values() for path in sorted(folder.glob("ports/*.py"))]
    for path in ports:
        if names and path.stem not in names:
            continue
        folder = path.parents[1]
        for case in (None, *read_cases(folder, [path.stem])):
            gaps = measure(load_port(folder, path.stem) if case is None else case.module())
            fits = _fits(case, gaps)
            wrong += not fits
            name = "(without edits)" if case is None else f"{case.kind}: {case.name}"
            sizes = ", ".join(f"{each} {gap:.1e}" for each, gap in gaps.items())
            print(f"{'ok   ' if fits else 'WRONG'} {path.stem} {name}: {sizes}", flush=True)
    return int(wrong > 0)


def _fits(case: FieldCase | None, gaps: Mapping[str, float]) -> bool:
    if case is None or case.kind == "same":
        return all(gap < AGREES for gap in gaps.values())
    return any(gap > DIFFERS for gap in gaps.values())


def measure(module: ModuleType) -> dict[str, float]:
    """Return the relative difference of a port from the formulas for each of its inputs."""
    settings: dict[str, Any] = module.SETTINGS
    weights = formulas.draw_weights(settings)
    is_numpy = getattr(module, "NUMPY", False)
    given = dict(weights) if is_numpy else {n: torch.from_numpy(w) for n, w in weights.items()}
    with torch.no_grad():
        port = module.make(given)
    if getattr(module, "STEPS", False):
        return {name: _gap(*pair) for name, pair in _steps(port, weights, settings, is_numpy)}
    accepted = getattr(module, "TAKES", ("mask",))
    found = {}
    for each in _inputs(settings):
        if each.mask is not None and "mask" not in accepted:
            continue
        arguments = {"mask": each.mask, "source": each.source}
        arguments = {name: value for name, value in arguments.items() if value is not None}
        expected = formulas.attend(each.x, weights, settings, **arguments)
        found[each.name] = _gap(_call(port, is_numpy, each.x, **arguments), expected)
    return found


def _inputs(settings: Mapping[str, Any]) -> Iterator[Input]:
    rng, width = np.random.default_rng(1), settings["embed_dim"]
    other = settings.get("source_dim")

    def draw(batch: int, tokens: int, name: str, mask: Any = None) -> Input:
        source = rng.normal(size=(batch, tokens + 2, other)) if other else None
        return Input(name, rng.normal(size=(batch, tokens, width)), mask, source)

    yield draw(2, 9, "plain")
    yield draw(3, 1, "one token")
    yield draw(2, 2, "two tokens")
    yield draw(1, 40, "long")
    keys = 11 if other else 9
    lengths = np.array([keys, 6])[:, None]
    right = (np.arange(keys) < lengths)[:, None, None]
    yield draw(2, 9, "padding right", right)
    if not settings.get("causal"):
        yield draw(2, 9, "padding left", right[..., ::-1].copy())


def _steps(
    port: Any, weights: Mapping[str, Any], settings: Mapping[str, Any], is_numpy: bool
) -> Iterator[tuple[str, tuple[formulas.Array, formulas.Array]]]:
    x = np.random.default_rng(1).normal(size=(2, 9, settings["embed_dim"]))
    expected = formulas.attend(x, weights, settings)
    for sizes in CHUNKS:
        state, parts, start = port.start(2), [], 0
        for size in sizes:
            state_and_y = _step(port, is_numpy, x[:, start : start + size], state)
            y, state = state_and_y
            parts.append(y)
            start += size
        yield f"chunks of {sizes[0]}", (np.concatenate(parts, 1), expected)


@torch.no_grad()
def _step(port: Any, is_numpy: bool, x: formulas.Array, state: Any) -> tuple[formulas.Array, Any]:
    y, state = port.step(x if is_numpy else torch.from_numpy(x), state)
    return np.asarray(y), state


@torch.no_grad()
def _call(
    port: Callable[..., Any], is_numpy: bool, x: formulas.Array, **arguments: Any
) -> formulas.Array:
    given = {"x": x, **arguments}
    if not is_numpy:
        given = {name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in given.items()}
    return np.asarray(port(given.pop("x"), **given))


def _gap(actual: formulas.Array, expected: formulas.Array) -> float:
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return float("inf")
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
