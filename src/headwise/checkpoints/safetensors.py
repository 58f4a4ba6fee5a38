"""Reader of .safetensors files: the header is checked, and the tensors are memory-mapped.

The header is its length in eight bytes, then JSON; the numbers follow. The reader rejects all files
that the safetensors library rejects, and also duplicate names and unknown fields.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headwise.errors import CheckpointError

Shape = tuple[int, ...]
LENGTH = 8  # bytes of the JSON's length
MAX_JSON = 100_000_000  # bytes, as in the library
METADATA = "__metadata__"
KEY = "headwise"  # of the description in the metadata
FIELDS = {"dtype", "shape", "data_offsets"}
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """Header of a tensor in a file.

    Attributes:
        shape: the sizes of its axes.
        dtype: the type of its numbers.
        file: the path of the file.
        offset: its first byte in the file; None for files that torch wrote.
    """

    shape: Shape
    dtype: torch.dtype
    file: Path
    offset: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all numbers."""
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


def unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; raise ValueError for a duplicate name."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"the name {name!r} occurs twice")
        values[name] = value
    return values


def is_utf8(text: str) -> bool:
    """True if the text has no lone surrogate, which JSON can write and UTF-8 cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _are_whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**63 for n in values
    )


@dataclass(frozen=True, eq=False)
class TensorFile:
    """File of tensors: headers, metadata, and a function that loads a tensor.

    Attributes:
        path: the path of the file.
        headers: name -> shape, dtype and offset.
        metadata: name -> text.
        tensor: name -> tensor.
        model_args: the model's arguments in a file of nanoGPT; empty for other files.
    """

    path: Path
    headers: dict[str, StoredTensor]
    metadata: dict[str, str]
    tensor: Callable[[str], Tensor]
    model_args: Mapping[str, Any] = field(default_factory=dict)


def read_safetensors_header(path: Path) -> TensorFile:
    """Read the header of a file.

    Raises:
        CheckpointError: the file is damaged, cut off, or no safetensors file.
        OSError: the file cannot be opened.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH), "little")
        if size < LENGTH or length > min(size - LENGTH, MAX_JSON):
            raise damaged_error(path, f"the file has {size} bytes, and a header length of {length}")
        text = file.read(length)
    try:
        fields = json.loads(text.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise damaged_error(path, f"its header is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise damaged_error(path, f"its header holds a {type(fields).__name__}")
    metadata = fields.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise damaged_error(path, f"its {METADATA} is no object of texts")
    headers = _parse_tensor_headers(path, fields, LENGTH + length, size)
    try:  # JSON parsers differ in details: the library must read the same names
        with safe_open(path, framework="pt") as opened:
            names = set(opened.keys())
    except (SafetensorError, ValueError) as error:
        raise damaged_error(path, str(error)) from error
    if names != set(headers):
        raise damaged_error(path, "the safetensors library reads other names in it")
    return TensorFile(path, headers, metadata, lambda name: _map_tensor_to_memory(headers[name]))


def _parse_tensor_headers(
    path: Path, fields: dict[str, Any], begin: int, size: int
) -> dict[str, StoredTensor]:
    """Return the tensors in the order of their bytes, which must fill the file from ``begin``."""
    headers = {
        name: _parse_tensor_header(path, name, value, begin) for name, value in fields.items()
    }
    end, ordered = begin, {}
    for name, header in sorted(headers.items(), key=lambda x: (x[1].offset or 0, x[1].nbytes)):
        offset = header.offset or 0
        if offset != end:
            fault = "overlap" if offset < end else "leave a gap"
            start = f"{offset - begin}, not {end - begin}"
            raise damaged_error(path, f"the bytes of {name} begin at {start}: they {fault}")
        end, ordered[name] = end + header.nbytes, header
    if end != size:
        held = size - begin
        raise damaged_error(path, f"its tensors have {end - begin} bytes, and it holds {held}")
    return ordered


def _parse_tensor_header(path: Path, name: str, fields: Any, begin: int) -> StoredTensor:
    if not isinstance(fields, dict) or fields.keys() != FIELDS:
        names = ", ".join(sorted(fields)) if isinstance(fields, dict) else type(fields).__name__
        message = f"{name!r} has {names or 'nothing'}, not {', '.join(sorted(FIELDS))}"
        raise damaged_error(path, message)
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise damaged_error(path, f"{name!r} has the dtype {dtype!r}, which is none of {known}")
    if not _are_whole_numbers(shape) or not _are_whole_numbers(offsets) or len(offsets) != 2:
        raise damaged_error(path, f"{name!r} has the shape {shape} and the offsets {offsets}")
    start, stop = offsets
    stored = StoredTensor(tuple(shape), DTYPES[dtype], path, begin + start)
    if stop - start != stored.nbytes:
        sizes = f"{stop - start} bytes; {dtype} of shape {shape} has {stored.nbytes}"
        raise damaged_error(path, f"{name!r} has {sizes}")
    return stored


def damaged_error(path: Path, why: str) -> CheckpointError:
    """Return the error for a damaged safetensors file."""
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
