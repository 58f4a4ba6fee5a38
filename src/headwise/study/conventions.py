"""Conventions of attention implementations around the formula, measured by running them.

Each convention is observed, not read from settings or documents. For instance, changing a token
shows which queries depend on it, constant values show where dropout acts, and an output projection
of zeros shows what else the block computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.function.budget import Budget
from headwise.study.implementations import GPT2, Implementation, SharedWeights, TorchLayer
from headwise.study.question import format_scientific
from headwise.study.trace import trace_operations

BATCH, NUM_HEADS, LENGTH, EMBED_DIM = 2, 4, 6, 64
DROPOUT = 0.5
UNSEEN = "–"

Constructor = Callable[..., Implementation]  # of (embed_dim, num_heads, dropout=...)


def measure_conventions(constructor: Constructor) -> dict[str, str | int | bool]:
    """Return the conventions of one implementation, in the words of `KINDS`."""
    torch.manual_seed(0)  # the same inputs for each implementation
    filled = constructor(EMBED_DIM, NUM_HEADS).load_weights(SharedWeights.random(EMBED_DIM)).eval()
    modules, called = count_dropout_modules(constructor)
    return {
        "boolean": boolean_mask_effect(filled),
        "fill": masked_score_value(filled),
        "empty_row": output_without_keys(filled),
        "dropped": dropout_target(constructor),
        "dropout_modules": modules,
        "dropout_modules_called": called,
        "weights": attention_weight_axes(filled),
        "weights_in_training": weights_before_or_after_dropout(constructor),
        "softmax_narrows": any(
            weights.dtype != torch.float64
            for _, weights in traced_softmaxes(
                constructor(EMBED_DIM, NUM_HEADS).double(), random_tokens().double()
            )
        ),
        "block": block_extras(filled),
    }


KINDS: Mapping[str, Sequence[str]] = {
    "boolean": ("hides the key", "keeps the key", "adds 1 to the score", "is refused"),
    "empty_row": ("NaN", "mean of all values", "zeros"),
    "dropped": ("attention weights", "output", "both"),
    "block": ("nothing", "residual", "residual, norm"),
}


def random_tokens() -> Tensor:
    return torch.randn(BATCH, LENGTH, EMBED_DIM)


def boolean_mask_effect(implementation: Implementation) -> str:
    """Return the effect of True in a boolean mask on a key, in the words of `KINDS`.

    Only the first key is True. Then the first or the second token changes. If the last query
    depends on both, True may have been added to the score as the number 1.
    """
    x, mask = random_tokens(), torch.zeros(BATCH, LENGTH, LENGTH, dtype=torch.bool)
    mask[..., 0] = True
    try:
        before = implementation(x, mask)[:, -1]
    except (TypeError, ValueError):  # includes headwise's errors
        return "is refused"
    match [depends_on_token(implementation, x, n, query=-1, mask=mask) for n in (0, 1)]:
        case [False, True]:
            return "hides the key"
        case [True, False]:
            return "keeps the key"
    added = torch.equal(before, implementation(x, mask.float())[:, -1])
    return "adds 1 to the score" if added else "something else"


def depends_on_token(
    implementation: Implementation, x: Tensor, token: int, *, query: int, mask: Any = None
) -> bool:
    """Check whether any bit of a query's output changes with a token."""
    changed = x.clone()
    changed[:, token] += 1.0
    before, after = (implementation(each, mask)[:, query] for each in (x, changed))
    return not torch.equal(before, after)


def traced_softmaxes(
    implementation: Implementation, x: Tensor, mask: Any = None
) -> list[tuple[Tensor, Tensor]]:
    steps = trace_operations(implementation, x, lambda x: implementation(x, mask))
    return [(s.inputs[0].detach(), s.result) for s in steps if s.operation == "_softmax"]


def masked_score_value(implementation: Implementation) -> str:
    """Return the value of a hidden score before the softmax; a dash if no softmax is traced.

    The mask is causal, in the values of the implementation.
    """
    mask = implementation.convert_mask(torch.ones(BATCH, LENGTH, LENGTH, dtype=torch.bool).tril())
    softmaxes = traced_softmaxes(implementation, random_tokens(), mask)
    if not softmaxes:
        return UNSEEN
    lowest = min(float(scores.min()) for scores, _ in softmaxes)
    return "−∞" if lowest == -math.inf else format_scientific(lowest).replace("-", "−")


@torch.no_grad()
def output_without_keys(implementation: Implementation) -> str:
    """Return the output of a query without keys, in the words of `KINDS`."""
    x, row = random_tokens(), 1
    may_attend = torch.ones(BATCH, LENGTH, LENGTH, dtype=torch.bool)
    may_attend[:, row] = False
    output = implementation(x, implementation.convert_mask(may_attend))[:, row]
    if output.isnan().all():
        return "NaN"
    if not output.any():
        return "zeros"
    stored = implementation.as_shared_weights()
    even = Budget.for_function(
        lambda x, v, out: F.linear(F.linear(x, v).mean(1), out),
        *(x, stored.v.clone(), stored.out.clone()),
    )
    return "mean of all values" if even.check(output).within else "something else"


