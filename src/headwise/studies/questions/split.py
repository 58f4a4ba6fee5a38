"""When are the heads split: before the projection or after it?"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise import functional
from headwise.budget import Budget
from headwise.layer.attention import Attention
from headwise.models.reading import Progress
from headwise.studies.drawing import CARD, INK, LINE, SERIES, SOFT
from headwise.studies.question import Fact, Numbers, Question, Table
from headwise.studies.tracing import PROJECTED, cuts, shapes_on_the_way, trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ASKED = {"batch": 1, "length": 12, "embed_dim": 512, "heads": 2}
OTHER = {"batch": 3, "length": 5, "embed_dim": 28, "heads": 4}  # no two products the same
ENTRIES = 64  # of q, whose inputs are counted
CELLS = 32  # a picture of a Jacobian is this many blocks of entries by this many of inputs

# What each axis is. "a*b" is one axis that holds a and b.
AXES = {
    "torch": {
        "x": ("batch", "length", "embed_dim"),
        "q": ("length", "batch", "embed_dim"),
        "per_head": ("batch*heads", "length", "head_dim"),
        "weights": ("batch*heads", "length", "length"),
        "head_outputs": ("batch*heads", "length", "head_dim"),
        "merged": ("length*batch", "embed_dim"),
        "output": ("length", "batch", "embed_dim"),
        "returned": ("batch", "length", "embed_dim"),
    },
    "native": {
        "x": ("batch", "length", "embed_dim"),
        "q": ("batch", "length", "embed_dim"),
        "per_head": ("batch", "heads", "length", "head_dim"),
        "weights": ("batch", "heads", "length", "length"),
        "head_outputs": ("batch", "heads", "length", "head_dim"),
        "merged": ("batch*length", "embed_dim"),
        "output": ("batch", "length", "embed_dim"),
        "returned": ("batch", "length", "embed_dim"),
    },
}


def measure(progress: Progress) -> dict[str, Any]:
    """Trace both layers; find what reaches q; split first, and compare."""
    asked, other = traced(ASKED), traced(OTHER)
    return {
        "asked": ASKED | {"head_dim": ASKED["embed_dim"] // ASKED["heads"]},
        "other": OTHER,
        "shapes": asked["shapes"],
        "by_axes": by_axes(ASKED),
        "other_shapes": other["shapes"],
        "other_by_axes": by_axes(OTHER),
        "cuts": asked["cuts"],
        "cuts_after_projection": asked["cuts_after_projection"],
        "cuts_that_are_views": asked["cuts_that_are_views"],
        **split_first_compared(),
    }


# ---- the trace -------------------------------------------------------------------------------


def traced(sizes: dict[str, int]) -> dict[str, Any]:
    """Shapes on the way through torch's layer and the native one, and their cuts into heads."""
    embed_dim, heads = sizes["embed_dim"], sizes["heads"]
    x = torch.randn(sizes["batch"], sizes["length"], embed_dim)
    packed = nn.MultiheadAttention(embed_dim, heads, batch_first=True)
    native = Attention(embed_dim, heads)
    steps = {
        "torch": trace(packed, x, lambda x: packed(x, x, x)),
        "native": trace(native, x, native),
    }
    head_dim = embed_dim // heads
    shapes = {name: shapes_on_the_way(taken, head_dim=head_dim) for name, taken in steps.items()}
    # The fused kernel keeps its weights to itself: the layer's matrix has them.
    shapes["native"].setdefault("weights", list(native.matrix(x).dense().shape))
    found = [cut for taken in steps.values() for cut in cuts(taken, head_dim=head_dim)]
    return {
        "shapes": shapes,
        "cuts": len(found),
        "cuts_after_projection": sum(cut.stage == PROJECTED for cut in found),
        "cuts_that_are_views": sum(cut.is_view for cut in found),
    }


def by_axes(sizes: dict[str, int]) -> dict[str, dict[str, list[int]]]:
    """The shapes that the names of the axes say."""
    known = sizes | {"head_dim": sizes["embed_dim"] // sizes["heads"]}
    return {
        layer: {
            stage: [math.prod(known[part] for part in axis.split("*")) for axis in axes]
            for stage, axes in stages.items()
        }
        for layer, stages in AXES.items()
    }


# ---- the other order -------------------------------------------------------------------------


def split_first_compared() -> dict[str, Any]:
    """Cut x before the projection: which inputs reach q, and which function it is."""
    embed_dim, heads = ASKED["embed_dim"], ASKED["heads"]
    layer = Attention(embed_dim, heads)
    blocks = block_diagonal(layer)
    x = torch.randn(ASKED["batch"], ASKED["length"], embed_dim)
    reach = {"attention": reached(layer, x), "split_first": reached(blocks, x)}
    own = [p.detach() for p in parts(layer)]
    budget = Budget.of(lambda x, *p: split_first(x, *p, heads=heads), x, *own)
    equal, unequal = budget.check(blocks(x)), budget.check(layer(x))
    count = 3 * embed_dim * embed_dim
    return {
        "entries": ENTRIES,
        "reach": {name: float(r[:ENTRIES].float().mean()) for name, r in reach.items()},
        "inputs_of_entries": {n: int(r[:ENTRIES].any(0).sum()) for n, r in reach.items()},
        "reach_map": {name: pooled(r) for name, r in reach.items()},
        "weights": count,
        "weights_split_first": 3 * heads * (embed_dim // heads) ** 2,
        "blocks": {"within": equal.within, "error": equal.error, "allowed": equal.allowed},
        "attention": {
            "within": unequal.within,
            "difference": unequal.error,
            "times_allowed": unequal.ratio,
        },
    }


def parts(layer: Attention) -> list[Tensor]:
    """The weights of the four projections; biases are zero in a new layer."""
    return [p.weight for p in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)]


def block_diagonal(layer: Attention) -> Attention:
    """A copy whose projections of q, k and v connect each head with its own part of x alone."""
    copied = copy.deepcopy(layer)
    width = layer.embed_dim // layer.num_heads
    kept = torch.block_diag(*torch.ones(layer.num_heads, width, width))
    with torch.no_grad():
        for weight in parts(copied)[:3]:
            weight.mul_(kept)
    return copied


def split_first(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, *, heads: int) -> Tensor:
    """Cut x into heads, and only then project each part, by the blocks on the diagonal."""
    width = x.shape[-1] // heads
    cut = x.unflatten(-1, (heads, width)).transpose(1, 2)
    q, k, v = (
        cut @ torch.stack([w.unflatten(0, (heads, width))[h].split(width, 1)[h].mT for h in range(heads)])
        for w in (wq, wk, wv)
    )
    return F.linear(functional.head_outputs(q, k, v).transpose(1, 2).flatten(2), wo)


def reached(layer: Attention, x: Tensor) -> Tensor:
    """(entries of q, inputs), bool: where the last token's Jacobian is not zero."""

    def q(token: Tensor) -> Tensor:
        return layer.matrix(torch.cat([x[:, :-1], token[None, None]], 1)).q[0, :, -1].flatten()

    jacobian = torch.autograd.functional.jacobian(q, x[0, -1], vectorize=True)
    assert isinstance(jacobian, Tensor)
    return jacobian != 0


def pooled(reach: Tensor) -> list[list[float]]:
    """The share of each block of entries and inputs that is not zero."""
    return F.adaptive_avg_pool2d(reach.float()[None], CELLS)[0].tolist()
