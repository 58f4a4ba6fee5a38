"""A .safetensors file: its head is checked, and its tensors are mapped, not read.

The head is eight bytes with its length, then JSON; the numbers follow. What the safetensors library
refuses is refused here, and a few things more: names that stand twice, and fields that are not
known.
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
LENGTH = 8  # bytes that say how long the JSON is
MOST = 100_000_000  # bytes of JSON, as in the library
METADATA = "__metadata__"
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
    """What a file says of a tensor.

    Attributes:
        shape: how long its axes are.
        dtype: of its numbers.
        file: where it is.
        offset: of its first byte in the file; None where only the file's reader knows.
    """

    shape: Shape
    dtype: torch.dtype
    file: Path
    offset: int | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes it has, without gaps."""
        return prod(self.shape) * self.dtype.itemsize


def encode(
    tensors: Mapping[str, tuple[Shape, torch.dtype]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """The head of a file with these tensors, where the bytes of each begin, and the file's size.

    The head is its length, and the JSON padded to eight bytes.
    """
    about: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    starts, end = {}, 0
    for name, (shape, dtype) in tensors.items():
        starts[name], end = end, end + prod(shape) * dtype.itemsize
        offsets = [starts[name], end]
        about[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(about, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(LENGTH, "little") + text
    return head, {name: len(head) + start for name, start in starts.items()}, len(head) + end


def once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """For JSON in which every name may stand once. ValueError for one that stands twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} stands in it twice")
        found[name] = value
    return found


def is_utf8(text: str) -> bool:
    """Whether it has no lone half of a letter, which JSON can write and nothing can print."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _are_counts(found: Any) -> bool:
    return isinstance(found, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**63 for n in found
    )


@dataclass(frozen=True, eq=False)
class TensorFile:
    """A file of tensors: what its head says, and the tensors on demand.

    Attributes:
        path: of the file.
        headers: name -> shape, dtype and place.
        metadata: texts by their names.
        tensor: name -> tensor.
        model_args: the arguments of the model, where a file of nanoGPT holds them.
    """

    path: Path
    headers: dict[str, StoredTensor]
    metadata: dict[str, str]
    tensor: Callable[[str], Tensor]
    model_args: Mapping[str, Any] = field(default_factory=dict)


def read(path: Path) -> TensorFile:
    """Read the head of a file.

    Raises:
        CheckpointError: it is damaged, cut off, or none.
        OSError: it cannot be opened.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH), "little")
        if size < LENGTH or length > min(size - LENGTH, MOST):
            raise damaged(path, f"{size} bytes, which say that their head has {length}")
        text = file.read(length)
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its head is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise damaged(path, f"its head holds a {type(found).__name__}")
    metadata = found.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise damaged(path, f"its {METADATA} is no mapping of texts")
    headers = _headers(path, found, LENGTH + length, size)
    try:  # JSON leaves corners in which two readers differ: the library has to see the same names
        with safe_open(path, framework="pt") as opened:
            names = set(opened.keys())
    except (SafetensorError, ValueError) as error:
        raise damaged(path, str(error)) from error
    if names != set(headers):
        raise damaged(path, "the safetensors library reads other names in it")
    return TensorFile(path, headers, metadata, lambda name: _mapped(headers[name]))


def _headers(path: Path, found: dict[str, Any], begin: int, size: int) -> dict[str, StoredTensor]:
    """The tensors in the order of their bytes, which leave no gap between ``begin`` and the end."""
    stored = {name: _stored(path, name, value, begin) for name, value in found.items()}
    end, ordered = begin, {}
    for name, x in sorted(stored.items(), key=lambda item: (item[1].offset or 0, item[1].nbytes)):
        offset = x.offset or 0
        if offset != end:
            what = "overlap" if offset < end else "leave a gap"
            start = f"{offset - begin}, not {end - begin}"
            raise damaged(path, f"the bytes of {name} begin at {start}: they {what}")
        end, ordered[name] = end + x.nbytes, x
    if end != size:
        raise damaged(path, f"its tensors have {end - begin} bytes, and it holds {size - begin}")
    return ordered


def _stored(path: Path, name: str, found: Any, begin: int) -> StoredTensor:
    if not isinstance(found, dict) or found.keys() != FIELDS:
        fields = ", ".join(sorted(found)) if isinstance(found, dict) else type(found).__name__
        said = f"{name!r} has {fields or 'nothing'}, not {', '.join(sorted(FIELDS))}"
        raise damaged(path, said)
    dtype, shape, offsets = found["dtype"], found["shape"], found["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise damaged(path, f"{name!r} is of the dtype {dtype!r}, and known are {known}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise damaged(path, f"{name!r} has the shape {shape} and the offsets {offsets}")
    start, stop = offsets
    stored = StoredTensor(tuple(shape), DTYPES[dtype], path, begin + start)
    if stop - start != stored.nbytes:
        sizes = f"{stop - start} bytes; {dtype} of shape {shape} has {stored.nbytes}"
        raise damaged(path, f"{name!r} has {sizes}")
    return stored


def damaged(path: Path, why: str) -> CheckpointError:
    """What is said of a file that cannot be read."""
    return CheckpointError(
        saw=f"{path}: {why[:300]}",
        needed="a whole safetensors file",
        do="copy or download it again, and compare its checksum with that of its publisher",
    )


def _mapped(stored: StoredTensor) -> Tensor:
    """A tensor in pages of the file; those that are not looked at are not read."""
    assert stored.offset is not None
    if not stored.nbytes:
        return torch.empty(stored.shape, dtype=stored.dtype)
    start = stored.offset - stored.offset % mmap.ALLOCATIONGRANULARITY
    skipped = stored.offset - start
    with stored.file.open("rb") as file:
        try:
            # Private pages: torch knows no tensors that may only be read.
            pages = mmap.mmap(
                file.fileno(), skipped + stored.nbytes, access=mmap.ACCESS_COPY, offset=start
            )
        except ValueError as error:
            raise damaged(stored.file, "it became shorter while it was read") from error
    pages.madvise(mmap.MADV_WILLNEED)  # else a disk is asked for few pages at a time
    raw = torch.frombuffer(pages, dtype=torch.uint8, count=stored.nbytes, offset=skipped)
    if stored.offset % stored.dtype.itemsize:
        raw = raw.clone()  # a head of odd length; numbers want to stand at their multiples
    return raw.view(stored.dtype).view(stored.shape)
