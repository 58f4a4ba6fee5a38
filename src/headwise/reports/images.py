"""Small images and bytes as text: viridis colours, PNG as data URIs, base85."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

RGB = tuple[int, int, int]

# Every 8th colour of viridis (Stéfan van der Walt and Nathaniel Smith, CC0). Linear interpolation
# between them is right to 2 of 255 in each channel.
_VIRIDIS = bytes.fromhex(
    "440154 470d60 48186a 482374 472d7b 453781 424086 3e4989 3b528b 375b8d 33638d"
    "2f6b8e 2c728e 297a8e 26828e 23898e 21918c 1f978b 1f9f88 21a685 27ad81 31b57b"
    "3dbc74 4cc26c 5cc863 6ece58 81d34d 95d840 aadc32 c0df25 d5e21a eae51a fde725"
)
_STOPS = len(_VIRIDIS) // 3
COLOURS = 255  # of a palette; the last of 256 entries is transparent
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def viridis_colour(position: float) -> RGB:
    """Return the colour at a position, which is clamped to 0 to 1."""
    step = min(max(position, 0.0), 1.0) * (_STOPS - 1)
    low = min(int(step), _STOPS - 2)
    left, right = _VIRIDIS[3 * low : 3 * low + 3], _VIRIDIS[3 * low + 3 : 3 * low + 6]
    red, green, blue = (round(a + (b - a) * (step - low)) for a, b in zip(left, right, strict=True))
    return red, green, blue


def weight_position(weight: float) -> float:
    """Return the position of a weight on the colour scale: its square root spreads small ones."""
    return math.sqrt(max(weight, 0.0))


def css_colour(colour: RGB) -> str:
    """Return a colour as ``#21918c``."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def text_colour_on(colour: RGB) -> str:
    """Return black or white, by the larger contrast with a colour (WCAG 2 relative luminance)."""
    linear = [(c / 255 / 12.92) if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # The contrast with black is (L + .05) / .05, with white 1.05 / (L + .05).
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"


def css_gradient() -> str:
    colours = ",".join(css_colour(viridis_colour(n / 16)) for n in range(17))
    return f"linear-gradient(90deg,{colours})"


def viridis_grid_data_uri(
    positions: Sequence[Sequence[float]] | np.ndarray[Any, np.dtype[Any]], *, colours: int = COLOURS
) -> str:
    """Return a grid of positions on the colour scale as a PNG data URI; NaN is transparent.

    The image has one byte for each pixel and a palette, less than half the size of RGB. With fewer
    colours it is smaller.
    """
    clear = colours  # the index after the colours
    given = np.asarray(positions, np.float64)
    steps = np.rint((colours - 1) * np.clip(np.nan_to_num(given), 0, 1))
    rows = np.where(np.isnan(given), clear, steps).astype(np.uint8)
    height, width = rows.shape
    # ISO/IEC 15948: a filter type precedes each row; 0 is no filter.
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    scale = (viridis_colour(n / (colours - 1)) for n in range(colours))
    palette = b"".join(bytes(rgb) for rgb in (*scale, (0, 0, 0)))
    parts = [
        (b"IHDR", header),
        (b"PLTE", palette),
        (b"tRNS", b"\xff" * colours + b"\0"),
        (b"IDAT", zlib.compress(np.pad(rows, ((0, 0), (1, 0))).tobytes(), 9)),
        (b"IEND", b""),
    ]
    image = _SIGNATURE
    for name, data in parts:
        image += struct.pack(">I", len(data)) + name + data
        image += struct.pack(">I", zlib.crc32(name + data))
    return "data:image/png;base64," + base64.b64encode(image).decode("ascii")


_LEFT_OUT = "<>&\"'\\`/-"
ALPHABET = "".join(chr(n) for n in range(33, 127) if chr(n) not in _LEFT_OUT)
_DIGITS = np.frombuffer(ALPHABET.encode(), np.uint8)


def encode_base85(content: bytes) -> str:
    """Return bytes as text. A last group of k bytes takes k + 1 characters."""
    missing = -len(content) % 4
    groups = np.frombuffer(content + bytes(missing), ">u4").astype(np.uint32)
    characters = np.empty((len(groups), 5), np.uint8)
    for place in range(4, -1, -1):
        groups, digits = np.divmod(groups, np.uint32(len(ALPHABET)))
        characters[:, place] = _DIGITS[digits]
    text = characters.tobytes().decode()
    return text[: len(text) - missing]
