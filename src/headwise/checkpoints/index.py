"""The index of a checkpoint in several files: which tensor is in which."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from headwise.checkpoints.folder import require_inside
from headwise.checkpoints.header import once
from headwise.errors import CheckpointError
from headwise.support.axes import describe_value

LONGEST = 255  # letters of a file's name


@dataclass(frozen=True, eq=False)
class Index:
    """What the file says, checked as far as it can be without the others."""

    path: Path
    weight_map: dict[str, str]
    metadata: dict[str, Any]

    @property
    def files(self) -> list[Path]:
        """The files that it names, in the order of their names."""
        return [self.path.parent / name for name in sorted(set(self.weight_map.values()))]


def read(path: Path) -> Index:
    """Read an index.

    Raises:
        CheckpointError: it is none, or names files that are missing or lie elsewhere.
        OSError: it cannot be opened.
    """
    try:
        found = json.loads(path.read_text("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"which is no JSON: {error}") from error
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _refused(path, "without a weight_map of names")
    metadata = found.get("metadata")
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise _refused(path, f"whose metadata is a {type(metadata).__name__}")
    for name, file in weight_map.items():
        if not _is_utf8(name):
            raise _refused(path, f"which names a tensor {name!r}: half of a letter is no text")
        if not isinstance(file, str) or not _is_name(file):
            raise _refused(
                path,
                f"which has {name!r} in {describe_value(file)}: not the name of a file beside it",
            )
    try:
        encode(weight_map, metadata)
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"whose metadata cannot be written on: {error}") from error
    index = Index(path, weight_map, metadata)
    for shard in index.files:
        require_inside(shard, path.parent)
    return index


def require_agreement(index: Index, found: Mapping[str, str]) -> None:
    """Raise CheckpointError unless the files hold what the index says, and nothing else.

    Args:
        index: says which tensor is in which file.
        found: the same, as the files have it.
    """
    for name, file in index.weight_map.items():
        if found.get(name) != file:
            where = f"it is in {found[name]}" if name in found else "it is not there"
            raise _refused(index.path, f"which has {name} in {file}: {where}")
    if more := sorted(found.keys() - index.weight_map.keys()):
        raise _refused(index.path, f"which lacks {more[0]} of {found[more[0]]}")


def encode(weight_map: Mapping[str, str], metadata: Mapping[str, Any]) -> bytes:
    """The bytes of an index. ValueError for a number that JSON has not, such as NaN."""
    about = {"metadata": dict(metadata), "weight_map": dict(weight_map)}
    return (json.dumps(about, indent=2, sort_keys=True, allow_nan=False) + "\n").encode("ascii")


def _is_name(file: str) -> bool:
    name = PurePosixPath(file).name
    is_plain = bool(name) and file == name and name != ".." and not {"\\", "\0"} & set(file)
    return is_plain and len(file) <= LONGEST and _is_utf8(file)


def _is_utf8(text: str) -> bool:
    """Whether it has no lone half of a letter, which JSON can write and nothing can print."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _refused(path: Path, saw: str) -> CheckpointError:
    return CheckpointError(
        saw=f"{path}, {saw[:300]}",
        needed="a folder that holds the whole checkpoint: every file of its index, and no other",
        do="copy or download it again; or name one file of it",
    )
