"""Draw the curve of the trained encoder's heads in the documentation; a part of ``make pictures``.

18 of its 72 heads go, chosen on 200 sentences and measured on 200 others.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import AutoModel, AutoTokenizer

from headwise import surgery
from headwise.models.minilm import model_folder
from headwise.models.text import read_sentences
from headwise.reports.surgery import draw_curve
from headwise.support.files import write_whole

CURVE = Path(__file__).parents[1] / "docs" / "images" / "surgery" / "curve.svg"
BATCH = 50


def main() -> None:
    """Prune the encoder, print the report, and draw its curve."""
    model: nn.Module = AutoModel.from_pretrained(model_folder())
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    to_fit, held_out = (
        [
            dict(tokenizer(half[start : start + BATCH], padding=True, return_tensors="pt"))
            for start in range(0, len(half), BATCH)
        ]
        for half in read_sentences()
    )
    pruned = surgery.prune(model, to_fit, held_out=held_out, keep=0.75)
    print(pruned)
    write_whole(CURVE, str(draw_curve(pruned)))


if __name__ == "__main__":
    main()
