"""Weights with a description of their layout, converted in memory for a transformers model.

transformers reads its own tensor names only. Files from `headwise convert`, nanoGPT's ckpt.pt and
Meta's consolidated.00.pth state their layout and their model, so their tensors can be converted.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from headwise.checkpoints import safetensors_file
from headwise.checkpoints.config import layout_name
from headwise.checkpoints.open_checkpoint import Checkpoint, open_checkpoint
from headwise.checkpoints.source import SAFETENSORS, TORCH
from headwise.checkpoints.stored_description import COUNTS
from headwise.errors import CheckpointError, OptionError
from headwise.layouts.convert import convert
from headwise.layouts.layout import Layout
from headwise.layouts.registry import layout


@dataclass(frozen=True, eq=False)
class DescribedModel:
    """Weights whose layout is not that of their model's files.

    Attributes:
        checkpoint: the weights, with their description.
        stored: the layout of the weights.
        target: the layout of the model's files.
    """

    checkpoint: Checkpoint
    stored: Layout
    target: Layout

    @property
    def nbytes(self) -> int:
        """Bytes of memory that loading takes: for the tensors, and for the model."""
        return 2 * sum(header.nbytes for header in self.checkpoint.source.headers.values())

    def config(self, transformers: Any) -> Any:
        """Return the configuration of the model, with the defaults of transformers."""
        values = dict(self.checkpoint.config)
        return type(transformers.AutoConfig.for_model(values["model_type"])).from_dict(values)

    def state_in_model_layout(self) -> dict[str, Tensor]:
        """Return the tensors in the layout of the model."""
        source, known = self.checkpoint.source, self.checkpoint.known
        return convert(source, self.stored, self.target, accept=(), root=None, **known)


def open_described_model(path: Path) -> DescribedModel | None:
    """Return described weights that transformers cannot read; None where it can.

    Raises:
        CheckpointError: the description does not fit the tensors.
        OptionError: the catalogue has no layout for the model.
    """
    if not _may_be_described(path):
        return None
    opened = open_checkpoint(path, dict.fromkeys(COUNTS))
    if opened.description is None:
        return None
    stored, name = opened.description.layout, layout_name(opened.config)
    if name == stored.name and path.is_dir() and (path / "config.json").is_file():
        return None
    if name is None:
        kind = opened.config.text("model_type")
        raise OptionError(
            saw=f"{path} has weights in the layout {stored.name} and "
            + ("no model_type" if kind is None else f"the model_type {kind}"),
            needed="a config.json with a model_type of the catalogue, in the metadata or beside "
            "the weights",
            do="copy the model's config.json beside the weights",
        )
    return DescribedModel(opened, stored, layout(name))


def _may_be_described(path: Path) -> bool:
    """False for a folder in transformers' own format."""
    if path.is_file():
        return path.suffix in (SAFETENSORS, *TORCH)
    if (path / "config.json").is_file():
        return any(_file_has_description(file) for file in path.glob(f"*{SAFETENSORS}"))
    return any(next(path.glob(f"*{suffix}"), None) for suffix in (SAFETENSORS, *TORCH))


def _file_has_description(file: Path) -> bool:
    with suppress(CheckpointError, OSError):  # transformers reports a damaged file
        return safetensors_file.KEY in safetensors_file.read_safetensors_header(file).metadata
    return False
