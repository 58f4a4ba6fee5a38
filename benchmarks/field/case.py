"""Cases of the field bench: a port, and the edits of its text that make a fault."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

FIRST = Path(__file__).parent
# The later sets were each written apart from those before them and from the search, and run once.
SETS = {"first": FIRST, "second": FIRST / "second", "third": FIRST / "third"}
# Modules, models and caches, whose files make both sides; see `benchmarks.field.apart`.
APART = {"fourth": FIRST / "fourth", "fifth": FIRST / "fifth"}
FROZEN = (
    *(FIRST / name for name in ("ports", "cases", "truth", "models")),
    *list(SETS.values())[1:],
    *APART.values(),
)
KINDS = ("single", "pair", "same", "unknown")
FAMILIES = (
    "weights",
    "bias",
    "heads",
    "axes",
    "rotary",
    "masks",
    "scores",
    "norms",
    "cache",
    "dtype",
)

Edits = tuple[tuple[str, str], ...]  # texts, and the texts in their place


@dataclass(frozen=True)
class FieldCase:
    """A port whose text is edited.

    Attributes:
        folder: of the set.
        port: the name of its file.
        name: of the case.
        kind: one of `KINDS`.
        family: one of `FAMILIES`.
        causes: what is wrong, in plain words; two for a pair.
        where: the roles or heads in which it is wrong.
        reports: addresses of public reports that it follows.
        edits: texts of the port, and the texts in their place.
    """

    folder: Path
    port: str
    name: str
    kind: str
    family: str
    causes: tuple[str, ...]
    where: str
    reports: tuple[str, ...]
    edits: Edits

    def module(self) -> ModuleType:
        """Return the port with its edits, as a module.

        Raises:
            ValueError: a text that is not in the port exactly once.
        """
        return load_port(self.folder, self.port, self.edits)


def load_port(folder: Path, name: str, edits: Edits = ()) -> ModuleType:
    """Return a port as a module, after edits of its text.

    Raises:
        ValueError: a text that is not in the port exactly once.
    """
    return load_edited(folder / "ports" / f"{name}.py", edits)


def load_edited(path: Path, edits: Edits = ()) -> ModuleType:
    """Return a file as a module, after edits of its text.

    Raises:
        ValueError: a text that is not in the file exactly once.
    """
    text = path.read_text("utf-8")
    for before, after in edits:
        if text.count(before) != 1:
            raise ValueError(f"{path.stem}: {text.count(before)} places of {before!r}, not one")
        text = text.replace(before, after)
    name = f"field_{path.parent.name}_{path.stem}"
    module = sys.modules[name] = ModuleType(name)
    exec(compile(text, str(path), "exec"), vars(module))
    return module


def read_cases(folder: Path = FIRST, names: Sequence[str] = ()) -> Iterator[FieldCase]:
    """Yield the cases of the named ports of a set; of all without names.

    Raises:
        ValueError: a kind or a family that is none.
    """
    for path in sorted((folder / "cases").glob("*.toml")):
        if names and path.stem not in names:
            continue
        for row in tomllib.loads(path.read_text("utf-8"))["case"]:
            yield _read_case(folder, path.stem, row)


def _read_case(folder: Path, port: str, row: Mapping[str, Any]) -> FieldCase:
    if row["kind"] not in KINDS or row["family"] not in FAMILIES:
        raise ValueError(f"{port}, {row['name']}: kind {row['kind']}, family {row['family']}")
    return FieldCase(
        folder,
        port,
        row["name"],
        row["kind"],
        row["family"],
        tuple(row["cause"]),
        row.get("where", ""),
        tuple(row.get("report", ())),
        tuple((before, after) for before, after in row.get("edits", ())),
    )
