"""Small encoder trained on the spot, the fallback for the trained encoder.

The encoder predicts, at every letter of a text, the letter before and the letter after. A position
can predict its neighbours only by attending to them, so within 300 steps (some seconds) heads of
the first layer become previous-letter and next-letter heads.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.models.recorded import AttentionCall, Projections, RecordedRun
from headwise.support.modes import one_thread
from headwise.support.progress import Progress, no_progress

EMBED_DIM, NUM_HEADS, NUM_LAYERS = 64, 4, 2
LENGTH, SHORTER = 256, 90  # letters; the shorter text is padded to LENGTH
STEPS, WINDOW, BATCH = 300, 64, 16
NEIGHBOURS = (-1, 1)


class EncoderBlock(nn.Module):
    """Encoder block: attention and a two-layer network, with LayerNorm before and a residual."""

    def __init__(self, attention: type[nn.MultiheadAttention]) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(EMBED_DIM), nn.LayerNorm(EMBED_DIM)
        self.attention = attention(EMBED_DIM, NUM_HEADS, batch_first=True)
        self.wide = nn.Linear(EMBED_DIM, 2 * EMBED_DIM)
        self.narrow = nn.Linear(2 * EMBED_DIM, EMBED_DIM)

    def attention_input_and_output(
        self, x: Float[Tensor, "batch queries embed_dim"], padding: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the input and the output of the attention layer."""
        x = self.norm(x)
        output, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)
        return x, output

    def forward(
        self, x: Float[Tensor, "batch queries embed_dim"], padding: Tensor | None = None
    ) -> Float[Tensor, "batch queries embed_dim"]:
        """Compute the block; ``padding`` (batch, keys) is True for ignored keys."""
        x = x + self.attention_input_and_output(x, padding)[1]
        y: Tensor = self.narrow(F.gelu(self.wide(self.second_norm(x))))
        return x + y


class SmallEncoder(nn.Module):
    """Encoder of letters that predicts the neighbours of each letter."""

    def __init__(self, letters: int, attention: type[nn.MultiheadAttention]) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, EMBED_DIM)
        nn.init.normal_(self.letters.weight, std=0.5)
        self.blocks = nn.ModuleList(EncoderBlock(attention) for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(EMBED_DIM)
        self.guess = nn.Linear(EMBED_DIM, len(NEIGHBOURS) * letters)

    def embed(
        self, ids: Int[Tensor, "batch queries"], start: Int[Tensor, "batch 1"] | None = None
    ) -> Float[Tensor, "batch queries embed_dim"]:
        """Embed letters with their positions, counted from ``start``."""
        position = (
            torch.arange(ids.shape[1]) if start is None else start + torch.arange(ids.shape[1])
        )
        letters: Tensor = self.letters(ids)
        return letters + _position_encoding(position)

    def forward(
        self, ids: Int[Tensor, "batch queries"], start: Int[Tensor, "batch 1"] | None = None
    ) -> Float[Tensor, "batch queries neighbours letters"]:
        """Return the logits of each letter of the alphabet for each neighbour."""
        x = self.embed(ids, start)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.guess(self.norm(x)).unflatten(-1, (len(NEIGHBOURS), -1))
        return scores


def train_and_record_run(
    text: str,
    *,
    attention: type[nn.MultiheadAttention] = nn.MultiheadAttention,
    progress: Progress = no_progress,
) -> RecordedRun:
    """Train on a text, then record a run over its beginning.

    Training uses ``attention`` as the layers. The recorded run uses torch's own layer with the same
    weights, as an independent reference. Training starts from a fixed seed, so the weights are the
    same every time on one machine.

    Args:
        text: at least 256 letters.
        attention: torch.nn.MultiheadAttention, or a class with the same interface.
        progress: called at each tenth of the training.
    """
    alphabet = sorted(set(text))
    ids = torch.tensor([alphabet.index(letter) for letter in text])
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(0)
        trained = _train_encoder(ids, len(alphabet), attention, progress)
        model = SmallEncoder(len(alphabet), nn.MultiheadAttention).eval()
    model.load_state_dict(trained.state_dict())
    batch = ids[:LENGTH].repeat(2, 1)
    real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [SHORTER]])
    return RecordedRun(
        model="an encoder trained on the spot",
        num_heads=NUM_HEADS,
        tokens=tuple(text[:LENGTH]),
        real=real,
        calls=_record_attention_calls(model, batch, real),
    )


def _train_encoder(
    ids: Int[Tensor, " length"],
    letters: int,
    attention: type[nn.MultiheadAttention],
    progress: Progress,
) -> SmallEncoder:
    model = SmallEncoder(letters, attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98))
    for step in range(STEPS):
        if step % (STEPS // 10) == 0:
            progress("training a small encoder", step, STEPS)
        offset = torch.randint(len(ids) - WINDOW, (BATCH, 1))
        # Windows start at random positions, so that training covers every position.
        start = torch.randint(LENGTH - WINDOW + 1, (BATCH, 1))
        loss = _neighbour_loss(model, ids[offset + torch.arange(WINDOW)], start)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    progress("training a small encoder", STEPS, STEPS)
    return model


def _neighbour_loss(model: SmallEncoder, window: Tensor, start: Tensor) -> Tensor:
    """Return the mean cross-entropy of both neighbours, at letters that have two."""
    guesses = model(window, start)[:, 1:-1]
    losses = [
        F.cross_entropy(
            guesses[:, :, which].flatten(0, 1),
            window[:, 1 + neighbour : WINDOW - 1 + neighbour].flatten(),
        )
        for which, neighbour in enumerate(NEIGHBOURS)
    ]
    return torch.stack(losses).mean()


@torch.no_grad()
def _record_attention_calls(
    model: SmallEncoder, batch: Tensor, real: Tensor
) -> tuple[AttentionCall, ...]:
    state, calls = model.embed(batch), []
    for block in model.blocks:
        assert isinstance(block, EncoderBlock)  # for mypy
        x, output = block.attention_input_and_output(state, ~real)
        calls.append(AttentionCall(x, output, _packed_projections(block.attention)))
        state = block(state, ~real)
    return tuple(calls)


def _packed_projections(layer: nn.MultiheadAttention) -> Projections:
    return Projections(
        in_proj_weight=layer.in_proj_weight.detach(),
        in_proj_bias=layer.in_proj_bias.detach(),
        out_proj_weight=layer.out_proj.weight.detach(),
        out_proj_bias=layer.out_proj.bias.detach(),
    )


def _position_encoding(
    position: Int[Tensor, "*positions"],
) -> Float[Tensor, "*positions embed_dim"]:
    """Return sines and cosines of each position, as in Attention Is All You Need section 3.5.

    The longest wave is 100 positions instead of 10,000, and the amplitude is 2 instead of 1.
    Neighbours then differ more, and heads learn them in fewer steps.
    """
    rate = torch.exp(torch.arange(0, EMBED_DIM, 2) * (-math.log(100.0) / EMBED_DIM))
    angle = position[..., None] * rate
    return 2 * torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)
