"""Whole models of GPT-2's shape, scanned: time and peak memory of one process each.

``python -m benchmarks.models NAME`` runs one of `RUNS` and prints its figures as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.memory import peak_mb
from benchmarks.scan import TEN

VOCABULARY = 50_257


def gpt2(length: int, *, layers: int = 12) -> Any:
    """GPT-2's shape with random weights, and as many positions as tokens.

    Two layers are held as a model for such lengths is: in bfloat16, and with the activation as one
    call. ``gelu_new``, the same function written as seven, makes the plain forward of 65,536 tokens
    take 5.3 GB in float32 by itself.
    """
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_positions=length, n_layer=layers, use_cache=False)
    if layers == 12:
        return transformers.GPT2Model(config).eval()
    config.activation_function = "gelu_pytorch_tanh"
    return transformers.GPT2Model(config).eval().bfloat16()


def text(length: int) -> Tensor:
    return torch.randint(VOCABULARY, (1, length))


def forward(length: int, *, layers: int = 12) -> None:
    """The fused forward pass alone."""
    gpt2(length, layers=layers)(text(length))


def scanned(length: int, *, layers: int = 12, statistics: tuple[str, ...] | None = None) -> None:
    from headwise import scan

    scan(gpt2(length, layers=layers), {"input_ids": text(length)}, statistics=statistics)


def eager(length: int) -> None:
    """Returned weights, and the same statistics of them; the scores cannot be had."""
    model = gpt2(length)
    model.set_attn_implementation("eager")
    for weights in model(text(length), output_attentions=True).attentions:
        for row in weights[0]:  # head by head, so that the statistics themselves take little
            dense(row)


def dense(weights: Tensor) -> dict[str, Tensor]:
    """`TEN` but the logsumexp, from one head's weights (queries, keys)."""
    length = len(weights)
    distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    received = weights.sum(0)
    cells = weights.unflatten(0, (64, -1)).mean(1).unflatten(1, (64, -1)).sum(-1)
    return {
        "entropy": -torch.xlogy(weights, weights).sum(-1).mean(),
        "maximum": weights.amax(-1).mean(),
        "first_token": weights[:, 0].mean(),
        "previous_token": weights.diagonal(-1).mean(),
        "distance": (weights * distance).sum(-1).mean(),
        "within_64": weights.masked_fill(distance > 64, 0.0).sum(-1).mean(),
        "most_received": received.topk(8).values,
        "participation": weights.square().sum(-1).reciprocal().mean(),
        "map": cells,
    }


def bertviz(length: int) -> None:
    """Its page of every layer and head, which is all that it computes."""
    from bertviz import model_view

    model = gpt2(length)
    model.set_attn_implementation("eager")
    weights = model(text(length), output_attentions=True).attentions
    model_view(weights, [str(i) for i in range(length)], html_action="return")


def transformer_lens(length: int) -> None:
    """Its cache of every pattern, and the same statistics of them."""
    import transformers
    from tokenizers import Tokenizer, models
    from transformer_lens.model_bridge import TransformerBridge

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_positions=length, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).eval()
    model.set_attn_implementation("eager")  # its own choice: it hooks the patterns
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    special = {"bos_token": "b", "eos_token": "b", "pad_token": "b", "unk_token": "a"}
    with TemporaryDirectory() as folder:  # it looks a model up by its place
        model.save_pretrained(folder)
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(
            folder
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        bridge = TransformerBridge.boot_transformers(
            folder, hf_model=model, tokenizer=tokenizer, device="cpu"
        )
    _, cache = bridge.run_with_cache(
        text(length), return_type=None, names_filter=lambda name: name.endswith("hook_pattern")
    )
    for layer in range(12):
        for row in cache[f"blocks.{layer}.attn.hook_pattern"][0]:
            dense(row)


class Run(NamedTuple):
    """One process; ``most_mb`` is what it may take, ``package`` what it needs to be installed."""

    what: str
    work: Callable[[], None]
    most_mb: int | None = None
    package: str = "transformers"


RUNS = {
    "forward-4096": Run("4,096 tokens: the fused forward alone", lambda: forward(4096)),
    "scan-4096": Run(
        "4,096 tokens: headwise.scan, ten statistics", lambda: scanned(4096, statistics=TEN)
    ),
    "eager-4096": Run("4,096 tokens: eager, nine of the ten", lambda: eager(4096)),
    "lens-4096": Run(
        "4,096 tokens: TransformerLens, nine of the ten",
        lambda: transformer_lens(4096),
        package="transformer_lens",
    ),
    "scan-256": Run("256 tokens: headwise.scan, ten", lambda: scanned(256, statistics=TEN)),
    "bertviz-256": Run("256 tokens: BertViz, its page", lambda: bertviz(256), package="bertviz"),
    "forward-16384": Run("16,384 tokens: the fused forward alone", lambda: forward(16384)),
    "scan-16384": Run(
        "16,384 tokens: headwise.scan, the standard set", lambda: scanned(16384), 2600
    ),
    "forward-65536": Run(
        "65,536 tokens, 2 layers, bfloat16: the fused forward alone",
        lambda: forward(65536, layers=2),
    ),
    "scan-65536": Run(
        "65,536 tokens, 2 layers, bfloat16: headwise.scan, ten",
        lambda: scanned(65536, layers=2, statistics=TEN),
        3000,
    ),
}


def measure(name: str) -> dict[str, float] | None:
    """Seconds and peak memory of a process of its own; None where a package is missing."""
    if find_spec(RUNS[name].package) is None:
        return None
    command = [sys.executable, "-m", "benchmarks.models", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, float] | None = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    with torch.no_grad():
        start = time.perf_counter()
        RUNS[sys.argv[1]].work()
        taken = time.perf_counter() - start
    print(json.dumps({"seconds": taken, "mb": peak_mb()}))
