"""The model to scan, from a folder or from headwise, and the tokens that it reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.scanning._scan import scan
from headwise.scanning.inputs import require_tokens_below
from headwise.scanning.result import HeadScan
from headwise.scanning.selection import Layers, Numbers, Statistics, normalise_token_ids_option
from headwise.scanning.written import WrittenText
from headwise.support.progress import Progress
from headwise.support.tensors import map_leaves
from headwise.support.text import describe_count, escape_unprintable, in_quotes

MOST_NAMES = 6  # special tokens that are named; some models have hundreds
TEXT_LENGTH = 4096  # default number of tokens of a text
REPEATS_LENGTH = 512
SEED = 0
DTYPES = ("float64", "float32", "bfloat16", "float16")
TWO = "two tokens or more, since a single token can only attend to itself"


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelToScan:
    """A model with its tokenizer; without one, ``encode`` and ``name_of`` are None."""

    title: str
    model: nn.Module  # in eval mode
    inputs: Callable[[Tensor], Any]  # from ids (batch, length) to the input of the model
    vocabulary: int
    positions: int | None = None  # the longest input, or None without a limit
    usual: int | None = None  # the length of inputs in training, if known
    begin: int | None = None  # the token at the beginning of a text, if there is one
    separators: dict[str, int] = field(default_factory=dict)  # ids by their text
    specials: tuple[int, ...] = ()
    encode: Callable[[str, int | None], list[int]] | None = None  # a text to its first ids, or all
    # a text to the characters of the same tokens, where these are known
    spans: Callable[[str, int | None], list[tuple[int, int]] | None] | None = None
    name_of: Callable[[int], str] | None = None  # an id to its text
    notes: tuple[str, ...] = ()  # sentences on differences from the stored model
    opened_with: Mapping[str, Any] = field(default_factory=dict)  # arguments of `open_model`

    @classmethod
    def of_module(cls, module: nn.Module, *, separators: Numbers, specials: Numbers) -> ModelToScan:
        """Return a model without a tokenizer, which takes inputs as `headwise.scan` does."""
        separating = normalise_token_ids_option("separators", separators)

        def move(inputs: Any) -> Any:
            device = next(module.parameters()).device
            inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
            return map_leaves(lambda x: x.to(device) if isinstance(x, Tensor) else x, inputs)

        return cls(
            title=type(module).__name__,
            model=module,
            inputs=move,
            vocabulary=0,
            separators={str(token): token for token in separating},
            specials=normalise_token_ids_option("specials", specials),
        )

    @property
    def device(self) -> torch.device:
        """The device of the model's weights."""
        return next(self.model.parameters()).device

    @property
    def about(self) -> str:
        """``BertModel, 22.7 million parameters in float32``."""
        parameters = list(self.model.parameters())
        count = sum(p.numel() for p in parameters)
        kinds = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
        size = f"{count / 10**6:.1f} million" if count >= 10**6 else f"{count:,}"
        size = f"{count / 10**9:.1f} billion" if count >= 10**9 else size
        place = f" on {self.device}" if self.device.type != "cpu" else ""
        kind = type(self.model).__name__
        return f"{kind}, {size} parameters in {' and '.join(kinds)}{place}"

    def scan(
        self,
        inputs: Any,
        *,
        statistics: Statistics = None,
        layers: Layers = None,
        written: WrittenText | None = None,
        progress: Progress | None = None,
    ) -> HeadScan:
        """Return the scan of ids, or of inputs for a model without a tokenizer."""
        options: dict[str, Any] = {"statistics": statistics, "layers": layers, "progress": progress}
        options["written"] = written
        options |= {"separators": tuple(self.separators.values()), "specials": self.specials}
        return scan(self.model, self.inputs(inputs), **options)

    @property
    def separators_and_specials_in_words(self) -> str:
        """Sentences on the tokens that count as separators and as special."""
        more = len(self.specials) - MOST_NAMES
        special = [self.token_text(token) for token in self.specials[:MOST_NAMES]]
        sentences = []
        for kind, names in (("Separators", [*self.separators]), ("Special tokens", special)):
            shown = [escape_unprintable(name) for name in names]
            quoted = ", ".join(in_quotes(name) if len(name) < 3 else name for name in shown)
            if more > 0 and names is special:
                quoted += f" and {more} more"
            sentences += [f"{kind}: {quoted}."] if names else []
        return " ".join(sentences)

    def token_text(self, token: int) -> str:
        """Return the text of a token, or its number without a tokenizer."""
        return str(token) if self.name_of is None else self.name_of(token)

    def require_tokens_in_vocabulary(self, ids: Tensor) -> None:
        """Raise OptionError for tokens outside of the vocabulary."""
        reason = f"{self.title} has a vocabulary of {self.vocabulary:,}"
        require_tokens_below(self.vocabulary, ids, reason)


