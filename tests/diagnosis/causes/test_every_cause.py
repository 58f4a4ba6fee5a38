"""Every cause, named on a case of the fault bench whose injector knows nothing of it."""

import inspect
import re
from pathlib import Path

import pytest

import headwise
from benchmarks.compare.suites import SUITES, Case
from benchmarks.faults.injectors import INJECTORS
from headwise.diagnosis.causes.evidence import Variants
from headwise.diagnosis.trials import MODULES, SEARCHES
from headwise.identify.catalogue import (
    ANOTHER_ROLE,
    CAUSES,
    FACTOR,
    FUSED_ROW_CUT,
    LAYERS_EXCHANGED,
    LAYERS_OFF_BY_ONE,
    MATRIX_TRANSPOSED,
    NORM_WEIGHTS_EXCHANGED,
    NORM_WEIGHTS_ORDER,
    PAGES,
    RANKS,
    REPORTED,
    ROTARY_PERMUTATION_WIDTH,
    ROWS_ZERO,
    SIGN,
    STATED,
    Cause,
    Page,
)
from headwise.identify.moves.families import make_row_map_catalogue
from headwise.identify.moves.maps import RowSizes
from headwise.identify.moves.search import list_matrix_maps
from tests.identify.moves.projections import projections
from tests.quick import others_slow

NAMES = [cause.name for cause in CAUSES]


def cases() -> dict[str, Case]:
    first: dict[str, Case] = {}
    for case in SUITES["single"](1):
        first.setdefault(case.fault, case)
    return first


CASES = cases()


@pytest.mark.parametrize("fault", others_slow(sorted(CASES), "softcap"))
def test_the_cause_of_a_fault_is_named(fault: str) -> None:
    scored = CASES[fault].score()
    assert scored.is_right, scored.answer


def test_names_and_symptoms_are_of_one_cause_each() -> None:
    symptoms = [Page.read(cause.page).title for cause in CAUSES]
    assert sorted(NAMES) == sorted({*NAMES})
    assert sorted(symptoms) == sorted({*symptoms})
    assert all(cause.stages for cause in CAUSES)


def test_a_layer_in_bfloat16_is_the_same_to_rounding() -> None:
    """Each stage is predicted from recorded ones, so that its rounding alone hides a difference."""
    narrow = "dtype only:cross:init-like:0"
    [case] = [each for each in SUITES["single"](20) if each.key == narrow]
    assert case.score().is_right


@pytest.mark.parametrize("cause", CAUSES, ids=NAMES)
def test_each_cause_has_a_page_with_the_headings(cause: Cause) -> None:
    assert Path(cause.page).is_relative_to(Path(headwise.__file__).parent)  # a file that users have
    text = Path(cause.page).read_text("utf-8")
    title, first, *_ = text.split("\n\n")
    assert title.startswith("# ")
    assert first.startswith(f"`compare` names this cause **{cause.name}**. ")
    assert f"**{cause.unexpected}**" in first or not cause.unexpected
    assert f"## Stages\n\nThe cause shows in: {', '.join(cause.stages)}. " in text
    headings = re.findall("^## (.*)$", text, re.M)
    assert headings[:3] == ["Stages", "Search", "Repair"]
    assert headings[3:] in ([], ["Causes that look the same"])
    assert text.endswith("\n\n[All causes](index.md)\n")
    for link in re.findall(r"\]\(([^)]*)\)", text):
        assert PAGES.joinpath(link).is_file()
    for name, page in re.findall(r"^- \[(.*)\]\((.*)\): ", text, re.M):
        assert Path(next(each.page for each in CAUSES if each.name == name)).name == page


SHOWN = [cause for cause in CAUSES if "```diff" in Path(cause.page).read_text("utf-8")]


@pytest.mark.parametrize("cause", SHOWN, ids=lambda cause: cause.name)
def test_a_page_shows_code_that_is_wrong_and_right(cause: Cause) -> None:
    for diff in re.findall("```diff\n(.*?)```", Path(cause.page).read_text("utf-8"), re.S):
        for mark in "-+":
            lines = [line for line in diff.splitlines() if line.startswith(mark)]
            assert lines, f"no line with {mark}"
            compile("\n".join(line[2:] for line in lines), cause.name, "exec")


def test_no_page_is_without_a_cause() -> None:
    pages = {path.name for path in PAGES.iterdir()}
    assert pages == {"index.md", *(Path(cause.page).name for cause in CAUSES)}


def test_the_index_lists_every_page() -> None:
    text = PAGES.joinpath("index.md").read_text("utf-8")
    lines = [
        f"| {Page.read(cause.page).title} | [{cause.name}]({Path(cause.page).name}) | "
        f"{', '.join(cause.stages)} | {RANKS[cause.rank]} |"
        for cause in CAUSES
    ]
    assert [line for line in lines if line not in text.splitlines()] == []
    assert text.splitlines()[-len(CAUSES) :] == sorted(lines, key=lambda line: line[2:].lower())
    assert f"these {len(CAUSES)} causes" in text


def test_causes_of_public_reports_are_those_whose_injector_names_one() -> None:
    reported = {each.name for each in INJECTORS if re.search(r"#\d", inspect.getdoc(each) or "")}
    ranks = {cause.name: cause.rank for cause in CAUSES}
    assert {name for name, rank in ranks.items() if rank == REPORTED} == {
        name for name in reported & ranks.keys() if ranks[name] != STATED
    }
    assert not {name for name in reported & ranks.keys() if ranks[name] > REPORTED}


@pytest.mark.parametrize("sizes", [(4, 4, 8, 8), (6, 2, 10, 10), (8, 1, 6, 7)])
def test_each_move_carries_a_cause_with_a_page(sizes: tuple[int, int, int, int]) -> None:
    named = {
        name.cause
        for row_map in make_row_map_catalogue(RowSizes(*sizes), (40,) * 4).maps
        for name in row_map.names
    }
    assert named <= {*CAUSES}
    assert {ANOTHER_ROLE, ROTARY_PERMUTATION_WIDTH} & named or sizes[2] != sizes[3]


def test_causes_without_a_search_of_their_own_are_those_of_moves() -> None:
    rows = projections("gqa-of-4")
    shapes = [RowSizes(*sizes) for sizes in ((4, 4, 8, 8), (6, 2, 10, 10))]
    shapes += [RowSizes(4, 4, 8, 8, rotary_width=4, roles=("q", "o"))]  # with a latent
    moved = {
        name.cause
        for sizes in shapes
        for row_map in make_row_map_catalogue(sizes, (40,) * len(sizes.roles)).maps
        for name in row_map.names
    }
    moved |= {each.names[0].cause for each in list_matrix_maps(rows, RowSizes.of(rows))}
    changed = {FUSED_ROW_CUT, MATRIX_TRANSPOSED, SIGN, FACTOR, ROWS_ZERO}
    changed |= {NORM_WEIGHTS_EXCHANGED, NORM_WEIGHTS_ORDER}  # of rows of q and k
    layers = {LAYERS_EXCHANGED, LAYERS_OFF_BY_ONE}
    assert {*CAUSES} == {*SEARCHES} | moved | changed | layers


def test_each_function_that_looks_for_a_cause_has_the_name_of_a_row() -> None:
    """`trials.SEARCHES` finds a function by this name: one with another name is never called."""
    functions = {
        name
        for module in MODULES
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
        if [*inspect.signature(value).parameters] == ["evidence"]
        if value.__annotations__["return"] == Variants
    }
    assert functions == {function.__name__ for function in SEARCHES.values()}
    assert len(functions) > 40
