"""Templates over numbers."""

import pytest

from headwise.study.question import fill_template, format_scientific


def test_a_key_an_inner_key_and_a_place() -> None:
    numbers = {"heads": 8, "loss": {"8": 0.25, "out_proj.weight": 0.5}, "shape": [2, 12, 256]}
    template = "{heads} heads: {loss[8]:.2f}, {loss[out_proj.weight]}, {shape[2]}"
    assert fill_template(template, numbers) == "8 heads: 0.25, 0.5, 256"


def test_inner_keys_go_on() -> None:
    assert fill_template("{a[b][1][c]}", {"a": {"b": [0, {"c": 7}]}}) == "7"


def test_a_number_that_was_not_measured_is_an_error() -> None:
    with pytest.raises(KeyError):
        fill_template("{heads}", {"queries": 3})
    with pytest.raises(KeyError):
        fill_template("{loss[8]}", {"loss": {"4": 1.0}})


@pytest.mark.parametrize(
    ("spec", "value", "words"),
    [
        ("sci", 1.94e-6, "1.9 × 10⁻⁶"),
        ("sci", 250_000.0, "2.5 × 10⁵"),
        ("sci", -0.03, "-3.0 × 10⁻²"),
        ("sci", 0, "0"),
        ("percent", 0.337, "34 %"),
        ("percent", 0.0123, "1.2 %"),
        ("percent", 0.00123, "0.12 %"),
        ("percent", 0.0, "0 %"),
        ("shape", [2, 12, 256], "(2, 12, 256)"),
        ("shape", [512], "(512,)"),
        ("list", [1, 2, 4], "1, 2, 4"),
        ("yesno", True, "yes"),
        ("yesno", False, "no"),
        (",", 1_050_624, "1,050,624"),
    ],
)
def test_how_it_is_written(spec: str, value: object, words: str) -> None:
    assert fill_template(f"{{x:{spec}}}", {"x": value}).replace("\u00a0", " ") == words


def test_a_number_and_its_unit_stay_on_one_line() -> None:
    assert " " not in fill_template("{x:sci}{y:percent}", {"x": 1e-6, "y": 0.5})


def test_the_mantissa_is_rounded_before_the_exponent_is_read() -> None:
    assert format_scientific(9.97e-5).startswith("1.0")
