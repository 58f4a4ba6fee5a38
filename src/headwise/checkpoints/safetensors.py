"""Files of safetensors, memory-mapped, and SHA-256 digests of tensors beside them.

The header is its length in eight bytes, then JSON; the numbers follow. Duplicate names and unknown
fields, which the library accepts, are refused here.
"""

import hashlib
import json
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headwise.errors import CheckpointError
from headwise.support.files import parse_json_object, write_whole

Shape = tuple[int, ...]
LENGTH = 8  # bytes of the JSON's length
METADATA = "__metadata__"
KEY = "headwise"  # of the description in the metadata
FIELDS = {"dtype", "shape", "data_offsets"}
# Names of dtypes in a file, and in torch.
_IN_TORCH = (
    "BOOL=bool U8=uint8 I8=int8 F8_E4M3=float8_e4m3fn F8_E4M3FNUZ=float8_e4m3fnuz "
    "F8_E5M2=float8_e5m2 F8_E5M2FNUZ=float8_e5m2fnuz F8_E8M0=float8_e8m0fnu U16=uint16 I16=int16 "
    "F16=float16 BF16=bfloat16 U32=uint32 I32=int32 F32=float32 U64=uint64 I64=int64 F64=float64 "
    "C64=complex64"
)
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, dtype) for name, dtype in (pair.split("=") for pair in _IN_TORCH.split())
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """Header of a tensor in a file."""

    shape: Shape  # the sizes of its axes
    dtype: torch.dtype  # the type of its numbers
    file: Path  # the path of the file
    offset: int | None = None  # its first byte in the file; None for files that torch wrote

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def encode_header(
    tensors: Mapping[str, tuple[Shape, torch.dtype]], metadata: Mapping[str, str]
) -> tuple[bytes, int]:
    """Return a file's header, and the size of the file with the tensors in this order.

    The header is the length of the JSON, and the JSON padded to a multiple of eight bytes.
    """
    fields: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, (shape, dtype) in tensors.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        offsets = [start, end]
        fields[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(LENGTH, "little") + text
    return head, len(head) + end


@dataclass(frozen=True, eq=False)
class TensorFile:
    """File of tensors: headers, metadata, and a function that loads a tensor."""

    path: Path  # the path of the file
    headers: dict[str, StoredTensor]  # name -> shape, dtype and offset
    metadata: dict[str, str]  # name -> text
    tensor: Callable[[str], Tensor]  # name -> tensor
    # the model's arguments in a file of nanoGPT; empty for other files
    model_args: Mapping[str, Any] = field(default_factory=dict)


def read_safetensors_header(path: Path) -> TensorFile:
    """Read the header of a file.

    Raises:
        CheckpointError: the file is damaged, cut off, or no safetensors file.
        OSError: the file cannot be opened.
    """
    try:  # checks everything but what JSON may have twice or beyond the format
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
    except (SafetensorError, ValueError) as error:
        raise damaged_error(path, str(error)) from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH), "little")
        text = file.read(length)
    try:
        fields = parse_json_object(text)
    except ValueError as error:
        raise damaged_error(path, f"its header {error}") from error
    fields.pop(METADATA, None)
    for name, about in fields.items():
        if not isinstance(about, dict) or about.keys() != FIELDS:
            names = ", ".join(sorted(map(str, about)))
            raise damaged_error(path, f"{name!r} has {names}, not {', '.join(sorted(FIELDS))}")
        if not isinstance(about["dtype"], str) or about["dtype"] not in DTYPES:
            saw = f"{name!r} has the dtype {about['dtype']!r}"
            raise damaged_error(path, f"{saw}, which is none of {', '.join(DTYPES)}")
    headers = {
        name: StoredTensor(
            tuple(about["shape"]),
            DTYPES[about["dtype"]],
            path,
            LENGTH + length + about["data_offsets"][0],
        )
        for name, about in sorted(fields.items(), key=lambda pair: pair[1]["data_offsets"])
    }
    return TensorFile(path, headers, metadata, lambda name: _map_tensor_to_memory(headers[name]))


def damaged_error(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        saw=f"{path}: {why[:300]}",
        needed="a complete safetensors file",
        do="copy or download the file again, and compare its checksum with the publisher's",
    )


def _map_tensor_to_memory(stored: StoredTensor) -> Tensor:
    """Return a tensor in memory-mapped pages of the file; only used pages are read."""
    assert stored.offset is not None
    if not stored.nbytes:
        return torch.empty(stored.shape, dtype=stored.dtype)
    start = stored.offset - stored.offset % mmap.ALLOCATIONGRANULARITY
    skipped = stored.offset - start
    with stored.file.open("rb") as file:
        try:
            # copy-on-write pages: torch has no read-only tensors
            pages = mmap.mmap(
                file.fileno(), skipped + stored.nbytes, access=mmap.ACCESS_COPY, offset=start
            )
        except ValueError as error:
            raise damaged_error(stored.file, "the file became shorter while it was read") from error
    pages.madvise(mmap.MADV_WILLNEED)  # else the disk reads few pages at a time
    raw = torch.frombuffer(pages, dtype=torch.uint8, count=stored.nbytes, offset=skipped)
    if stored.offset % stored.dtype.itemsize:
        raw = raw.clone()  # align the numbers after a header of odd length
    return raw.view(stored.dtype).view(stored.shape)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order."""
    # as_strided sets the stride to 1: a tensor of one number is contiguous with any stride.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


# ---- digests: they reveal a flipped bit, for which safetensors has no check --------------------

DIGESTS = "headwise digests"
Digests = dict[str, dict[str, Any]]


def compute_digests(state: Mapping[str, Tensor]) -> Digests:
    """Return name -> shape, dtype and SHA-256 of the numbers, little-endian and row-major."""
    return {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "sha256": hashlib.sha256(tensor_bytes(tensor)).hexdigest(),
        }
        for name, tensor in ((name, state[name]) for name in state)
    }


def write_digests(path: Path, digests: Digests) -> Path:
    return write_whole(path, json.dumps({"kind": DIGESTS, "tensors": digests}, indent=1) + "\n")


def read_digests(path: Path) -> Digests:
    """Return the digests of a file; raise CheckpointError if it holds none."""
    try:
        content = parse_json_object(path.read_bytes())
        why = "" if content.get("kind") == DIGESTS else "it is JSON of another kind"
    except (OSError, ValueError) as error:
        why = f"it {error}"
    if not why:
        tensors = content.get("tensors")
        if isinstance(tensors, dict) and all(isinstance(x, dict) for x in tensors.values()):
            return tensors
        why = "its tensors are not listed by name"
    raise CheckpointError(
        saw=f"{path} holds no digests: {why}",
        needed="a file from headwise verify --write-digests",
        do="run headwise verify --write-digests on an intact copy of the weights",
    )
