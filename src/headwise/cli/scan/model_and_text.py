"""The model that is scanned, a folder's or the one that ships, and the tokens that it reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from headwise.cli.scan.scan_options import ScanOptions
from headwise.errors import OptionError
from headwise.reports.wording import visible
from headwise.scanning.estimate import require_memory
from headwise.scanning.model_inputs import OUTSIDE
from headwise.support.axes import many

MOST_NAMES = 6  # of special tokens: some models have hundreds
TEXT_LENGTH = 4096  # tokens of a text, where nothing else is said
REPEATS_LENGTH = 512
SEED = 0
TWO = "two tokens or more: a token alone can only look at itself"


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelToScan:
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


def model_of(asked: ScanOptions) -> ModelToScan:
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
            what=f"the weights in {asked.model_dir}",
            do="use a machine with more memory, or --force",
        )
    stored = load(asked.model_dir, trust_remote_code=asked.trust_remote_code)
    tokenizer = stored.tokenizer

    def encode(text: str, most: int | None) -> list[int]:
        assert tokenizer is not None
        return tokenizer.ids(text) if most is None else tokenizer.cut(text, most)

    return ModelToScan(
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


def of_tiny() -> ModelToScan:
    """The model of bytes that ships with headwise."""
    from headwise.bundled_models import tiny

    def name(token: int) -> str:
        return "[begin]" if token == tiny.BEGIN else chr(token) if token < 128 else f"\\x{token:x}"

    return ModelToScan(
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


# ---- what it reads -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TextToRead:
    """One sequence of tokens; ``words`` says what it is."""

    name: str
    ids: Int[Tensor, "1 length"]
    words: str


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The text files that are named, and those ending in .txt of folders that are named.

    Raises:
        OptionError: one that is not there, or a folder without any.
    """
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        if not inside or not all(file.is_file() for file in inside):
            raise OptionError(
                saw=f"{path}, {'a folder without .txt files' if path.is_dir() else 'no file'}",
                needed="a file of text in UTF-8, or a folder of .txt files",
                do="look where the text is, and name it",
            )
        found += inside
    return found


def passages_of(subject: ModelToScan, asked: ScanOptions) -> list[TextToRead]:
    """What was asked for; of files the beginning of each; by default what ships with headwise."""
    length = asked.length
    if asked.random_repeats or (asked.demo and not asked.text and asked.tokens is None):
        # On random tokens a head that carries on a repeat has nothing else to go by.
        return [repeats(subject, length)]
    if asked.tokens is not None:
        return [stored_tokens(subject, asked.tokens, length)]
    if asked.text:
        return [text(subject, _content(f), length, name=f.name) for f in files_of(asked.text)]
    from headwise.bundled_models import demo_text as alice

    whole = "\n\n".join(alice.paragraphs())
    return [text(subject, whole, length, name=f"the opening of {alice.TITLE}")]


def text(subject: ModelToScan, content: str, length: int | None, *, name: str) -> TextToRead:
    """The beginning of a text.

    Raises:
        OptionError: no tokenizer, a length the model cannot take, or a text of fewer than two
            tokens.
    """
    if subject.encode is None:
        raise OptionError(
            saw=f"{name}, for {subject.title}, whose folder holds no tokenizer",
            needed="tokens",
            do="--tokens FILE, with token ids that you have made, or --random-repeats",
        )
    most = length_of(subject, length, default=TEXT_LENGTH)
    whole, ids = subject.encode(content, None), subject.encode(content, most)
    if len([token for token in whole if token not in subject.specials]) < 2:
        raise OptionError(
            saw=f"{name}, " + ("a text of one token" if content.strip() else "which is empty"),
            needed=f"a text of {TWO}",
            do="give a longer text, or none: one ships with headwise",
        )
    part = "all" if len(ids) == len(whole) else f"the first {len(ids):,} of"
    return TextToRead(name, torch.tensor([ids]), f"{name}, {part} {len(whole):,} tokens")


def stored_tokens(subject: ModelToScan, file: Path, length: int | None) -> TextToRead:
    """Token ids out of a file: numbers with spaces, commas or line ends between them.

    Raises:
        OptionError: no such file, something that is no token of the model, too few, or too many.
    """
    content = _content(file)
    words = re.split(r"[\s,]+", content.strip().strip("[]").strip())
    strange = [word for word in words if not re.fullmatch(r"-?\d{1,15}", word)]
    if strange and words != [""]:
        raise OptionError(
            saw=f"{file}, with {strange[0][:40]!r}",
            needed="whole numbers, with spaces, commas or line ends between them",
            do="--text FILE, for a text",
        )
    whole = [] if words == [""] else [int(word) for word in words]
    if len(whole) < 2:
        raise OptionError(
            saw=f"{file}, with {many(len(whole), 'token')}",
            needed=TWO,
            do="write more token ids into the file",
        )
    ids = torch.tensor([whole])
    subject.require_tokens(ids)  # also what is cut off
    most = length_of(subject, length, default=TEXT_LENGTH)
    part = f"all {len(whole):,}" if len(whole) <= most else f"the first {most:,} of {len(whole):,}"
    return TextToRead(file.name, ids[:, :most], f"{file.name}, {part} tokens")


def repeats(subject: ModelToScan, length: int | None) -> TextToRead:
    """Random tokens, and the same again: what comes next can only be known from the first time.

    Raises:
        OptionError: a length the model cannot take, or one too short to repeat anything.
    """
    most = length_of(subject, length, default=REPEATS_LENGTH)
    begin = [] if subject.begin is None else [subject.begin]
    half = (most - len(begin)) // 2
    if half < 2:
        raise OptionError(
            saw=f"--random-repeats with --length {most}",
            needed=f"{4 + len(begin)} tokens or more: two of them, and these again",
            do="leave --length out",
        )
    plain = torch.tensor([t for t in range(subject.vocabulary) if t not in subject.specials])
    generator = torch.Generator().manual_seed(SEED)
    # None stands twice in the first half, as long as the vocabulary lasts.
    order = torch.randperm(len(plain), generator=generator)
    once = plain[order.repeat(-(-half // len(plain)))[:half]]
    ids = torch.cat([torch.tensor(begin, dtype=once.dtype), once, once])[None]
    return TextToRead("random repeats", ids, f"{half:,} random tokens and the same {half:,} again")


def length_of(subject: ModelToScan, asked: int | None, *, default: int) -> int:
    """How many tokens are read at most.

    Raises:
        OptionError: fewer than two, or more than the model has positions for.
    """
    if asked is None:
        return min(subject.usual or default, subject.positions or default)
    if asked < 2:
        raise OptionError(saw=f"--length {asked}", needed=TWO, do="leave --length out")
    if subject.positions is not None and asked > subject.positions:
        raise OptionError(
            saw=f"--length {asked:,}",
            needed=f"at most {subject.positions:,}: {subject.title} has positions for so many",
            do=f"--length {subject.positions}",
        )
    return asked


def _content(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(
            saw=f"{file}, in which byte {error.start} is no UTF-8",
            needed="text in UTF-8",
            do="convert it, or give token ids with --tokens",
        ) from error
    except OSError as error:
        raise OptionError(
            saw=f"{file}, which cannot be read ({error.strerror})",
            needed="a file on this machine",
            do="look where it is, and name it",
        ) from error
