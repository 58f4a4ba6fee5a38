"""Check models against transformers: ``python -m benchmarks.field.check_models [MODEL ...]``.

A port without edits agrees with its peer in float64, and so does a case of the kind "same". All
other cases differ clearly.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.field.case import FIRST, Edits, load_edited

MODELS = FIRST / "models"
KINDS = ("single", "same", "outside")
AGREES, DIFFERS = 1e-6, 1e-4  # norms, rotary tables and the softmax of a peer are often float32


@dataclass(frozen=True)
class ModelCase:
    """A whole model whose text is edited.

    Attributes:
        model: the name of its file.
        name: of the case.
        kind: a fault in attention (single), elsewhere (outside), or none (same).
        layer: the index of the layer in which the fault is; -1 if it is in all, or in none of them.
        stack: the half of the model that `layer` counts: "" or "encoder" or "decoder".
        stage: the part of the layer, in plain words.
        causes: what is wrong, in plain words.
        where: the roles or heads in which it is wrong.
        reports: addresses of public reports that it follows.
        edits: texts of the port, and the texts in their place.
    """

    model: str
    name: str
    kind: str
    layer: int
    stack: str
    stage: str
    causes: tuple[str, ...]
    where: str
    reports: tuple[str, ...]
    edits: Edits

    def module(self) -> ModuleType:
        """Return the model's file with its edits, as a module.

        Raises:
            ValueError: a text that is not in the file exactly once.
        """
        return load_model(self.model, self.edits)


def load_model(name: str, edits: Edits = ()) -> ModuleType:
    """Return the file of a model as a module, after edits of its text.

    Raises:
        ValueError: a text that is not in the file exactly once.
    """
    return load_edited(MODELS / f"{name}.py", edits)


def read_model_cases(names: list[str] | None = None) -> Iterator[ModelCase]:
    """Yield the cases of the named models; of all without names.

    Raises:
        ValueError: a kind that is none, or an edit that is no pair of texts.
    """
    for path in sorted(MODELS.glob("*.toml")):
        if names and path.stem not in names:
            continue
        for row in tomllib.loads(path.read_text("utf-8"))["case"]:
            yield _read_case(path.stem, row)


def _read_case(model: str, row: Mapping[str, Any]) -> ModelCase:
    if row["kind"] not in KINDS:
        raise ValueError(f"{model}, {row['name']}: kind {row['kind']}")
    return ModelCase(
        model,
        row["name"],
        row["kind"],
        row["layer"],
        row.get("stack", ""),
        row["stage"],
        tuple(row["cause"]),
        row.get("where", ""),
        tuple(row.get("report", ())),
        tuple((before, after) for before, after in row["edits"]),
    )


def build_peer(module: ModuleType) -> nn.Module:
    """Return the model of transformers beside which a port stands, in float64.

    Biases and gains are drawn too, so that a fault in them shows. Embeddings are small, as in a
    trained model, so that the eps of a norm counts.
    """
    name, settings = module.PEER
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    peer: nn.Module = kind(kind.config_class(**settings)).double().eval()
    width = peer.config.hidden_size  # type: ignore[union-attr]
    with torch.no_grad():
        for parameter in peer.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        tables = [part for part in peer.modules() if isinstance(part, nn.Embedding)]
        for weight in {table.weight for table in tables if table.embedding_dim == width}:
            weight.mul_(0.2)
    return peer


def main(names: list[str]) -> int:
    """Print a line for each case, and return 1 if one of them is not what it says."""
    wrong = 0
    for path in sorted(MODELS.glob("*.toml")):
        if names and path.stem not in names:
            continue
        for case in [None, *read_model_cases([path.stem])]:
            gap = measure(load_model(path.stem) if case is None else case.module())
            fits = gap < AGREES if case is None or case.kind == "same" else gap > DIFFERS
            wrong += not fits
            name = "(without edits)" if case is None else f"{case.kind}: {case.name}"
            print(f"{'ok   ' if fits else 'WRONG'} {path.stem} {name}: {gap:.1e}", flush=True)
    return int(wrong > 0)


@torch.no_grad()
def measure(module: ModuleType) -> float:
    """Return the relative difference of a port's output from that of its peer."""
    peer = build_peer(module)
    port = module.make(peer).eval()
    inputs = module.inputs(torch.Generator().manual_seed(1))
    expected = main_output(peer(**inputs))
    actual = main_output(port(**inputs))
    if actual.shape != expected.shape or not actual.isfinite().all():
        return float("inf")
    return float((actual - expected).norm() / expected.norm())


def main_output(output: Any) -> torch.Tensor:
    """Return the logits of a model's output, or else its hidden states."""
    if isinstance(output, tuple):
        output = output[0]
    if isinstance(output, torch.Tensor):
        return output
    found = output.logits if hasattr(output, "logits") else output.last_hidden_state
    assert isinstance(found, torch.Tensor)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
