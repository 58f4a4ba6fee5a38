"""Training corpus: the source of Python's standard library as one stream of ids."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from headwise.errors import OptionError
from headwise.models.tiny import encode

# Tests, third-party packages, character tables, generated files and similar.
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
    """Two streams of ids, in which every file starts with the begin symbol."""

    train: Int[Tensor, " ids"]
    held_out: Int[Tensor, " held_out_ids"]
    files: int
    held_out_files: int

    @property
    def bytes(self) -> int:
        """The number of bytes for training."""
        return self.train.numel() - self.files

    @property
    def held_out_bytes(self) -> int:
        """The number of held-out bytes."""
        return self.held_out.numel() - self.held_out_files


def standard_library() -> Path:
    """Return the folder of this Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def read_corpus(folder: Path) -> Corpus:
    """Read the Python files of a folder; hold out one in twenty, by a hash of its name.

    Raises:
        OptionError: there is no training file, or no held-out file.
    """
    sides: dict[bool, list[bytes]] = {True: [], False: []}
    for name in sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.py")):
        if is_in_corpus(name):
            sides[is_held_out(name)].append(folder.joinpath(name).read_bytes())
    train_files, held_out_files = len(sides[False]), len(sides[True])
    if not train_files or not held_out_files:
        raise OptionError(
            saw=f"{train_files} training and {held_out_files} held-out Python files in {folder}",
            needed="at least one file of each kind",
            do="choose a folder with more Python files: one in twenty is held out",
        )
    train, held_out = (_stream(sides[side]) for side in (False, True))
    return Corpus(train, held_out, files=train_files, held_out_files=held_out_files)


def is_in_corpus(name: str) -> bool:
    """Check whether a file, named relative to the folder, belongs to the corpus."""
    parts = name.split("/")
    return not LEFT_OUT & set(parts) and not parts[0].startswith(("config-", "_sysconfigdata"))


def is_held_out(name: str) -> bool:
    """Check whether a file is held out; the choice is the same on every machine."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def _stream(files: list[bytes]) -> Tensor:
    return torch.cat([encode(raw) for raw in files])
