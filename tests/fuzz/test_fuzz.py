"""The fuzz with fixed seeds: a part of the suite. `make fuzz` runs more, with a seed of its own."""

import ast
import sys
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
import torch

from headwise import Attention
from headwise.function import stages
from headwise.layers.options import OPTIONS
from tests.fuzz import oracle
from tests.fuzz.draw import Chance, plain
from tests.fuzz.findings import DifferenceError, close, same
from tests.fuzz.layer_cases import draw_inputs, draw_layer
from tests.fuzz.matrix_cases import draw
from tests.fuzz.run import KINDS, failure_of, fuzz, run_case

FOLDER = Path(__file__).parent
SEED = 0
# Words of the differences that are known and not yet mended; none is the aim.
OPEN: tuple[str, ...] = ()
# How many cases of each kind the suite has: some 20 s on one core. `make test` runs half of them.
COUNTS = {
    "readings": 40,
    "gradients": 35,
    "layer": 25,
    "drop-in": 25,
    "cache": 15,
    "edits": 15,
    "edited-layer": 10,
}


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_cases_of_fixed_seeds_are_as_the_oracle_has_them(kind: str, first: int) -> None:
    failures = [failure_of(kind, SEED, index) for index in range(first, COUNTS[kind], 2)]
    told = [str(failure) for failure in failures if failure is not None]
    assert [line for line in told if not any(words in line for words in OPEN)] == []


def imported_by(path: Path) -> set[str]:
    """The first names of the modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    return names - set(sys.stdlib_module_names)


def test_the_oracle_knows_nothing_of_the_library() -> None:
    own = {"collections.abc"}
    assert imported_by(FOLDER / "oracle.py") - own == {"__future__", "numpy"} - {"__future__"}
    assert imported_by(FOLDER / "oracle_layers.py") - own == {"numpy", "tests.fuzz.oracle"}


def test_a_case_is_a_function_of_its_name() -> None:
    assert run_case("readings", 5, 3) == run_case("readings", 5, 3) != run_case("readings", 5, 4)


@pytest.mark.parametrize("kind", ["product", "entropy", "logsumexp"])
def test_the_oracles_gradients_are_its_derivatives(kind: str) -> None:
    p = draw(Chance("oracle", 3), grad=True)
    g = p.chance.normal(*p.shape).numpy()

    def number(q: np.ndarray, k: np.ndarray) -> np.ndarray:
        m = oracle.Matrix(q, k, p.shaping.clauses, p.shaping.parts, p.truth.scale, p.truth.softcap)
        whole = {"product": m.weights, "entropy": m.entropy(), "logsumexp": np.log(m.total[..., 0])}
        if kind == "logsumexp":
            return (m.peak[..., 0] + whole[kind]) * g[..., 0]
        return whole[kind] * (g if kind == "product" else g[..., 0])

    q, k = p.truth.q, p.truth.k
    truth = oracle.Matrix(q, k, p.shaping.clauses, p.shaping.parts, p.truth.scale, p.truth.softcap)
    through = {
        "product": lambda: truth.through_weights(g),
        "entropy": lambda: truth.through_entropy(g[..., 0]),
        "logsumexp": lambda: truth.through_logsumexp(g[..., 0]),
    }[kind]()
    direction = p.chance.normal(*q.shape).numpy()
    derivative = number(q + 1j * oracle.STEP * direction, k).imag.sum() / oracle.STEP
    assert np.isclose(derivative, (through["q"] * direction).sum(), rtol=1e-9)


def test_a_mistake_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "default_scale", lambda q: 0.9 / q.shape[-1] ** 0.5)
    found = [failure_of("readings", SEED, index) for index in range(4)]
    assert any(failure is not None and "DifferenceError" in failure.error for failure in found)


def test_every_option_and_argument_of_a_layer_is_drawn() -> None:
    """So that a new one cannot be forgotten: it gets a draw and a formula in the oracle."""
    options, inputs = set[str](), set[str]()
    for number in range(150):
        drawn = draw_layer(chance := Chance("audit", number), torch.float64, told=True)
        options |= {name for name, x in drawn.given.items() if x not in (None, False)}
        inputs |= {*draw_inputs(chance, drawn.layer, (2, 3, 3), torch.float64)}
    assert {*OPTIONS} <= options
    sizes = {"self", "embed_dim", "num_heads"}
    chosen_elsewhere = {"dropout", "init", "device", "dtype"}
    assert {*signature(Attention.__init__).parameters} == options | sizes | chosen_elsewhere
    of_calls = {"self", "mask", "score_bias", "positions", "cache"}  # which the cases draw
    assert {*signature(Attention.forward).parameters} == inputs | of_calls


def test_comparisons_can_fail() -> None:
    with pytest.raises(DifferenceError, match=r"shape \(2,\)"):
        same("x", torch.zeros(2), np.zeros(3))
    with pytest.raises(DifferenceError, match="1 of 2 entries"):
        same("x", torch.tensor([0.0, 1.0]), np.zeros(2))
    with pytest.raises(DifferenceError, match="off by 1"):
        close("x", torch.ones(2), np.zeros(2), 0.5)
    with pytest.raises(DifferenceError, match="off by nan"):
        close("x", torch.full((2,), torch.nan), np.zeros(2), 0.5)


def test_a_layout_holds_the_same_sizes() -> None:
    chance = Chance("layouts")
    for _ in range(30):
        x = chance.normal(2, 3, 5)
        assert chance.laid_out(x).shape == x.shape
        assert np.array_equal(plain(chance.laid_out(x, may_expand=False)), plain(x))


def test_the_command_reports_and_exits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.fuzz.run.BATCH", 1)
    assert fuzz(0.0, 1, ["cache"], 1) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 cases with seed 1: 0 findings"
