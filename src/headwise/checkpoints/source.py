"""Checkpoint as a mapping of tensors: a file, an index with its files, or a folder.

The files of a folder that make up its checkpoint are those of its index, or chosen by name.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from headwise.checkpoints import safetensors, torch_file
from headwise.checkpoints.safetensors import StoredTensor, TensorFile
from headwise.errors import CheckpointError
from headwise.support.files import is_utf8, parse_json_object
from headwise.support.text import describe_value, list_some

SAFETENSORS, TORCH, INDEX = ".safetensors", (".bin", ".pt", ".pth"), ".index.json"
# The first pattern with a match selects the checkpoint of a folder; other files are ignored.
PATTERNS = (
    f"*{SAFETENSORS}{INDEX}",
    f"model*{SAFETENSORS}",
    f"*{SAFETENSORS}",
    f"*.bin{INDEX}",
    "pytorch_model*.bin",
    "consolidated*.pth",
    *(f"*{suffix}" for suffix in TORCH),
)
PART = re.compile(r"(.*?)[-._]([0-9]+)(?:-of-([0-9]+))?")
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_SAVE = "then save_file(tensors, 'model.safetensors') of safetensors.torch"
# Suffix of another format -> how to get its tensors out.
FOREIGN = {
    ".gguf": "AutoModelForCausalLM.from_pretrained(folder, gguf_file=name) of transformers, then "
    "save_pretrained(folder)",
    ".distcp": "torch.distributed.checkpoint.format_utils.dcp_to_torch_save(folder, 'model.pt')",
    ".h5": f"tensors from h5py.File(path), by visititems; {_SAVE}",
    ".msgpack": f"flax.serialization.msgpack_restore(bytes) gives nested arrays; {_SAVE}",
    ".onnx": "tensors = {t.name: torch.tensor(onnx.numpy_helper.to_array(t)) for t in "
    f"onnx.load(path).graph.initializer}}, {_SAVE}",
    ".ckpt": "torch.save(torch.load(path)['state_dict'], 'model.pt')",
    ".npz": f"tensors = {{n: torch.as_tensor(x) for n, x in numpy.load(path).items()}}, {_SAVE}",
}
LOCAL = "name a file or a folder on this machine; nothing is downloaded"
MAX_NAME = 255  # letters of a file's name


def checkpoint_files(path: Path) -> list[Path]:
    """Return the files of a checkpoint: the file itself, or those of a folder.

    Raises:
        CheckpointError: no checkpoint, several, or an incomplete one.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        problem = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise no_checkpoint_error(path, problem)
    for pattern in PATTERNS:
        files = sorted(file for file in path.glob(pattern) if not file.name.startswith("."))
        if not files:
            continue
        if pattern.endswith(INDEX):
            # two checkpoints: two indexes, or an index and a file of the same name
            unsplit = [path / file.name.removesuffix(INDEX) for file in files]
            _require_single(path, [*files, *(file for file in unsplit if file.is_file())])
        else:
            _require_complete_parts(path, files)
        return files
    require_no_other_format(path)
    names = ", ".join(sorted(file.name for file in path.iterdir())[:5]) or "nothing"
    raise no_checkpoint_error(path, f"holds no weights: {names}")


def require_no_other_format(path: Path) -> None:
    """Raise CheckpointError for a folder of another format, or of the hub's cache."""
    if foreign := next((f for f in sorted(path.iterdir()) if f.suffix in FOREIGN), None):
        raise no_checkpoint_error(path, f"holds {foreign.name}", do=FOREIGN[foreign.suffix])
    if snapshots := sorted(path.glob("snapshots/*/")):
        do = f"name the snapshot: {snapshots[-1]}"
        raise no_checkpoint_error(path, "is a folder of the hub's cache", do=do)
    if (path / "refs").is_dir() or (path / "blobs").is_dir():
        do = "download the model again: huggingface_hub.snapshot_download(name)"
        raise no_checkpoint_error(path, "is a folder of the hub's cache without a snapshot", do=do)


def require_inside(file: Path, folder: Path) -> None:
    """Raise CheckpointError unless the path is a file, and no link out of the folder.

    Links from a model hub's cache, snapshots/<revision>, into its blobs folder are allowed.
    """
    if not file.is_file():
        problem = "is no file" if file.exists() else "does not exist"
        raise incomplete_error(folder, f"{file.name} {problem}")
    home, real = folder.resolve(), file.resolve()
    caches = [above.parent / "blobs" for above in home.parents if above.name == "snapshots"]
    if not any(real.is_relative_to(root) for root in [home, *caches]):
        raise incomplete_error(folder, f"{file.name} is a link to {real}, outside of it")


