"""The field bench: its formulas, its cases, and how an answer is judged."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.faults.freeze import is_frozen
from benchmarks.field import check, check_models, formulas, references
from benchmarks.field.case import FIRST, FROZEN, SETS, FieldCase, load_port, read_cases
from benchmarks.field.score import interval, score
from benchmarks.field.truth import read_truth

PORTS = [
    (folder, path.stem) for folder in SETS.values() for path in sorted(folder.glob("ports/*.py"))
]
CASES = {folder: list(read_cases(folder)) for folder in SETS.values()}


def test_equal_scores_give_the_mean_of_the_values() -> None:
    settings = {"embed_dim": 12, "num_heads": 3, "bias": ""}
    weights = formulas.draw_weights(settings)
    weights["wq"][:] = 0
    x = np.random.default_rng(0).normal(size=(2, 5, 12))
    mean = (x @ weights["wv"].T).mean(1, keepdims=True) @ weights["wo"].T
    np.testing.assert_allclose(formulas.attend(x, weights, settings), mean.repeat(5, 1))


@pytest.mark.parametrize(("folder", "port"), PORTS, ids=[name for _, name in PORTS])
def test_a_port_without_edits_is_the_formula_and_the_layer(folder: Path, port: str) -> None:
    module = load_port(folder, port)
    assert max(check.measure(module).values()) < check.AGREES
    weights, s = formulas.draw_weights(module.SETTINGS), formulas.complete(module.SETTINGS)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2, 9, s["embed_dim"]))
    source = None if s["source_dim"] is None else rng.normal(size=(2, 7, s["source_dim"]))
    expected = formulas.attend(x, weights, module.SETTINGS, source=source)
    layer = references.layer(module.SETTINGS, weights).double()
    given = {} if source is None else {"source": torch.from_numpy(source)}
    with torch.no_grad():
        actual = layer(torch.from_numpy(x), **given)
    assert float(np.linalg.norm(actual.numpy() - expected) / np.linalg.norm(expected)) < 1e-6


@pytest.mark.parametrize("folder", SETS.values(), ids=SETS)
def test_the_edits_of_every_case_fit_its_port(folder: Path) -> None:
    for case in CASES[folder]:
        text = (case.folder / "ports" / f"{case.port}.py").read_text("utf-8")
        for before, after in case.edits:
            assert text.count(before) == 1, (case.port, case.name, before)
            text = text.replace(before, after)


@pytest.mark.parametrize("case", CASES[FIRST][::24], ids=lambda case: f"{case.port}-{case.name}")
def test_a_case_differs_unless_it_is_the_same_function(case: FieldCase) -> None:
    gaps = check.measure(case.module())
    if case.kind == "same":
        assert max(gaps.values()) < check.AGREES
    else:
        assert max(gaps.values()) > check.DIFFERS


def test_every_fault_has_a_right_answer() -> None:
    for folder, cases in CASES.items():
        faults = [case for case in cases if case.kind in ("single", "pair")]
        assert len(read_truth(folder)) == len(faults)


@pytest.mark.parametrize("folder", FROZEN, ids=lambda folder: folder.name)
def test_the_cases_are_those_that_were_frozen(folder: Path) -> None:
    assert is_frozen(folder)


def test_the_edits_of_every_whole_model_fit_its_text() -> None:
    for case in check_models.read_model_cases():
        text = (check_models.MODELS / f"{case.model}.py").read_text("utf-8")
        for before, after in case.edits:
            assert text.count(before) == 1, (case.model, case.name, before)
            text = text.replace(before, after)


@pytest.mark.slow
def test_an_answer_is_judged_by_the_right_answers_of_its_case() -> None:
    truth = read_truth()
    cases = {case.name: case for case in CASES[FIRST] if case.port == "mingpt"}
    fault = cases["merged_without_transpose"]
    right = score(fault, truth["mingpt", fault.name])
    assert (right.answer, right.named) == ("right", ("merge without transpose",))
    other = score(fault, truth["mingpt", "key_before_query"])
    assert other.answer == "wrong"
    assert not other.is_right
    unknown = score(fault, None)  # as if no catalogue had it
    assert unknown.answer == "wrong"


def test_the_interval_is_wilsons() -> None:
    assert interval(50, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    low, high = interval(20, 20)
    assert (low, high) == pytest.approx((0.83887, 1.0), abs=1e-5)
