"""What the model is trained on: the source of Python's standard library, as one stream of ids."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from headwise.bundled_models.tiny.symbols import encode
from headwise.errors import OptionError

# Tests, other people's packages, tables of characters, generated files and the like.
LEFT_OUT = frozenset(
    {
        "__pycache__",
        "encodings",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
HELD_OUT_ONE_IN = 20


@dataclass(frozen=True, eq=False)
class Corpus:
    """Two streams of ids, in each of which every file begins with the begin symbol."""

    train: Int[Tensor, " ids"]
    held_out: Int[Tensor, " held_out_ids"]
    files: int
    held_out_files: int

    @property
    def bytes(self) -> int:
        """What there is to learn from."""
        return self.train.numel() - self.files

    @property
    def held_out_bytes(self) -> int:
        """What is never learned from."""
        return self.held_out.numel() - self.held_out_files


def standard_library() -> Path:
    """Where this Python keeps its standard library."""
    return Path(sysconfig.get_path("stdlib"))


def read(folder: Path) -> Corpus:
    """The Python files of a folder, by name; one in twenty is held out, by a hash of its name.

    Raises:
        OptionError: the folder has no file on one of the two sides.
    """
    sides: dict[bool, list[bytes]] = {True: [], False: []}
    for name in sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.py")):
        if is_read(name):
            sides[is_held_out(name)].append(folder.joinpath(name).read_bytes())
    learned, kept = len(sides[False]), len(sides[True])
    if not learned or not kept:
        raise OptionError(
            saw=f"{learned} Python files to train on and {kept} held out in {folder}",
            needed="at least one of each",
            do="name a folder with many Python files: one in twenty is held out",
        )
    train, held_out = (_stream(sides[side]) for side in (False, True))
    return Corpus(train, held_out, files=learned, held_out_files=kept)


def is_read(name: str) -> bool:
    """Whether a file, named from the folder on, belongs to the corpus."""
    parts = name.split("/")
    return not LEFT_OUT & set(parts) and not parts[0].startswith(("config-", "_sysconfigdata"))


def is_held_out(name: str) -> bool:
    """Whether a file is kept for measuring: the same ones everywhere."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def _stream(files: list[bytes]) -> Tensor:
    return torch.cat([encode(raw) for raw in files])