def no_checkpoint_error(path: Path, problem: str, *, do: str = LOCAL) -> CheckpointError:
    return CheckpointError(
        saw=f"{path} {problem}",
        needed=f"a checkpoint: {SAFETENSORS}, {', '.join(TORCH)}, an index, or a folder with one",
        do=do,
    )


def _require_complete_parts(folder: Path, files: list[Path]) -> None:
    parts = [part for file in files if (part := PART.fullmatch(file.stem))]
    if len(parts) < len(files) or len({(part[1], part[3]) for part in parts}) > 1:
        _require_single(folder, files)
    elif parts[0][3] is not None:
        # Names such as model-00001-of-00003 hold the total; some count from 0.
        numbers, total, first = {int(part[2]) for part in parts}, int(parts[0][3]), parts[0]
        expected = range(total) if 0 in numbers else range(1, total + 1)
        # The total may be huge: stop after the four missing parts that the error uses.
        missing = list(islice((number for number in expected if number not in numbers), 4))
        if missing:
            before, after = first[0][: first.start(2)], first[0][first.end(2) :] + files[0].suffix
            names = [f"{before}{number:0{len(first[2])}}{after}" for number in missing]
            more = " and more" if len(names) > 3 else ""
            raise incomplete_error(folder, f"it lacks {', '.join(names[:3])}{more}")


def _require_single(folder: Path, files: list[Path]) -> None:
    if len(files) > 1:
        raise CheckpointError(
            saw=f"{folder} holds {list_some([file.name for file in files], 4)}",
            needed="one checkpoint: a file, an index, or files whose names number its parts",
            do=f"name one of them: {files[0]}",
        )


def incomplete_error(
    folder: Path, saw: str, needed: str = "a folder that holds every file of the checkpoint"
) -> CheckpointError:
    do = "copy or download the folder again; or name one of its files"
    return CheckpointError(saw=f"{folder}: {saw[:300]}", needed=needed, do=do)


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """Content of an index file: tensor names with their files, and metadata."""

    path: Path
    weight_map: dict[str, str]
    metadata: dict[str, Any]

    @property
    def files(self) -> list[Path]:
        return [self.path.parent / name for name in sorted(set(self.weight_map.values()))]


def read_index(path: Path) -> ShardIndex:
    """Read an index.

    Raises:
        CheckpointError: the file is no index, or names files that are missing or elsewhere.
        OSError: the file cannot be opened.
    """
    try:
        content = parse_json_object(path.read_bytes())
    except ValueError as error:
        raise _bad_index_error(path, f"it {error}") from error
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad_index_error(path, "it has no weight_map of names")
    metadata = {} if content.get("metadata") is None else content["metadata"]
    if not isinstance(metadata, dict):
        raise _bad_index_error(path, f"its metadata is a {type(metadata).__name__}")
    for name, file in weight_map.items():
        if not is_utf8(name):
            raise _bad_index_error(path, f"it names a tensor {name!r}, with a lone surrogate")
        if not isinstance(file, str) or not _is_plain_file_name(file):
            place = describe_value(file)
            raise _bad_index_error(
                path, f"it has {name!r} in {place}, no name of a file in its folder"
            )
    try:
        encode_index(weight_map, metadata)
    except (ValueError, RecursionError) as error:
        raise _bad_index_error(path, f"its metadata cannot be written as JSON: {error}") from error
    index = ShardIndex(path, weight_map, metadata)
    for shard in index.files:
        require_inside(shard, path.parent)
    return index


def require_agreement(index: ShardIndex, files: Mapping[str, str]) -> None:
    for name, file in index.weight_map.items():
        if files.get(name) != file:
            actual = f"it is in {files[name]}" if name in files else "no file has it"
            raise _bad_index_error(index.path, f"it has {name} in {file}, but {actual}")
    if more := sorted(files.keys() - index.weight_map.keys()):
        raise _bad_index_error(index.path, f"it lacks {more[0]} of {files[more[0]]}")


