"""A pruning and a regrouping of a small model, and their pages."""

from functools import cache

from headwise.models.tiny import TinySizes
from headwise.reports.surgery import render_cut
from headwise.surgery import Pruning, Regrouping, prune, regroup
from tests.surgery import small

SIZES = TinySizes(embed_dim=48, num_layers=4, num_heads=12, wide=36)
FIT, HELD_OUT = small.ids(2, 9), small.ids(3, 9, seed=1)


@cache
def pruned() -> Pruning:
    """A model of 4 layers of 12 heads, a quarter of which is gone."""
    return prune(small.tiny(sizes=SIZES), FIT, held_out=HELD_OUT, by="gradient")


@cache
def regrouped() -> Regrouping:
    """The same model with a third of its kv heads."""
    return regroup(small.tiny(sizes=SIZES), FIT, held_out=HELD_OUT, kv_heads=4)


def commands_of(model: str) -> list[str]:
    return [
        "from transformers import AutoModel",
        f'model = AutoModel.from_pretrained("{model}-of-which-some-heads-are-gone")',
    ]


def page_of_pruning(model: str = "a small model") -> str:
    return render_cut(pruned(), model=model, commands=commands_of(model))


def page_of_regrouping(model: str = "a small model") -> str:
    return render_cut(regrouped(), model=model, commands=commands_of(model))
