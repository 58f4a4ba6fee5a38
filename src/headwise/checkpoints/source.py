"""A checkpoint as one: a file, an index with its files, or a folder with one checkpoint in it.

Which files of a folder are its checkpoint is told by their names, or by an index of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from headwise.checkpoints import safetensors_file, torch_file
from headwise.checkpoints.safetensors_file import StoredTensor, TensorFile, is_utf8, once
from headwise.errors import CheckpointError
from headwise.support.axes import describe_value

SAFETENSORS, TORCH, INDEX = ".safetensors", (".bin", ".pt", ".pth"), ".index.json"
# The first that a folder has is its checkpoint; what else lies there is left.
PATTERNS = (
    f"*{SAFETENSORS}{INDEX}",
    f"model*{SAFETENSORS}",
    f"*{SAFETENSORS}",
    f"*.bin{INDEX}",
    "pytorch_model*.bin",
    "consolidated*.pth",
    *(f"*{suffix}" for suffix in TORCH),
)
_PART = re.compile(r"(.*?)[-._]([0-9]+)(?:-of-([0-9]+))?")
LONGEST = 255  # letters of a file's name


def files_of(path: Path) -> list[Path]:
    """The one file, or those of a folder that are its checkpoint.

    Raises:
        CheckpointError: there is none, more than one, or a part of one.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        what = "is neither a file nor a folder" if path.exists() else "is not there"
        raise no_checkpoint(path, what)
    for pattern in PATTERNS:
        found = sorted(file for file in path.glob(pattern) if not file.name.startswith("."))
        if not found:
            continue
        if pattern.endswith(INDEX):
            # An index beside another, or beside a file of its own name, are two checkpoints.
            whole = [path / file.name.removesuffix(INDEX) for file in found]
            _require_one(path, [*found, *(file for file in whole if file.is_file())])
        else:
            _require_parts_of_one(path, found)
        return found
    there = ", ".join(sorted(file.name for file in path.iterdir())[:5]) or "nothing"
    raise no_checkpoint(path, f"holds no weights: {there}")


def require_inside(file: Path, folder: Path) -> None:
    """Refuse what is no file, or a link out of the folder.

    The cache of a model hub is made of links: a folder snapshots/<revision>, and what is below it,
    into the blobs beside snapshots. Those are followed.

    Raises:
        CheckpointError: see above.
    """
    if not file.is_file():
        missing = "is no file" if file.exists() else "is not there"
        raise _not_whole(folder, f"whose {file.name} {missing}")
    home, real = folder.resolve(), file.resolve()
    caches = [above.parent / "blobs" for above in home.parents if above.name == "snapshots"]
    if not any(real.is_relative_to(one) for one in [home, *caches]):
        raise _not_whole(folder, f"whose {file.name} is a link to {real}, outside of it")


def no_checkpoint(path: Path, what: str) -> CheckpointError:
    """What is said of a path that leads to no weights."""
    return CheckpointError(
        saw=f"{path}, which {what}",
        needed=f"a checkpoint: {SAFETENSORS}, {', '.join(TORCH)}, an index, or a folder with one",
        do="name a file or a folder on this machine; nothing is downloaded",
    )


def _require_parts_of_one(folder: Path, files: list[Path]) -> None:
    """Files without an index are one checkpoint if their names number its parts, all of them."""
    parts = [part for file in files if (part := _PART.fullmatch(file.stem))]
    if len(parts) < len(files) or len({(part[1], part[3]) for part in parts}) > 1:
        _require_one(folder, files)
    elif parts[0][3] is not None:
        # Names such as model-00001-of-00003 tell how many there are; some count from 0.
        numbers, total, first = {int(part[2]) for part in parts}, int(parts[0][3]), parts[0]
        wanted = range(total) if 0 in numbers else range(1, total + 1)
        # A name may speak of any number of parts: no more are looked for than are named.
        missing = list(islice((number for number in wanted if number not in numbers), 4))
        if missing:
            before, after = first[0][: first.start(2)], first[0][first.end(2) :] + files[0].suffix
            names = [f"{before}{number:0{len(first[2])}}{after}" for number in missing]
            more = " and more" if len(names) > 3 else ""
            raise _not_whole(folder, f"which lacks {', '.join(names[:3])}{more}")


def _require_one(folder: Path, files: list[Path]) -> None:
    if len(files) > 1:
        more = f" and {len(files) - 4} more" if len(files) > 4 else ""
        raise CheckpointError(
            saw=f"{folder}, which holds {', '.join(file.name for file in files[:4])}{more}",
            needed="one checkpoint: a file, an index, or files whose names number its parts",
            do=f"name one of them: {files[0]}",
        )


def _not_whole(folder: Path, saw: str) -> CheckpointError:
    return CheckpointError(
        saw=f"{folder}, {saw[:300]}",
        needed="a folder that holds the whole checkpoint, every file of it",
        do="copy or download it again; or name one file of it",
    )


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """What the file says, checked as far as it can be without the others."""

    path: Path
    weight_map: dict[str, str]
    metadata: dict[str, Any]

    @property
    def files(self) -> list[Path]:
        """The files that it names, in the order of their names."""
        return [self.path.parent / name for name in sorted(set(self.weight_map.values()))]


