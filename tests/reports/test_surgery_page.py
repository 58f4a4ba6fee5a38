"""The page of a pruning: its numbers are those of the cut."""

from typing import get_args

import pytest

from headwise.reports.surgery import render_cut
from headwise.surgery import Pruning, prune
from headwise.surgery.fit import Repair
from tests.reports.html import Tree, outside
from tests.surgery import small


@pytest.fixture(scope="module", params=get_args(Repair))
def pruned(request: pytest.FixtureRequest) -> Pruning:
    fit, other = small.ids(40, 12), small.ids(9, 12, seed=1)
    return prune(small.tiny(), fit, held_out=other, keep=0.7, repair=request.param)


def test_the_chosen_number_has_the_result_of_the_cut(pruned: Pruning) -> None:
    after, repair = f"{float(pruned.after.mean()):.4f}", pruned.plan.repair
    [chosen] = [point for point in pruned.curve if point.is_chosen]
    values = {"mean": f"{chosen.mean:.4f}", "zero": f"{chosen.zero:.4f}"}
    others = {value for name, value in values.items() if name != repair}
    assert after not in others
    assert len({after, *others}) == (3 if repair == "refit" else 2)
    page = render_cut(pruned, "a model")
    drawn = Tree(page).root.all("svg")[0]
    assert f"11 heads: {after}" in drawn.text
    label = drawn.attributes["aria-label"]
    assert label.endswith(f": {after}.")
    for value in others:
        assert value not in drawn.text + label
    assert "after</strong>" in page
    assert f", {after} after" in page
    assert outside(page) == []


def test_the_printed_curve_has_the_result_of_the_cut(pruned: Pruning) -> None:
    after, repair = f"{float(pruned.after.mean()):.4f}", pruned.plan.repair
    lines = str(pruned).splitlines()
    [places] = [line.split()[2:] for line in lines if line.startswith("heads kept:")]
    way = "zero" if repair == "zero" else "mean"
    [values] = [line.split()[2:] for line in lines if line.startswith(f"quality, {way}:")]
    assert sum(line.startswith("quality, ") for line in lines) == 1
    assert len(places) == len(values) == len(pruned.curve)
    for place, value, point in zip(places, values, pruned.curve, strict=True):
        assert place.lstrip("*") == str(point.kept)
        assert place.startswith("*") == point.is_chosen
        assert value == (after if point.is_chosen else f"{getattr(point, way):.4f}")
    says = "the number at * is of the refit, the others are of the mean"
    assert (lines[-1] == says) == (repair == "refit")
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 100
