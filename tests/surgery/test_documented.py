"""The figures in the documentation are those of the pictures beside them."""

import re

from tests.root import ROOT

DOCS = ROOT / "docs"


def result(name: str) -> str:
    """The quality of the cut that a picture marks."""
    picture = DOCS.joinpath("images", "surgery", f"{name}.svg").read_text("utf-8")
    [label] = re.findall(r'aria-label="[^"]*: (-?[\d.]+\d)\."', picture)
    assert f": {label}<" in picture  # in the legend, too
    return str(label)


def test_the_table_of_repairs_has_the_result_of_the_curve() -> None:
    page = DOCS.joinpath("surgery.md").read_text("utf-8")
    [mean] = re.findall(r"^\| mean \| [\d.]+ \| ([\d.]+) \|", page, re.M)
    assert mean == result("curve")
    assert "images/surgery/curve.svg" in page


def test_the_loss_of_the_model_that_ships_is_that_of_its_curve() -> None:
    page = " ".join(DOCS.joinpath("surgery.md").read_text("utf-8").split())
    [loss] = re.findall(r"With 16 of 32 heads the next byte costs ([\d.]+) nats", page)
    assert float(loss) == round(-float(result("tiny")), 2)
