"""The model that is scanned: out of a folder, or the one that ships with headwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from headwise.cli.scan.asked import Asked
from headwise.errors import OptionError
from headwise.reports.telling import visible
from headwise.scanning import machine
from headwise.scanning.estimate import require_memory
from headwise.scanning.inputs import OUTSIDE

MOST_NAMES = 6  # of special tokens: some models have hundreds


@dataclass(frozen=True, eq=False, kw_only=True)
class Subject:
    """A model, and what is known of its tokens.

    Attributes:
        title: what it is called.
        model: in eval mode.
        inputs: what it is called with, for (batch, length) ids.
        vocabulary: how many tokens it knows.
        positions: the longest input it can take; None where there is no such.
        usual: how much it read at once when it was trained, where that is known.
        begin: the token that begins a text, where there is one.
        separators: token ids by how they are written.
        specials: token ids.
        encode: (text, at most so many tokens, or all of it) -> ids; None without a tokenizer.
        name_of: how a token is written; None without a tokenizer.
        notes: what is not as it was stored.
    """

    title: str
    model: nn.Module
    inputs: Callable[[Tensor], Any]
    vocabulary: int
    positions: int | None
    usual: int | None = None
    begin: int | None
    separators: dict[str, int]
    specials: tuple[int, ...]
    encode: Callable[[str, int | None], list[int]] | None
    name_of: Callable[[int], str] | None
    notes: tuple[str, ...] = ()

    @property
    def about(self) -> str:
        """``BertModel, 22.7 million parameters in float32``."""
        parameters = list(self.model.parameters())
        count = sum(p.numel() for p in parameters)
        kinds = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
        return (
            f"{type(self.model).__name__}, {_in_words(count)} parameters in {' and '.join(kinds)}"
        )

    @property
    def chosen(self) -> str:
        """Which tokens count as separators and as special, in a sentence."""
        separators = ", ".join(_quoted(name) for name in self.separators)
        specials = ", ".join(_quoted(self.name(token)) for token in self.specials[:MOST_NAMES])
        if len(self.specials) > MOST_NAMES:
            specials += f" and {len(self.specials) - MOST_NAMES} more"
        said = [f"Separators: {separators}."] if separators else []
        return " ".join([*said, *([f"Special tokens: {specials}."] if specials else [])])

    def name(self, token: int) -> str:
        """How a token is written, or its number."""
        return str(token) if self.name_of is None else self.name_of(token)

    def read(self, ids: Tensor) -> None:
        """Call the model, and forget what it gives."""
        given = self.inputs(ids)
        self.model(**given) if isinstance(given, dict) else self.model(*given)

    def require_tokens(self, ids: Tensor) -> None:
        """Raise OptionError if there are tokens that the model does not know."""
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocabulary:
            raise OptionError(
                saw=f"tokens from {low} to {high}",
                needed=f"tokens from 0 to {self.vocabulary - 1}: {self.title} knows "
                f"{self.vocabulary:,}",
                do=OUTSIDE,
            )


def of(asked: Asked) -> Subject:
    """The model that was asked for.

    Raises:
        HeadwiseError: as `headwise.checkpoints.stored_model.load`; or memory will not do.
    """
    if asked.model_dir is None:
        return of_tiny()
    from headwise.checkpoints.stored_model import load, require_model

    size = require_model(asked.model_dir)
    if not asked.force:
        require_memory(
            size,
            machine.available(),
            what=f"the weights in {asked.model_dir}",
            do="use a machine with more memory, or --force",
        )
    stored = load(asked.model_dir, trust_remote_code=asked.trust_remote_code)
    tokenizer = stored.tokenizer

    def encode(text: str, most: int | None) -> list[int]:
        assert tokenizer is not None
        return tokenizer.ids(text) if most is None else tokenizer.cut(text, most)

    return Subject(
        title=title_of(asked.model_dir),
        model=stored.model,
        inputs=stored.inputs,
        vocabulary=stored.vocabulary,
        positions=stored.positions,
        begin=stored.begin,
        separators={} if tokenizer is None else tokenizer.separators,
        specials=() if tokenizer is None else tokenizer.specials,
        encode=None if tokenizer is None else encode,
        name_of=None if tokenizer is None else tokenizer.name,
        notes=stored.notes,
    )


def title_of(folder: Path) -> str:
    """The folder's name, with the name above it where it says nothing by itself.

    In transformers' own cache, models--owner--name/snapshots/revision, it is owner/name.
    """
    whole = folder.resolve()
    for part in whole.parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return f"{whole.parent.name}/{whole.name}" if whole.name == "model" else whole.name


def of_tiny() -> Subject:
    """The model of bytes that ships with headwise."""
    from headwise.models import tiny

    def name(token: int) -> str:
        return "[begin]" if token == tiny.BEGIN else chr(token) if token < 128 else f"\\x{token:x}"

    return Subject(
        title="tiny",
        model=tiny.load(),
        inputs=lambda ids: (ids,),
        vocabulary=tiny.VOCABULARY,
        positions=None,
        usual=int(tiny.training()["plan"]["length"]),
        begin=tiny.BEGIN,
        separators={".": ord("."), "\n": ord("\n")},
        specials=(tiny.BEGIN,),
        encode=lambda text, most: tiny.encode(text).tolist()[:most],
        name_of=name,
    )


def _quoted(name: str) -> str:
    shown = visible(name)
    return f"“{shown}”" if len(shown) < 3 else shown


def _in_words(count: int) -> str:
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.1f} {word}"
    return f"{count:,}"
