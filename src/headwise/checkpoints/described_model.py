"""Weights that describe themselves, as a model of transformers reads them.

transformers knows the names of its own files alone. A file that `headwise convert` wrote, nanoGPT's
ckpt.pt and Meta's consolidated.00.pth state their layout and their model. Their tensors are moved
into the layout of that model, in memory.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.checkpoints import safetensors_file
from headwise.checkpoints.config import layout_of
from headwise.checkpoints.description import COUNTS, KEY, Checkpoint, open_checkpoint
from headwise.checkpoints.source import SAFETENSORS, TORCH
from headwise.errors import CheckpointError, OptionError
from headwise.layouts.convert import convert
from headwise.layouts.layout import Layout
from headwise.layouts.registry import layout


@dataclass(frozen=True, eq=False)
class DescribedModel:
    """Weights in another layout than that of their model.

    Attributes:
        checkpoint: the weights, with their description.
        stored: the layout that they are in.
        wanted: the layout of the model's own files.
    """

    checkpoint: Checkpoint
    stored: Layout
    wanted: Layout

    @property
    def nbytes(self) -> int:
        """Bytes of memory that loading takes: of the tensors, and of the model made of them."""
        return 2 * sum(stored.nbytes for stored in self.checkpoint.source.headers.values())

    def config(self, transformers: Any) -> Any:
        """Return the configuration of the model as transformers completes it."""
        values = dict(self.checkpoint.config)
        return type(transformers.AutoConfig.for_model(values["model_type"])).from_dict(values)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors in the layout of the model."""
        source, known = self.checkpoint.source, self.checkpoint.known
        return convert(source, self.stored, self.wanted, accept=(), root=None, **known)


def described_model(path: Path) -> DescribedModel | None:
    """Return the weights of a path that transformers does not read by itself; None where it does.

    Raises:
        CheckpointError: the description does not fit the tensors.
        OptionError: the model is none that the catalogue knows.
    """
    if not _may_be_described(path):
        return None
    opened = open_checkpoint(path, dict.fromkeys(COUNTS))
    if opened.description is None:
        return None
    stored, name = opened.description.layout, layout_of(opened.config)
    is_own = name == stored.name and path.is_dir() and (path / "config.json").is_file()
    if is_own:
        return None
    if name is None:
        kind = opened.config.text("model_type")
        raise OptionError(
            saw=f"{path}, whose weights are in the layout {stored.name}, of "
            + ("no model that is named" if kind is None else f"a {kind} model"),
            needed="a config.json whose model_type the catalogue knows, in the metadata or beside "
            "the weights",
            do="copy the model's config.json beside the weights",
        )
    return DescribedModel(opened, stored, layout(name))


def _may_be_described(path: Path) -> bool:
    """False for a folder of transformers, whatever else lies in it."""
    if path.is_file():
        return path.suffix in (SAFETENSORS, *TORCH)
    if (path / "config.json").is_file():
        return any(_carries_description(file) for file in path.glob(f"*{SAFETENSORS}"))
    return any(next(path.glob(f"*{suffix}"), None) for suffix in (SAFETENSORS, *TORCH))


def _carries_description(file: Path) -> bool:
    with suppress(CheckpointError, OSError):  # transformers says what is wrong with it
        return KEY in safetensors_file.read(file).metadata
    return False
