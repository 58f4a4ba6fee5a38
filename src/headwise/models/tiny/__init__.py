"""Small language model of bytes, built from headwise layers; its weights ship with the package.

The model was trained on the source of Python's standard library, which is under the PSF license
(`tools/tiny` in the repository). The file ``training.json`` beside the weights holds the
measurements of the training: the loss, and when heads formed. Training used 256 ids at a time. At
1,024 ids the loss is twice as large, and the heads are less sharp.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Integer
from safetensors.torch import load as tensors_in
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.errors import OptionError
from headwise.function.rotary import Rotary
from headwise.layers.attention import Attention
from headwise.masks.mask import Mask
from headwise.matrix.operator import AttentionMatrix
from headwise.models.text import causal_padding_mask

__all__ = [
    "BEGIN",
    "VOCABULARY",
    "Block",
    "Tiny",
    "decode",
    "encode",
    "load",
    "name_of",
    "training_measurements",
]

BEGIN = 256
VOCABULARY = 257


def encode(text: str | bytes) -> Int[Tensor, " length"]:
    """Return the begin symbol and the UTF-8 bytes of a text."""
    raw = text.encode() if isinstance(text, str) else text
    return torch.tensor([BEGIN, *raw], dtype=torch.int64)


def spans(text: str) -> Int[Tensor, "length 2"]:
    """Return the first character of each token of a text, and the one after its last.

    The bytes of one character have the same; the begin symbol has no character.
    """
    sizes = torch.tensor([len(character.encode()) for character in text], dtype=torch.int64)
    first = torch.arange(len(text)).repeat_interleave(sizes)
    return torch.cat([torch.zeros(1, 2, dtype=torch.int64), torch.stack([first, first + 1], 1)])


def decode(ids: Int[Tensor, " length"]) -> str:
    """Return the text of ids, without begin symbols; invalid UTF-8 becomes U+FFFD.

    Raises:
        OptionError: an id is outside the vocabulary.
    """
    values = ids.tolist()
    if unknown := [i for i in values if not 0 <= i < VOCABULARY]:
        raise OptionError(
            saw=f"the id {unknown[0]}",
            needed=f"bytes, 0 to 255, and the begin symbol, {BEGIN}",
            do="decode one sequence of ids, e.g. logits[0].argmax(-1)",
        )
    return bytes(i for i in values if i != BEGIN).decode(errors="replace")


def name_of(token: int) -> str:
    """Return the text of an id: its character, ``[begin]``, or the hexadecimal of other bytes."""
    return "[begin]" if token == BEGIN else chr(token) if token < 128 else f"\\x{token:x}"


class TinySizes(NamedTuple):
    """Sizes of the parameters, and the base of the rotary embedding."""

    embed_dim: int = 256
    num_layers: int = 4
    num_heads: int = 8
    wide: int = 768  # between the two layers of a block's network
    theta: float = 1_000.0  # below the usual 10,000, since texts are some hundred bytes long


class Block(nn.Module):
    """Transformer block: attention and a two-layer network, each with LayerNorm and residual."""

    def __init__(self, sizes: TinySizes) -> None:
        super().__init__()
        width = sizes.embed_dim
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(
            width,
            sizes.num_heads,
            q_bias=False,
            k_bias=False,
            v_bias=False,
            out_bias=False,
            rotary=Rotary(theta=sizes.theta),
        )
        self.network_norm = nn.LayerNorm(width, bias=False)
        self.wide = nn.Linear(width, sizes.wide, bias=False)
        self.narrow = nn.Linear(sizes.wide, width, bias=False)

    def forward(
        self, x: Float[Tensor, "batch length embed_dim"], *, mask: Mask
    ) -> Float[Tensor, "batch length embed_dim"]:
        """Compute the block."""
        x = x + self.attention(self.attention_norm(x), mask=mask)
        y: Tensor = self.narrow(F.gelu(self.wide(self.network_norm(x)), approximate="tanh"))
        return x + y


class Tiny(nn.Module):
    """A causal language model of bytes.

    ``blocks[i].attention`` is a `headwise.Attention`. The embedding is also the unembedding: the
    logit of a symbol is the product of its embedding and the normalised state.
    """

    def __init__(self, sizes: TinySizes = TinySizes()) -> None:  # noqa: B008 (a tuple of numbers)
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(VOCABULARY, sizes.embed_dim)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.num_layers))
        self.norm = nn.LayerNorm(sizes.embed_dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights; every block starts as the identity."""
        nn.init.normal_(self.embedding.weight, std=0.05)
        for block in self.block_list():
            for linear in (block.attention.q_proj, block.attention.k_proj, block.wide):
                nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
            nn.init.normal_(block.attention.v_proj.weight, std=self.sizes.embed_dim**-0.5)
            for linear in (block.attention.out_proj, block.narrow):
                nn.init.zeros_(linear.weight)

    def block_list(self) -> list[Block]:
        """Return ``blocks`` as a typed list."""
        return [block for block in self.blocks if isinstance(block, Block)]

    @property
    def unembedding(self) -> Float[Tensor, "vocabulary embed_dim"]:
        """The matrix that maps the normalised state to logits: the embedding."""
        return self.embedding.weight

    def forward(
        self, ids: Int[Tensor, "batch length"], *, lengths: Integer[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch length vocabulary"]:
        """Return the logits of each next symbol.

        Args:
            ids: bytes and begin symbols, see `encode`.
            lengths: the number of real ids of each sequence; the rest is padding, whose logits
                have no meaning.
        """
        mask = causal_padding_mask(lengths)
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, mask=mask)
        return F.linear(self.norm(x), self.unembedding)

    def matrices(
        self, ids: Int[Tensor, "batch length"], *, lengths: Integer[Tensor, " batch"] | None = None
    ) -> list[AttentionMatrix]:
        """Return the attention matrix of each layer for ``ids``."""
        mask, x, matrices = causal_padding_mask(lengths), self.embedding(ids), []
        for block in self.block_list():
            matrices.append(block.attention.matrix(block.attention_norm(x), mask=mask))
            x = block(x, mask=mask)
        return matrices


WEIGHTS, TRAINING = "weights.safetensors", "training.json"


def load() -> Tiny:
    """Return the trained model in float32 and eval mode; the file holds float16.

    The parameters require no gradient. For further training, use
    ``load().requires_grad_().train()``.
    """
    return load_model_from_bytes(resources.files(__name__).joinpath(WEIGHTS).read_bytes())


def training_measurements() -> dict[str, Any]:
    """Return the measurements from the training of the shipped weights."""
    file = resources.files(__name__).joinpath(TRAINING)
    measurements: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return measurements


def load_model_from_bytes(raw: bytes, sizes: TinySizes | None = None) -> Tiny:
    """Load a model in float32 from the bytes of a file, which may hold float16."""
    with torch.device("meta"):
        model = Tiny(sizes or TinySizes())
    state = {name: tensor.float() for name, tensor in tensors_in(raw).items()}
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()
