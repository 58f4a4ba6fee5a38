"""Draw the curves of pruned models in the documentation; a part of ``make pictures``.

Of the trained encoder 18 of 72 heads go, chosen on 200 sentences and measured on 200 others. Of the
model that ships half of the heads go. It learned Python's standard library, and is cut and measured
on the field bench's ports, which are Python that it has not seen and that never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from headwise import surgery
from headwise.models import tiny
from headwise.models.minilm import model_folder
from headwise.models.text import read_sentences
from headwise.reports.surgery import draw_curve
from headwise.support.files import write_whole
from headwise.surgery import Pruning

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images" / "surgery"
PORTS = ROOT / "benchmarks" / "field"
BATCH = 50
FILES, BYTES = 16, 255  # of one part; of one file


def middles(files: Sequence[Path]) -> Int[Tensor, "files length"]:
    """Return the begin symbol and the bytes in the middle of each file."""
    rows = []
    for file in files:
        raw = file.read_bytes()
        start = (len(raw) - BYTES) // 2
        rows.append(tiny.encode(raw[start : start + BYTES]))
    return torch.stack(rows)


def read_ports() -> tuple[Tensor, Tensor]:
    """Return windows of Python to choose and fit on, and of other files to measure on."""
    first, second, third = (
        sorted(PORTS.joinpath(part, "ports").glob("*.py")) for part in (".", "second", "third")
    )
    return middles(first[:FILES]), middles([*second, *third][:FILES])


def prune_encoder() -> Pruning:
    """Take a quarter of the heads out of the trained encoder."""
    model: nn.Module = AutoModel.from_pretrained(model_folder())
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    to_fit, held_out = (
        [
            dict(tokenizer(half[start : start + BATCH], padding=True, return_tensors="pt"))
            for start in range(0, len(half), BATCH)
        ]
        for half in read_sentences()
    )
    return surgery.prune(model, to_fit, held_out=held_out, keep=0.75)


def prune_tiny() -> Pruning:
    """Take half of the heads out of the model that ships."""
    to_fit, held_out = read_ports()
    return surgery.prune(tiny.load(), to_fit, held_out=held_out, keep=0.5)


def curve_of(pruned: Pruning) -> str:
    """Return the picture of a pruning's curve."""
    return str(draw_curve(pruned))


def main() -> None:
    """Prune both models, print the reports, and draw the curves."""
    for name, prune in (("tiny", prune_tiny), ("curve", prune_encoder)):
        pruned = prune()
        print(pruned)
        write_whole(IMAGES / f"{name}.svg", curve_of(pruned))


if __name__ == "__main__":
    main()