def _differs_from_one(sums: Tensor) -> bool:
    return bool(((sums - 1).abs() > 2 * LENGTH * torch.finfo(sums.dtype).eps).any())


@torch.no_grad()
def dropout_target(constructor: Constructor) -> str:
    """Return the target of dropout: "attention weights", "output", "both" or "nothing".

    All values are 1, and the output projection is the identity. A dropped weight then leaves all
    numbers of its head equal, but not 1. A dropped output is a single zero.
    """
    x, values = random_tokens(), torch.zeros(EMBED_DIM, EMBED_DIM)
    drawn = SharedWeights.random(EMBED_DIM)
    x[..., 0] = values[:, 0] = 1.0
    constant = replace(drawn, v=values, out=torch.eye(EMBED_DIM))
    implementation = constructor(EMBED_DIM, NUM_HEADS, dropout=DROPOUT).load_weights(constant)
    implementation.train()
    heads = implementation(x).unflatten(-1, (NUM_HEADS, -1))
    largest = heads.amax(-1)
    output = bool(((heads == 0) & (largest != 0)[..., None]).any())
    weights = _differs_from_one(largest * (1 - DROPOUT) if output else largest)
    targets = {(True, True): "both", (True, False): "attention weights", (False, True): "output"}
    return targets.get((weights, output), "nothing")


@torch.no_grad()
def count_dropout_modules(constructor: Constructor) -> tuple[int, int]:
    implementation = constructor(EMBED_DIM, NUM_HEADS, dropout=DROPOUT).train()
    modules = [module for module in implementation.modules() if isinstance(module, nn.Dropout)]
    called: set[nn.Module] = set()
    for module in modules:
        module.register_forward_hook(lambda module, *_: called.add(module))
    implementation(random_tokens())
    return len(modules), len(called)


@torch.no_grad()
def attention_weight_axes(implementation: Implementation) -> str:
    """Return the axes of the returned weights, identified by their sizes; a dash for no weights.

    The keys are the axis over which weights sum to 1.
    """
    weights = implementation.returned_attention_weights(random_tokens())
    if weights is None:
        return UNSEEN
    last = "queries, keys" if not _differs_from_one(weights.sum(-1)) else "keys, queries"
    names = {BATCH: "batch", NUM_HEADS: "heads"}
    return ", ".join([*(names[size] for size in weights.shape[:-2]), last])


@torch.no_grad()
def weights_before_or_after_dropout(constructor: Constructor) -> str:
    implementation = constructor(EMBED_DIM, NUM_HEADS, dropout=DROPOUT).train()
    weights = implementation.returned_attention_weights(random_tokens())
    if weights is None:
        return UNSEEN
    return "after dropout" if _differs_from_one(weights.sum(-1)) else "before dropout"


@torch.no_grad()
def block_extras(implementation: Implementation) -> str:
    """Return what a block computes besides attention, from its output while attention is 0.

    The input is large, so that the epsilon of a norm makes no difference.
    """
    implementation.as_shared_weights().out.zero_()
    for bias in implementation.as_shared_weights().biases or ():
        bias.zero_()
    x = 1e6 * random_tokens()
    output = implementation.compute_block(x)
    if not output.any():
        return "nothing"
    if torch.equal(output, x):
        return "residual"
    norm = Budget.for_function(lambda x: F.layer_norm(x, x.shape[-1:]), x)
    return "residual, norm" if norm.check(output).within else "something else"


def initial_output_projection_std(
    constructor: Constructor, embed_dim: int, num_heads: int
) -> dict[str, float | bool]:
    """Return the initial standard deviation of the output projection.

    ``copies`` is True if queries and keys start as copies, before a model draws its weights.
    """
    torch.manual_seed(0)
    implementation = constructor(embed_dim, num_heads)
    weights = implementation.as_shared_weights()
    copies = torch.equal(weights.q, weights.k)
    implementation.initialize()
    return {"out": float(weights.out.detach().std()), "copies": copies}


def conventions_by_path() -> dict[str, Any]:
    weights = SharedWeights.random(EMBED_DIM)
    layer = TorchLayer(EMBED_DIM, NUM_HEADS)
    layer.load_weights(weights)
    layer.need_weights = False
    kernels = {
        kernel: GPT2(EMBED_DIM, NUM_HEADS, implementation=kernel).load_weights(weights).eval()
        for kernel in ("eager", "sdpa")
    }
    return {
        "torch_in_training": output_without_keys(layer.train()),
        "torch_in_evaluation": output_without_keys(layer.eval()),
        "gpt2_boolean": {kernel: boolean_mask_effect(made) for kernel, made in kernels.items()},
        "gpt2_sees_ahead": {
            kernel: depends_on_token(made, random_tokens(), -1, query=0)
            for kernel, made in kernels.items()
        },
    }
