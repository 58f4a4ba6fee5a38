"""Encoder of the study, and its recorded run over the demo text.

It is the trained encoder all-MiniLM-L6-v2, or one with random weights where that is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from headwise.checkpoints.transformers import load
from headwise.errors import MissingExtraError
from headwise.layers.hooks import record_modules
from headwise.models import minilm
from headwise.models.text import read_opening_paragraphs
from headwise.study.implementations import SharedWeights
from headwise.support.lazy import require_package
from headwise.support.progress import Progress, no_progress

EMBED_DIM, NUM_HEADS, NUM_LAYERS = 64, 4, 2
LENGTH, SHORTER = 256, 90  # letters; the shorter text is padded to LENGTH
RANDOM = "an encoder with random weights"


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention layer during the model's own forward pass."""

    x: Float[Tensor, "batch queries embed_dim"]
    output: Float[Tensor, "batch queries embed_dim"]  # before the residual and the LayerNorm
    weights: SharedWeights


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """Attention calls of an encoder over a text, and a shorter text padded to its length."""

    model: str
    num_heads: int  # of each layer
    tokens: tuple[str, ...]  # of the whole text: sequence 0 of the batch, without padding
    real: Bool[Tensor, "batch keys"]  # False where a position is padding
    calls: tuple[AttentionCall, ...]  # of each layer, in order
    missing: MissingExtraError | None = None  # the reason why the trained encoder did not run


_cache: list[RecordedRun] = []


def encoder_run(progress: Progress = no_progress) -> RecordedRun:
    """Return the cached run over the demo text of MiniLM, or of an encoder with random weights."""
    if not _cache:
        try:
            _cache.append(run_minilm(progress=progress))
        except MissingExtraError as missing:
            _cache.append(run_random_encoder(missing))
    return _cache[0]


def reason_for_random_encoder() -> MissingExtraError | None:
    """Return the error of the trained encoder if `encoder_run` used another, else None."""
    return _cache[0].missing if _cache else None


@torch.no_grad()
def record_calls(
    run: Callable[[], object], ends: Sequence[tuple[nn.Module, nn.Module, SharedWeights]]
) -> tuple[AttentionCall, ...]:
    """Record attention layers while ``run`` runs the model.

    ``ends`` are of each layer the module that gets its input, the one that returns its output, and
    the weights.
    """
    with record_modules(module for first, last, _ in ends for module in (first, last)) as runs:
        run()
    outputs = [runs[last][-1].output for _, last, _ in ends]
    return tuple(
        AttentionCall(runs[first][-1].first, y[0] if isinstance(y, tuple) else y, weights)
        for (first, _, weights), y in zip(ends, outputs, strict=True)
    )


def run_minilm(*texts: str, progress: Progress = no_progress) -> RecordedRun:
    paragraphs = read_opening_paragraphs()
    texts = texts or (" ".join(paragraphs), paragraphs[0])
    progress("loading all-MiniLM-L6-v2", 0, 2)
    folder = minilm.model_folder()
    require_package("transformers", purpose="which runs the trained encoder")
    stored = load(folder)
    model: Any = stored.model.requires_grad_(False)
    model.set_attn_implementation("eager")
    assert stored.tokenizer is not None
    progress("running the model", 1, 2)
    ids = [torch.tensor(stored.tokenizer.ids(text)) for text in texts]
    batch = nn.utils.rnn.pad_sequence(ids, batch_first=True)
    real = torch.arange(batch.shape[1]) < torch.tensor([[len(each)] for each in ids])
    ends = []
    for layer in model.encoder.layer:
        inner, out = layer.attention.self, layer.attention.output.dense
        weights = SharedWeights.of_linears(inner.query, inner.key, inner.value, out)
        ends.append((inner, out, weights))
    calls = record_calls(lambda: model(input_ids=batch, attention_mask=real.long()), ends)
    progress("running the model", 2, 2)
    tokens = tuple(map(stored.tokenizer.token_text, ids[0].tolist()))
    return RecordedRun("all-MiniLM-L6-v2", model.config.num_attention_heads, tokens, real, calls)


def run_random_encoder(missing: MissingExtraError) -> RecordedRun:
    """Record torch's encoder with random weights over the letters that begin the demo text.

    ``missing`` is the error that says why the trained encoder does not run.
    """
    text = " ".join(read_opening_paragraphs())[:LENGTH]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(EMBED_DIM, NUM_HEADS, 2 * EMBED_DIM, batch_first=True)
        model = nn.TransformerEncoder(layer, NUM_LAYERS, enable_nested_tensor=False)
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=EMBED_DIM**-0.5)
        letters = torch.randn(len(set(text)), EMBED_DIM)
    model.eval().requires_grad_(False)
    x = letters[[sorted(set(text)).index(letter) for letter in text]].repeat(2, 1, 1)
    real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [SHORTER]])
    ends = [
        (layer.self_attn, layer.self_attn, SharedWeights.of_torch_layer(layer.self_attn))
        for layer in model.layers
    ]
    calls = record_calls(lambda: model(x, src_key_padding_mask=~real), ends)
    return RecordedRun(RANDOM, NUM_HEADS, tuple(text), real, calls, missing)