def open_model(
    folder: str | PathLike[str] | None = None,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> ModelToScan:
    """Load a stored model with its tokenizer, or the small model that ships with headwise.

    Args:
        folder: a folder with a model of transformers, or weights that headwise converted; None for
            the model that ships.
        device: where the model runs, such as "cuda:1".
        dtype: the dtype of the model, such as "bfloat16"; that of its file if None.
        trust_remote_code: True to run code in the folder.

    Raises:
        OptionError: a device or a dtype that is not there, or a cut model of the form "headwise".
        CheckpointError: a cut model whose cut.json is of another one.
        HeadwiseError: as `headwise.checkpoints.transformers.load`.
    """
    try:
        place = torch.device(device)
        torch.zeros(1, device=place).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise OptionError(
            saw=f"{{device}} {device}: {' '.join(str(error).split())[:120]}",
            needed="a device of this machine that torch can use",
            do="leave {device} out to run on the processor",
            parameter="device",
        ) from error
    if dtype not in (None, *DTYPES):
        saw = f"{{dtype}} {dtype}"
        needed = f"one of {', '.join(DTYPES)}"
        raise OptionError(saw=saw, needed=needed, do="{dtype} float32", parameter="dtype")
    number = None if dtype is None else getattr(torch, dtype)
    if folder is None:
        model = _load_tiny()
    else:
        model = _load_stored(Path(folder), number, trust_remote_code=trust_remote_code)
    model.model.to(device=place, dtype=number if folder is None else None)
    opened_with = {"folder": folder, "dtype": dtype, "trust_remote_code": trust_remote_code}
    inputs = model.inputs
    return replace(model, inputs=lambda ids: inputs(ids.to(model.device)), opened_with=opened_with)


def _load_stored(
    folder: Path, dtype: torch.dtype | None, *, trust_remote_code: bool
) -> ModelToScan:
    from headwise.checkpoints.transformers import load
    from headwise.scanning import labels

    labels.require_loadable(folder)
    stored = load(folder, trust_remote_code=trust_remote_code, dtype=dtype)
    labels.label_model(stored.model, folder)
    names = ("model", "inputs", "vocabulary", "positions", "begin", "notes")
    options: dict[str, Any] = {name: getattr(stored, name) for name in names}
    if (tokens := stored.tokenizer) is not None:
        options |= {"separators": tokens.separators, "specials": tokens.specials}
        options["name_of"] = tokens.token_text
        first = tokens.first_ids
        options["encode"] = lambda text, n: tokens.ids(text) if n is None else first(text, n)
        options["spans"] = tokens.spans
    return ModelToScan(title=make_model_title(folder), **options)


def make_model_title(folder: Path) -> str:
    """Return the name of a folder, with the folder above it if the name is just "model"."""
    path = folder.resolve()
    for part in path.parts:  # transformers' cache has models--owner--name/snapshots/revision
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return f"{path.parent.name}/{path.name}" if path.name == "model" else path.name


def _load_tiny() -> ModelToScan:
    from headwise.models import tiny

    return ModelToScan(
        title="tiny",
        model=tiny.load(),
        inputs=lambda ids: (ids,),
        vocabulary=tiny.VOCABULARY,
        usual=int(tiny.training_measurements()["plan"]["length"]),
        begin=tiny.BEGIN,
        separators={".": ord("."), "\n": ord("\n")},
        specials=(tiny.BEGIN,),
        encode=lambda text, most: tiny.encode(text).tolist()[:most],
        spans=lambda text, most: tiny.spans(text).tolist()[:most],
        name_of=tiny.name_of,
    )


# ---- the tokens to read --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TextToRead:
    """One sequence of tokens, with a phrase that describes it; empty with fewer than two tokens."""

    name: str
    ids: Int[Tensor, "1 length"]
    description: str
    is_empty: bool = False
    written: WrittenText | None = None


def list_text_files(paths: Sequence[Path]) -> list[Path]:
    """Return the named text files, and the .txt files of named folders."""
    files: list[Path] = []
    for path in paths:
        inside = [path]
        if path.is_dir():  # without files and folders that a name with a dot hides
            texts = sorted(file for file in path.rglob("*") if file.suffix.lower() == ".txt")
            hidden = re.compile(r"(^|/)\.")
            inside = [x for x in texts if not hidden.search(x.relative_to(path).as_posix())]
        if not inside or not all(file.is_file() for file in inside):
            fault = "a folder without .txt files" if path.is_dir() else "no file"
            raise OptionError(
                saw=f"{{text}} {path}, {fault}",
                needed="a file of text in UTF-8, or a folder of .txt files",
                do="{text} with the path of the text",
                parameter="text",
            )
        files += inside
    return files


def read_texts(
    model: ModelToScan,
    paths: Sequence[str | PathLike[str]],
    *,
    length: int | None = None,
    skip_empty: bool = False,
) -> list[TextToRead]:
    """Return the tokens of text files, and of the .txt files of folders, cut to a length.

    Args:
        model: the model, with its tokenizer.
        paths: files and folders.
        length: the largest number of tokens of a text; that of the model, up to 4,096, if None.
        skip_empty: True to return texts of fewer than two tokens, marked as empty.

    Raises:
        OptionError: a text that cannot be read, or that is empty and may not be left out.
    """
    files, texts = list_text_files([Path(path) for path in paths]), []
    for file in files:
        content = _read_utf8(file)
        text = tokenize_text(model, content, length, name=file.name)
        if text.is_empty and not skip_empty:
            fault = "a text of one token" if content.strip() else "which is empty"
            raise OptionError(
                saw=f"{{text}} {file}, {fault}",
                needed=f"a text of {TWO}",
                do="{skip_empty} to leave such texts out"
                if len(files) > 1
                else "use a longer text, or leave {text} out for the text in headwise",
                parameter={"text": (), "skip_empty": ()},
            )
        texts.append(text)
    if all(text.is_empty for text in texts):
        saw = f"{describe_count(len(texts), 'text')} of fewer than two tokens"
        raise OptionError(saw=saw, needed=f"a text of {TWO}", do="use longer texts")
    return texts


def read_default_text(model: ModelToScan, length: int | None = None) -> TextToRead:
    """Return the text that ships with headwise."""
    from headwise.models import text as alice

    whole = "\n\n".join(alice.read_opening_paragraphs())
    return tokenize_text(model, whole, length, name=f"the opening of {alice.TITLE}")


def tokenize_text(
    subject: ModelToScan, content: str, length: int | None, *, name: str
) -> TextToRead:
    """Return the beginning of a text as tokens."""
    if subject.encode is None:
        raise OptionError(
            saw=f"{name}, for {subject.title}, whose folder holds no tokenizer",
            needed="a tokenizer, or token ids",
            do="{tokens} FILE with your token ids, or {random_repeats}",
            parameter={"tokens": (), "random_repeats": ()},
        )
    most = largest_text_length(subject, length, default=TEXT_LENGTH)
    whole, ids = subject.encode(content, None), subject.encode(content, most)
    is_empty = len([token for token in whole if token not in subject.specials]) < 2
    part = "all" if len(ids) == len(whole) else f"the first {len(ids):,} of"
    words = f"{name}, {part} {len(whole):,} tokens"
    spans = None if subject.spans is None else subject.spans(content, most)
    written = None if spans is None else WrittenText(content, torch.tensor(spans))
    return TextToRead(name, torch.tensor([ids]), words, is_empty=is_empty, written=written)


def read_stored_tokens(subject: ModelToScan, file: Path, length: int | None) -> TextToRead:
    """Read token ids from a file, separated by spaces, commas or line ends."""
    content = _read_utf8(file)
    words = re.split(r"[\s,]+", content.strip().strip("[]").strip())
    strange = [word for word in words if not re.fullmatch(r"-?\d{1,15}", word)]
    if strange and words != [""]:
        saw = f"{file}, with {strange[0][:40]!r}"
        needed = "whole numbers, separated by spaces, commas or line ends"
        raise OptionError(saw=saw, needed=needed, do="{text} FILE for a text", parameter="text")
    whole = [] if words == [""] else [int(word) for word in words]
    if len(whole) < 2:
        saw = f"{file}, with {describe_count(len(whole), 'token')}"
        raise OptionError(saw=saw, needed=TWO, do="write more token ids into the file")
    ids = torch.tensor([whole])
    subject.require_tokens_in_vocabulary(ids)  # before the cut
    most = largest_text_length(subject, length, default=TEXT_LENGTH)
    part = f"all {len(whole):,}" if len(whole) <= most else f"the first {most:,} of {len(whole):,}"
    return TextToRead(file.name, ids[:, :most], f"{file.name}, {part} tokens")


def make_repeated_tokens(subject: ModelToScan, length: int | None) -> TextToRead:
    """Return random tokens followed by the same tokens, so that only induction can predict them."""
    most = largest_text_length(subject, length, default=REPEATS_LENGTH)
    # The default ids of transformers' configs can lie outside of a small vocabulary.
    has_begin = subject.begin is not None and subject.begin < subject.vocabulary
    begin = [subject.begin] if has_begin else []
    half = (most - len(begin)) // 2
    if half < 2:
        raise OptionError(
            saw=f"{{random_repeats}} with {{length}} {most}",
            needed=f"{4 + len(begin)} tokens or more, to repeat two tokens",
            do="leave {length} out",
            parameter={"random_repeats": (), "length": ()},
        )
    plain = torch.tensor([t for t in range(subject.vocabulary) if t not in subject.specials])
    generator = torch.Generator().manual_seed(SEED)
    # No token comes twice in the first half, if the vocabulary is large enough.
    order = torch.randperm(len(plain), generator=generator)
    once = plain[order.repeat(-(-half // len(plain)))[:half]]
    ids = torch.cat([torch.tensor(begin, dtype=once.dtype), once, once])[None]
    return TextToRead("random repeats", ids, f"{half:,} random tokens and the same {half:,} again")


def largest_text_length(subject: ModelToScan, length: int | None, *, default: int) -> int:
    """Return the largest number of tokens to read."""
    if length is None:
        return min(subject.usual or default, subject.positions or default)
    if length < 2:
        raise OptionError(
            saw=f"{{length}} {length}", needed=TWO, do="leave {length} out", parameter="length"
        )
    if subject.positions is not None and length > subject.positions:
        needed = f"at most {subject.positions:,}, the number of positions of {subject.title}"
        do = f"{{length}} {subject.positions}"
        raise OptionError(saw=f"{{length}} {length:,}", needed=needed, do=do, parameter="length")
    return length


def _read_utf8(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig")  # some editors begin a text with a byte order mark
    except UnicodeDecodeError as error:
        saw = f"{file}, in which byte {error.start} is not UTF-8"
        do = "convert the file to UTF-8, or pass token ids with {tokens}"
        raise OptionError(saw=saw, needed="text in UTF-8", do=do, parameter="tokens") from error
    except OSError as error:
        saw = f"{file}, which cannot be read ({error.strerror})"
        do = "check the path and the permissions of the file"
        raise OptionError(saw=saw, needed="a file that can be read", do=do) from error
