"""The page of a pruning: its numbers are those of the cut."""

import math
from typing import get_args

import pytest

from headwise.reports.surgery import DOT, render_cut
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
    page = render_cut(pruned, "a model", facts=["smaller by a third"])
    assert "no interval below 10 sequences" in page
    assert "<li>smaller by a third</li>" in page
    drawn = Tree(page).root.all("svg")[0]
    assert f"11 heads: {after}" in drawn.text
    label = drawn.attributes["aria-label"]
    assert label.endswith(f": {after}.")
    for value in others:
        assert value not in drawn.text + label
    assert "after</strong>" in page
    assert f", {after} after" in page
    assert outside(page) == []


def test_every_head_is_a_dot_at_its_effect(pruned: Pruning) -> None:
    """Left of the line of no effect if the model gains without it; crossed if it is gone."""
    root = Tree(render_cut(pruned, "a model")).root
    _, axis, *layers = root.all("svg")
    table = pruned.plan.table()
    assert len(layers) == len(table)
    zero = next(float(t.attributes["x"]) for t in axis.all("text") if t.text == "0")
    for drawn, row in zip(layers, table, strict=True):
        dots = [g for g in drawn.all("g") if g.attributes.get("class") in ("kept", "gone")]
        places = {}
        for dot in dots:
            (circle,), (title,) = dot.all("circle"), dot.all("title")
            head = int(title.text.split(":")[0].removeprefix("head "))
            places[head] = float(circle.attributes["cx"]), float(circle.attributes["cy"])
            assert (dot.attributes["class"] == "gone") == (head in row["gone"])
            assert bool(dot.all("path")) == (head in row["gone"])
            assert f"{row['effects'][head]:.5f}".replace("-", "−") in title.text
        assert [*sorted(places)] == [*range(len(row["effects"]))]
        for head, effect in enumerate(row["effects"]):
            assert (places[head][0] - zero) * effect >= 0
        order = sorted(places, key=lambda head: row["effects"][head])
        assert order == sorted(places, key=lambda head: places[head][0])
        # No two dots touch.
        pairs = [(a, b) for a in places for b in places if a < b]
        assert all(math.dist(places[a], places[b]) >= 2 * DOT - 0.11 for a, b in pairs)


def test_the_ring_at_the_edge_of_the_curve_is_whole(pruned: Pruning) -> None:
    svg = render_cut(pruned, "a model").partition("<svg")[2].partition("</svg>")[0]
    ring = [part for part in svg.split("<g ") if 'id="line2d_' in part]
    assert any("<use" in part and "clip-path" not in part for part in ring)


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