def read_index(path: Path) -> ShardIndex:
    """Read an index.

    Raises:
        CheckpointError: it is none, or names files that are missing or lie elsewhere.
        OSError: it cannot be opened.
    """
    try:
        found = json.loads(path.read_text("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise _bad_index(path, f"which is no JSON: {error}") from error
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad_index(path, "without a weight_map of names")
    metadata = found.get("metadata")
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise _bad_index(path, f"whose metadata is a {type(metadata).__name__}")
    for name, file in weight_map.items():
        if not is_utf8(name):
            raise _bad_index(path, f"which names a tensor {name!r}: half of a letter is no text")
        if not isinstance(file, str) or not _is_name(file):
            raise _bad_index(
                path,
                f"which has {name!r} in {describe_value(file)}: not the name of a file beside it",
            )
    try:
        encode_index(weight_map, metadata)
    except (ValueError, RecursionError) as error:
        raise _bad_index(path, f"whose metadata cannot be written on: {error}") from error
    index = ShardIndex(path, weight_map, metadata)
    for shard in index.files:
        require_inside(shard, path.parent)
    return index


def require_agreement(index: ShardIndex, found: Mapping[str, str]) -> None:
    """Raise CheckpointError unless the files hold what the index says, and nothing else."""
    for name, file in index.weight_map.items():
        if found.get(name) != file:
            where = f"it is in {found[name]}" if name in found else "it is not there"
            raise _bad_index(index.path, f"which has {name} in {file}: {where}")
    if more := sorted(found.keys() - index.weight_map.keys()):
        raise _bad_index(index.path, f"which lacks {more[0]} of {found[more[0]]}")


def encode_index(weight_map: Mapping[str, str], metadata: Mapping[str, Any]) -> bytes:
    """The bytes of an index. ValueError for a number that JSON has not, such as NaN."""
    about = {"metadata": dict(metadata), "weight_map": dict(weight_map)}
    return (json.dumps(about, indent=2, sort_keys=True, allow_nan=False) + "\n").encode("ascii")


def _is_name(file: str) -> bool:
    name = PurePosixPath(file).name
    is_plain = bool(name) and file == name and name != ".." and not {"\\", "\0"} & set(file)
    return is_plain and len(file) <= LONGEST and is_utf8(file)


def _bad_index(path: Path, saw: str) -> CheckpointError:
    return CheckpointError(
        saw=f"{path}, {saw[:300]}",
        needed="a folder that holds the whole checkpoint: every file of its index, and no other",
        do="copy or download it again; or name one file of it",
    )


# Size, time of the last change, the same as the system keeps it, number on the disk. A copying tool
# sets the first time as it likes; the second is nobody's to set.
State = tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class CheckpointSource(Mapping[str, Tensor]):
    """Names, shapes and dtypes of a checkpoint; a tensor is mapped when it is asked for.

    Attributes:
        path: as it was named.
        shards: its files.
        headers: name -> shape, dtype and file.
        index: where there is one.
        states: of the files as they were opened.
    """

    path: Path
    shards: tuple[TensorFile, ...]
    headers: dict[str, StoredTensor]
    index: ShardIndex | None
    states: dict[Path, State]

    def __getitem__(self, name: str) -> Tensor:
        return self._shards[self.headers[name].file].tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)

    @cached_property
    def _shards(self) -> dict[Path, TensorFile]:
        return {shard.path: shard for shard in self.shards}

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self.shards[0].path.parent

    @property
    def is_folder(self) -> bool:
        """Whether it is more than one named file."""
        return self.path.is_dir() or self.index is not None

    def require_unchanged(self) -> None:
        """Raise CheckpointError where a file is not as it was when it was opened."""
        for path, before in self.states.items():
            if not path.is_file() or _state(path) != before:
                raise CheckpointError(
                    saw=f"{path}, which changed while it was read",
                    needed="a checkpoint that nobody writes to",
                    do="ask again when it is finished",
                )

    def digest(self) -> str:
        """What a later run knows it by: its files, their times, and all that their heads say."""
        found = hashlib.sha256()
        for path, state in self.states.items():
            found.update(f"{path.absolute()} {state}\n".encode("utf-8", "surrogateescape"))
        for shard in self.shards:
            found.update(repr((shard.path.name, shard.headers, shard.metadata)).encode("utf-8"))
        return found.hexdigest()


def open_source(path: Path) -> CheckpointSource:
    """Read the heads of a checkpoint's files, and no tensor.

    Raises:
        CheckpointError: it is not there, damaged, or no checkpoint.
    """
    try:
        files, index = files_of(path), None
        if len(files) == 1 and files[0].name.endswith(INDEX):
            index = read_index(files[0])
            files = index.files
        elif path.is_dir():
            for file in files:
                require_inside(file, path)
        states = {file: _state(file) for file in [*files, *([index.path] if index else [])]}
        shards = tuple(_read(file) for file in files)
    except OSError as error:
        raise CheckpointError(
            saw=f"{error.filename or path}, which cannot be read: {error.strerror or error}",
            needed="files that you may read",
            do="look at their names and permissions",
        ) from error
    headers: dict[str, StoredTensor] = {}
    for shard in shards:
        if twice := sorted(headers.keys() & shard.headers.keys()):
            raise CheckpointError(
                saw=f"{twice[0]}, in {headers[twice[0]].file} and in {shard.path.name}",
                needed="every tensor once",
                do="name one file, if these are two checkpoints; if they are one model cut up for "
                "several devices, merge it first",
            )
        headers |= shard.headers
    if index is not None:
        require_agreement(index, {name: x.file.name for name, x in headers.items()})
    return CheckpointSource(path, shards, headers, index, states)


def _read(file: Path) -> TensorFile:
    if file.suffix == SAFETENSORS:
        return safetensors_file.read(file)
    if file.suffix in TORCH:
        return torch_file.read(file)
    raise no_checkpoint(file, f"ends in {file.suffix or 'nothing'}")


def _state(path: Path) -> State:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
