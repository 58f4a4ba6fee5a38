"""A pruning of a small model, and its page."""

from __future__ import annotations

from functools import cache

from headwise.models.tiny import TinySizes
from headwise.reports.surgery import render_pruning
from headwise.surgery import Pruning, prune
from tests.surgery import small

SIZES = TinySizes(embed_dim=48, num_layers=4, num_heads=12, wide=36)


@cache
def pruned() -> Pruning:
    """A model of 4 layers of 12 heads, a quarter of which is gone."""
    given = small.ids(2, 9), small.ids(3, 9, seed=1)
    return prune(small.tiny(sizes=SIZES), given[0], held_out=given[1], by="gradient")


def page_of_pruning(model: str = "a small model") -> str:
    commands = [
        "from transformers import AutoModel",
        f'model = AutoModel.from_pretrained("{model}-of-which-some-heads-are-gone")',
    ]
    return render_pruning(pruned(), model=model, commands=commands)
