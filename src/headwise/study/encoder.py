"""Encoder of the study, and its recorded run over the demo text.

It is the trained encoder all-MiniLM-L6-v2, or, where that is not installed, a small one that is
trained on the spot. The small one predicts, at every letter of a text, the letter before and the
letter after. A position can predict its neighbours only by attending to them, so within 300 steps
(some seconds) heads of the first layer become previous-letter and next-letter heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.checkpoints.transformers import load
from headwise.errors import MissingExtraError
from headwise.layers.hooks import record_modules
from headwise.models import minilm
from headwise.models.text import read_opening_paragraphs
from headwise.study.implementations import SharedWeights
from headwise.support.lazy import require_package
from headwise.support.progress import Progress, no_progress
from headwise.support.tracing import one_thread

EMBED_DIM, NUM_HEADS, NUM_LAYERS = 64, 4, 2
LENGTH, SHORTER = 256, 90  # letters; the shorter text is padded to LENGTH
STEPS, WINDOW, BATCH = 300, 64, 16


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention layer during the model's own forward pass.

    ``output`` is the result of the output projection, before the residual and the LayerNorm.
    """

    x: Float[Tensor, "batch queries embed_dim"]
    output: Float[Tensor, "batch queries embed_dim"]
    weights: SharedWeights


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """Attention calls of an encoder over a text, and a shorter text padded to its length.

    Attributes:
        model: the model's name.
        num_heads: heads of each layer.
        tokens: the tokens of the whole text, which is sequence 0 of the batch and has no padding.
        real: True where a position holds a token, False where it is padding.
        calls: the call of each layer, in order.
        missing: the reason why the trained encoder did not run, and the command that installs it.
    """

    model: str
    num_heads: int
    tokens: tuple[str, ...]
    real: Bool[Tensor, "batch keys"]
    calls: tuple[AttentionCall, ...]
    missing: MissingExtraError | None = None


_cache: list[RecordedRun] = []


def encoder_run(progress: Progress = no_progress) -> RecordedRun:
    """Return the cached run over the demo text of MiniLM, or of a small encoder trained now."""
    if not _cache:
        try:
            _cache.append(run_minilm(progress=progress))
        except MissingExtraError as missing:
            _cache.append(run_small_encoder(missing, progress))
    return _cache[0]


def reason_for_small_encoder() -> MissingExtraError | None:
    """Return the error of the trained encoder if `encoder_run` used the small one, else None."""
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
    """Record all-MiniLM-L6-v2 over a text and a shorter one, by default of the demo."""
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


class SmallEncoder(nn.Module):
    """Encoder of letters that predicts the letter before and the letter after each letter."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, EMBED_DIM)
        nn.init.normal_(self.letters.weight, std=0.5)
        block = nn.TransformerEncoderLayer(
            EMBED_DIM, NUM_HEADS, 2 * EMBED_DIM, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(EMBED_DIM)
        self.blocks = nn.TransformerEncoder(block, NUM_LAYERS, norm, enable_nested_tensor=False)
        self.guess = nn.Linear(EMBED_DIM, 2 * letters)

    def forward(
        self,
        ids: Int[Tensor, "batch queries"],
        start: Int[Tensor, "batch 1"] | int = 0,
        padding: Bool[Tensor, "batch queries"] | None = None,
    ) -> Float[Tensor, "batch queries neighbours letters"]:
        """Return the logits of each letter of the alphabet for each neighbour.

        Positions count from ``start``. Their sines and cosines are those of Attention Is All You
        Need section 3.5, but the longest wave is 100 positions instead of 10,000, and the
        amplitude 2 instead of 1. Neighbours then differ more, and heads learn them in fewer steps.
        """
        rate = torch.exp(torch.arange(0, EMBED_DIM, 2) * (-math.log(100.0) / EMBED_DIM))
        angle = (start + torch.arange(ids.shape[1]))[..., None] * rate
        places = 2 * torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)
        x = self.blocks(self.letters(ids) + places, src_key_padding_mask=padding)
        guesses: Tensor = self.guess(x).unflatten(-1, (2, -1))
        return guesses


def run_small_encoder(missing: MissingExtraError, progress: Progress = no_progress) -> RecordedRun:
    """Train a small encoder on the demo text, from a fixed seed, and record it over the beginning.

    ``missing`` is the error that says why the trained encoder does not run.
    """
    text = " ".join(read_opening_paragraphs())
    alphabet = sorted(set(text))
    ids = torch.tensor([alphabet.index(letter) for letter in text])
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(0)
        model = SmallEncoder(len(alphabet))
        _train(model, ids, progress)
    model.eval().requires_grad_(False)
    real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [SHORTER]])
    ends = []
    for block in model.blocks.layers:
        layer: Any = block.self_attn
        packed = layer.in_proj_weight, layer.in_proj_bias
        out = layer.out_proj.weight, layer.out_proj.bias
        ends.append((layer, layer, SharedWeights.from_packed(*packed, *out)))
    calls = record_calls(lambda: model(ids[:LENGTH].repeat(2, 1), padding=~real), ends)
    name = "an encoder trained on the spot"
    return RecordedRun(name, NUM_HEADS, tuple(text[:LENGTH]), real, calls, missing)


def _train(model: SmallEncoder, ids: Int[Tensor, " length"], progress: Progress) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98))
    for step in range(STEPS):
        if step % (STEPS // 10) == 0:
            progress("training a small encoder", step, STEPS)
        offset = torch.randint(len(ids) - WINDOW, (BATCH, 1))
        # Windows start at random positions, so that training covers every position.
        start = torch.randint(LENGTH - WINDOW + 1, (BATCH, 1))
        window = ids[offset + torch.arange(WINDOW)]
        neighbours = torch.stack([window[:, :-2], window[:, 2:]], dim=2)
        guesses = model(window, start)[:, 1:-1]  # at letters that have two neighbours
        loss = F.cross_entropy(guesses.flatten(0, 2), neighbours.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    progress("training a small encoder", STEPS, STEPS)
