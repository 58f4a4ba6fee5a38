"""Small pictures: the colours are viridis, the files are PNG."""

import base64
import io
import math

import pytest

from headwise.reports import images


def test_the_colours_are_those_of_viridis() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    viridis = matplotlib.colormaps["viridis"]
    for n in range(256):
        theirs = [round(255 * channel) for channel in viridis(n)[:3]]
        ours = images.viridis_colour(n / 255)
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= 2


def test_the_ends_are_exact_and_what_is_beyond_is_clamped() -> None:
    assert images.css_colour(images.viridis_colour(0.0)) == "#440154"
    assert images.css_colour(images.viridis_colour(1.0)) == "#fde725"
    assert images.viridis_colour(-1.0) == images.viridis_colour(0.0)
    assert images.viridis_colour(2.0) == images.viridis_colour(1.0)


def test_a_weight_stands_at_its_square_root() -> None:
    assert images.weight_position(0.25) == 0.5
    assert images.weight_position(-1e-9) == 0.0  # rounding may leave such a weight


def test_numbers_can_be_read_on_every_colour() -> None:
    def luminance(colour: images.RGB) -> float:
        parts = [c / 255 for c in colour]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for n in range(101):
        colour = images.viridis_colour(n / 100)
        light = luminance(colour)
        black, white = (light + 0.05) / 0.05, 1.05 / (light + 0.05)
        chosen = black if images.text_colour_on(colour) == "#000000" else white
        assert chosen == max(black, white)
        assert chosen >= 4.5  # WCAG 2, AA


def test_a_png_holds_its_pixels_from_the_top() -> None:
    image = pytest.importorskip("PIL.Image")
    kind, data = images.viridis_grid_data_uri([[0.0, 1.0, 0.5], [0.0, math.nan, 2.0]]).split(",")
    assert kind == "data:image/png;base64"
    read = image.open(io.BytesIO(base64.b64decode(data)))
    assert (read.format, read.mode, read.size) == ("PNG", "P", (3, 2))
    pixels = [[read.convert("RGBA").getpixel((x, y)) for x in range(3)] for y in range(2)]
    dark, bright = ((*images.viridis_colour(end), 255) for end in (0.0, 1.0))
    middle = (*images.viridis_colour(127 / 254), 255)
    assert pixels == [[dark, bright, middle], [dark, (0, 0, 0, 0), bright]]
    few = images.viridis_grid_data_uri([[0.0, 1.0, 0.4, math.nan]], colours=3)
    read = image.open(io.BytesIO(base64.b64decode(few.split(",")[1]))).convert("RGBA")
    third = (*images.viridis_colour(0.5), 255)
    assert [read.getpixel((x, 0)) for x in range(4)] == [dark, bright, third, (0, 0, 0, 0)]