def encode_index(weight_map: Mapping[str, str], metadata: Mapping[str, Any]) -> bytes:
    """Return the bytes of an index; raise ValueError for a NaN or an infinity."""
    content = {"metadata": dict(metadata), "weight_map": dict(weight_map)}
    return (json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n").encode("ascii")


def _is_plain_file_name(file: str) -> bool:
    name = PurePosixPath(file).name
    is_plain = bool(name) and file == name and name != ".." and not {"\\", "\0"} & set(file)
    return is_plain and len(file) <= MAX_NAME and is_utf8(file)


def _bad_index_error(path: Path, saw: str) -> CheckpointError:
    return incomplete_error(path, saw, "an index and its files, which hold the same tensors")


# size, mtime, ctime and inode of a file; copying tools may set mtime, and no tool sets ctime
FileState = tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class CheckpointSource(Mapping[str, Tensor]):
    """Checkpoint with checked headers; ``source[name]`` maps a tensor into memory."""

    path: Path  # the path that the caller named
    shards: tuple[TensorFile, ...]  # the files of the checkpoint
    headers: dict[str, StoredTensor]  # name -> shape, dtype and file
    index: ShardIndex | None  # the index; None where there is none
    states: dict[Path, FileState]  # file -> size and times at opening

    def __getitem__(self, name: str) -> Tensor:
        file = self.headers[name].file
        return next(shard for shard in self.shards if shard.path == file).tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)

    @property
    def folder(self) -> Path:
        return self.shards[0].path.parent

    @property
    def is_folder(self) -> bool:
        """True unless the path is a single file of weights."""
        return self.path.is_dir() or self.index is not None

    def target_file_name(self, file: Path) -> str:
        if file.suffix == SAFETENSORS:
            return file.name
        return file.stem.replace("pytorch_model", "model", 1) + SAFETENSORS

    def require_unchanged(self) -> None:
        for path, before in self.states.items():
            if not path.is_file() or read_file_state(path) != before:
                raise changed_error(path, "changed")

    def source_digest(self) -> str:
        digest = hashlib.sha256()
        for path, state in self.states.items():
            digest.update(f"{path.absolute()} {state}\n".encode("utf-8", "surrogateescape"))
        for shard in self.shards:
            digest.update(repr((shard.path.name, shard.headers, shard.metadata)).encode("utf-8"))
        return digest.hexdigest()


def open_source(path: Path) -> CheckpointSource:
    """Read the headers of a checkpoint, and no tensor; raise CheckpointError unless it is whole."""
    with explained_os_errors(path):
        files, index = checkpoint_files(path), None
        if len(files) == 1 and files[0].name.endswith(INDEX):
            index = read_index(files[0])
            files = index.files
        elif path.is_dir():
            for file in files:
                require_inside(file, path)
        states = {
            file: read_file_state(file) for file in [*files, *([index.path] if index else [])]
        }
        shards = tuple(read_tensor_file(file) for file in files)
    headers: dict[str, StoredTensor] = {}
    for shard in shards:
        if duplicates := sorted(headers.keys() & shard.headers.keys()):
            name = duplicates[0]
            raise CheckpointError(
                saw=f"{name} is in {headers[name].file} and in {shard.path.name}",
                needed="every tensor once",
                do="name one file, if these are two checkpoints; if they are shares of one model, "
                "merge them first: headwise convert FOLDER NEW_FOLDER --to LAYOUT",
            )
        headers |= shard.headers
    if index is not None:
        require_agreement(index, {name: header.file.name for name, header in headers.items()})
    return CheckpointSource(path, shards, headers, index, states)


def changed_error(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        saw=f"{path} {problem} while it was read",
        needed="a checkpoint that no program writes to",
        do="run the command again when the checkpoint is complete",
    )


@contextmanager
def explained_os_errors(
    path: Path,
    *,
    problem: str = " cannot be read",
    needed: str = "files that you may read",
    do: str = "check their names and permissions",
) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        saw = f"{error.filename or path}{problem}: {error.strerror or error}"
        raise CheckpointError(saw=saw, needed=needed, do=do) from error


def require_no_pointer(file: Path) -> None:
    """Raise CheckpointError for the text that git-lfs leaves in the place of a large file."""
    with file.open("rb") as opened:
        if opened.read(len(LFS_POINTER)) == LFS_POINTER:
            do = "git lfs pull in its folder, or download the file itself"
            raise no_checkpoint_error(file, "is a pointer of git-lfs, not the file", do=do)


def read_tensor_file(file: Path) -> TensorFile:
    require_no_pointer(file)
    if file.suffix == SAFETENSORS:
        return safetensors.read_safetensors_header(file)
    if file.suffix in TORCH:
        return torch_file.read_torch_file(file)
    if file.suffix in FOREIGN:
        raise no_checkpoint_error(file, f"ends in {file.suffix}", do=FOREIGN[file.suffix])
    raise no_checkpoint_error(file, f"ends in {file.suffix or 'nothing'}")


def read_file_state(path: Path) -> FileState:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
