"""What implementations of attention do around the formula, found out by running them.

Nothing here reads a setting or a document: a token is changed to see who sees it, values are made
constant to see what dropout leaves of them, an output projection is zeroed to see what remains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.error_budget.budget import Budget
from headwise.study.experiments.tracing import trace
from headwise.study.implementation import Implementation, SharedWeights
from headwise.study.implementations import GPT2, TorchLayer
from headwise.study.question import scientific

BATCH, NUM_HEADS, LENGTH, EMBED_DIM = 2, 4, 6, 64
DROPOUT = 0.5
UNSEEN = "–"

Make = Callable[..., Implementation]  # of (embed_dim, num_heads, dropout=...)


def conventions(make: Make) -> dict[str, str | int | bool]:
    """Every convention of one implementation, in words that `KINDS` lists."""
    torch.manual_seed(0)  # each is asked the same
    filled = make(EMBED_DIM, NUM_HEADS).fill(SharedWeights.random(EMBED_DIM)).eval()
    held, called = dropout_modules(make)
    return {
        "boolean": true_in_a_mask(filled),
        "fill": lowest_score(filled),
        "empty_row": row_without_keys(filled),
        "dropped": dropped(make),
        "dropout_modules": held,
        "dropout_modules_called": called,
        "weights": axes_of_weights(filled),
        "weights_in_training": weights_in_training(make),
        "softmax_narrows": softmax_narrows(make(EMBED_DIM, NUM_HEADS).double()),
        "block": adds(filled),
    }


KINDS: Mapping[str, Sequence[str]] = {
    "boolean": ("hides the key", "keeps the key", "adds 1 to the score", "is refused"),
    "empty_row": ("NaN", "mean of all values", "zeros"),
    "dropped": ("attention weights", "output", "both"),
    "block": ("nothing", "residual", "residual, norm"),
}


def tokens() -> Tensor:
    """Random tokens, (batch, length, embed_dim)."""
    return torch.randn(BATCH, LENGTH, EMBED_DIM)


def true_in_a_mask(peer: Implementation) -> str:
    """What True does to a key in a boolean mask, in the words of `KINDS`.

    Only the first key is True. Then the first token, or the second, is changed: does the last
    query notice? Where it notices both, True may have been added to the score, as a number.
    """
    x, mask = tokens(), torch.zeros(BATCH, LENGTH, LENGTH, dtype=torch.bool)
    mask[..., 0] = True
    try:
        before = peer(x, mask)[:, -1]
    except (TypeError, ValueError):  # headwise's own errors are among them
        return "is refused"
    match [notices(peer, x, token, before, mask) for token in (0, 1)]:
        case [False, True]:
            return "hides the key"
        case [True, False]:
            return "keeps the key"
    added = torch.equal(before, peer(x, mask.float())[:, -1])
    return "adds 1 to the score" if added else "something else"


def notices(
    peer: Implementation,
    x: Tensor,
    token: int,
    before: Tensor,
    mask: Any = None,
    *,
    query: int = -1,
) -> bool:
    """Whether the output of a query changes in any bit when a token changes."""
    changed = x.clone()
    changed[:, token] += 1.0
    return not torch.equal(peer(changed, mask)[:, query], before)


def sees_ahead(peer: Implementation) -> bool:
    """Whether the first query notices the last token while no mask is given."""
    x = tokens()
    return notices(peer, x, LENGTH - 1, peer(x)[:, 0], query=0)


def softmaxes(peer: Implementation, x: Tensor, mask: Any = None) -> list[tuple[Tensor, Tensor]]:
    """What goes into each softmax that torch computes, and what comes out."""
    steps = trace(peer, x, lambda x: peer(x, mask))
    return [(s.given[0].detach(), s.result) for s in steps if s.operation == "_softmax"]


def lowest_score(peer: Implementation) -> str:
    """What a hidden score is when it enters the softmax; a dash where no softmax is seen.

    The mask is causal, in the implementation's own values.
    """
    mask = peer.spell(torch.ones(BATCH, LENGTH, LENGTH, dtype=torch.bool).tril())
    lowest = [float(scores.min()) for scores, _ in softmaxes(peer, tokens(), mask)]
    if not lowest:
        return UNSEEN
    return "−∞" if min(lowest) == -math.inf else scientific(min(lowest)).replace("-", "−")


def softmax_narrows(peer: Implementation) -> bool:
    """Whether the softmax of a layer in float64 is computed in less."""
    found = softmaxes(peer, tokens().double())
    return any(weights.dtype != torch.float64 for _, weights in found)


@torch.no_grad()
def row_without_keys(peer: Implementation) -> str:
    """What a query gets that may attend to nothing, in the words of `KINDS`."""
    x, row = tokens(), 1
    may_attend = torch.ones(BATCH, LENGTH, LENGTH, dtype=torch.bool)
    may_attend[:, row] = False
    output = peer(x, peer.spell(may_attend))[:, row]
    if output.isnan().all():
        return "NaN"
    if not output.any():
        return "zeros"
    held = peer.held()
    even = Budget.of(
        lambda x, v, out: F.linear(F.linear(x, v).mean(1), out), x, held.v.clone(), held.out.clone()
    )
    return "mean of all values" if even.check(output).within else "something else"


def _off_one(sums: Tensor) -> bool:
    """Whether weights that add up to 1 do not, beyond the rounding of their sum."""
    return bool(((sums - 1).abs() > 2 * LENGTH * torch.finfo(sums.dtype).eps).any())


@torch.no_grad()
def dropped(make: Make) -> str:
    """What dropout falls on in training: "attention weights", "output", "both" or "nothing".

    All values are 1, and the output projection changes nothing. A dropped weight then leaves the
    numbers of its head equal to one another, but not to 1; a dropped output is a lone zero.
    """
    x, given, values = tokens(), SharedWeights.random(EMBED_DIM), torch.zeros(EMBED_DIM, EMBED_DIM)
    x[..., 0] = values[:, 0] = 1.0
    constant = replace(given, v=values, out=torch.eye(EMBED_DIM))
    peer = make(EMBED_DIM, NUM_HEADS, dropout=DROPOUT).fill(constant).train()
    heads = peer(x).unflatten(-1, (NUM_HEADS, -1))
    largest = heads.amax(-1)
    output = bool(((heads == 0) & (largest != 0)[..., None]).any())
    weights = _off_one(largest * (1 - DROPOUT) if output else largest)
    found = {(True, True): "both", (True, False): "attention weights", (False, True): "output"}
    return found.get((weights, output), "nothing")


@torch.no_grad()
def dropout_modules(make: Make) -> tuple[int, int]:
    """How many dropout modules there are, and how many of them are called in training."""
    peer = make(EMBED_DIM, NUM_HEADS, dropout=DROPOUT).train()
    modules = [module for module in peer.modules() if isinstance(module, nn.Dropout)]
    called: set[nn.Module] = set()
    for module in modules:
        module.register_forward_hook(lambda module, *_: called.add(module))
    peer(tokens())
    return len(modules), len(called)


@torch.no_grad()
def axes_of_weights(peer: Implementation) -> str:
    """The axes of the weights that are returned, told apart by their sizes; a dash for none.

    A row of weights sums to 1 over its keys.
    """
    weights = peer.attention_weights(tokens())
    if weights is None:
        return UNSEEN
    last = "queries, keys" if not _off_one(weights.sum(-1)) else "keys, queries"
    names = {BATCH: "batch", NUM_HEADS: "heads"}
    return ", ".join([*(names[size] for size in weights.shape[:-2]), last])


@torch.no_grad()
def weights_in_training(make: Make) -> str:
    """Whether the weights that are returned in training are those before or after dropout."""
    peer = make(EMBED_DIM, NUM_HEADS, dropout=DROPOUT).train()
    weights = peer.attention_weights(tokens())
    if weights is None:
        return UNSEEN
    return "after dropout" if _off_one(weights.sum(-1)) else "before dropout"


@torch.no_grad()
def adds(peer: Implementation) -> str:
    """What the whole block gives while its attention gives nothing: what else is inside.

    The input is large, so that the small number under the root of a norm makes no difference.
    """
    peer.held().out.zero_()
    for bias in peer.held().biases or ():
        bias.zero_()
    x = 1e6 * tokens()
    output = peer.block(x)
    if not output.any():
        return "nothing"
    if torch.equal(output, x):
        return "residual"
    norm = Budget.of(lambda x: F.layer_norm(x, x.shape[-1:]), x)
    return "residual, norm" if norm.check(output).within else "something else"


def start(make: Make, *, embed_dim: int, num_heads: int) -> dict[str, float | bool]:
    """The standard deviation of the output projection at the start.

    Also whether queries and keys are copies of each other before a model draws its weights anew.
    """
    torch.manual_seed(0)
    peer = make(embed_dim, num_heads)
    copies = torch.equal(peer.held().q, peer.held().k)
    peer.start()
    return {"out": float(peer.held().out.detach().std()), "copies": copies}


def of_one_class() -> dict[str, Any]:
    """What the same class does otherwise on another of its own paths."""
    given = SharedWeights.random(EMBED_DIM)
    layer = TorchLayer(EMBED_DIM, NUM_HEADS)
    layer.fill(given)
    layer.need_weights = False
    kernels = {
        kernel: GPT2(EMBED_DIM, NUM_HEADS, implementation=kernel).fill(given).eval()
        for kernel in ("eager", "sdpa")
    }
    return {
        "torch_in_training": row_without_keys(layer.train()),
        "torch_in_evaluation": row_without_keys(layer.eval()),
        "gpt2_boolean": {kernel: true_in_a_mask(peer) for kernel, peer in kernels.items()},
        "gpt2_sees_ahead": {kernel: sees_ahead(peer) for kernel, peer in kernels.items()},
    }
