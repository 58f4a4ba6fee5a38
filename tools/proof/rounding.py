"""Allowed errors, and verdicts on small perturbations."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from itertools import product
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import headwise
from headwise.testing import Budget
from tools.proof.commands import call_command, without_times_and_paths
from tools.proof.digests import Entries, digest_tensors

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
STEPS = (3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
CASES = 200
QUANTITIES = (
    "head outputs",
    "transposed",
    "weights",
    "logsumexp",
    "entropy",
    "gradients",
    "function",
)


def measure_budgets() -> Entries:
    """Return the allowed errors of seeded cases: every quantity, dtype and kind of option."""
    for seed in range(CASES):
        quantity = QUANTITIES[seed % len(QUANTITIES)]
        budget = make_budget(quantity, seed)
        parts = budget if isinstance(budget, dict) else {"": budget}
        allowed = {part: each.allowed for part, each in parts.items()}
        flat = torch.cat([x.flatten() for x in allowed.values()])
        yield (
            f"{seed}: {quantity}",
            [digest_tensors(allowed), float(flat.max()), float(flat.mean())],
        )


def make_budget(quantity: str, seed: int) -> Budget | dict[str, Budget]:
    """Return the budget of a quantity; bits of the seed choose the options."""
    dtype, generator = DTYPES[seed % len(DTYPES)], torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v, y = draw(2, 6, 11, 8), draw(2, 3, 13, 8), draw(2, 3, 13, 5), draw(2, 6, 11, 5)
    sink, slopes = draw(6), draw(6).abs()
    possible: dict[str, Any] = {
        "mask": headwise.Mask.causal(align="bottom-right"),
        "softcap": 3.0,
        "sink": sink,
        "scale": 0.9,
        "score_bias": headwise.ScoreBias.alibi(slopes, align="bottom-right"),
    }
    options = {
        name: value for bit, (name, value) in enumerate(possible.items(), 2) if seed >> bit & 1
    }
    match quantity:
        case "head outputs":
            return Budget.for_head_outputs(q, k, v, **options)
        case "transposed":
            return Budget.for_transposed(q, k, y, **options)
        case "weights":
            return Budget.for_weights(q, k, **options)
        case "logsumexp":
            return Budget.for_logsumexp(q, k, **options)
        case "entropy":
            return Budget.for_entropy(q, k, **options)
        case "gradients":
            return Budget.for_gradients(q, k, v, grad_output=y, **options)
        case _:
            return Budget.for_function(lambda a, b: (a @ b.mT).tanh(), q, k[:, :1])


RUN = re.compile("the same outputs|OTHER OUTPUTS")


def measure_verdicts() -> Entries:
    """Perturb the output projection of a layer, and ask `compare`, `Budget` and `verify`."""
    torch.manual_seed(3)
    layer = nn.MultiheadAttention(48, 6, batch_first=True, dtype=torch.float64)
    for x in layer.parameters():
        nn.init.normal_(x, std=0.2)
    relative = torch.randn(48, 48, dtype=torch.float64)
    heads = torch.randn(3, 11, 48, dtype=torch.float64)
    for dtype, step in product(DTYPES, STEPS):
        right, other = deepcopy(layer).to(dtype), deepcopy(layer).to(dtype)
        exact = layer.out_proj.weight.detach()
        with torch.no_grad():
            other.out_proj.weight.copy_(exact * (1 + step * relative))
        diagnosis = headwise.compare(other, right)
        inputs, weight = heads.to(dtype), right.out_proj.weight.detach()
        budget = Budget.for_function(nn.functional.linear, inputs, weight)
        check = budget.check(nn.functional.linear(inputs, other.out_proj.weight.detach()))
        save_file(other.state_dict(), "other.safetensors")
        save_file(right.state_dict(), "right.safetensors")
        layouts = ("--first-layout", "torch-packed", "--second-layout", "torch-packed")
        _, printed = call_command(
            *("verify", "other.safetensors", "right.safetensors", "--outputs", "--heads", 6),
            *(*layouts, "--json"),
        )
        verified = without_times_and_paths(json.loads(printed))
        yield (
            f"{str(dtype).removeprefix('torch.')} {step:.0e}",
            {
                "compare": str(diagnosis.verdict),
                "budget": ["within" if check else "outside", check.ratio],
                "verify": verified["verdict"],
                "outputs": next(line.strip() for line in verified["lines"] if RUN.search(line)),
            },
        )
