"""Comparison of the operands and options of all ranks, before anything large is sent.

Each rank sends 15 numbers: the lengths that it holds, and for all that must be the same everywhere
a number that tells differences: a size, or a checksum. Of large tensors every n-th entry is read,
so the comparison takes less than a millisecond. A rank whose own operands are refused says so in
its numbers, and every rank raises: none waits for it.

Before that, each rank sends one number of the shapes and names alone. Where those of all ranks were
compared before, this is enough.
"""

from __future__ import annotations

import dis
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.errors import HeadwiseError, OptionError
from headwise.sharding.checks import Check
from headwise.sharding.collectives import gather_numbers

PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
)  # equal where their repr is
READ = 2**14  # entries of a tensor that a checksum reads, at most
LOCAL = ("queries", "keys")  # numbers that may differ between ranks
# Numbers that may not -> how a message names them.
SHARED = {
    "batch": "batch of q",
    "heads": "number of heads of q",
    "kv_heads": "number of kv_heads of k",
    "head_dim": "head_dim",
    "value_dim": "value_dim of v",
    "dtype": "dtype",
    "requires_grad": "set of operands that require a gradient",
    "mask": "mask",
    "score_bias": "score_bias",
    "sink": "sink",
    "options": "scale, softcap, by, limit or check",
    "layout": "layout",
}


@dataclass(frozen=True)
class Agreement:
    """Lengths of all ranks, where everything else agreed."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]


# What each rank's call looked like -> the lengths, for calls whose contents were compared.
_COMPARED: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[float, ...], Agreement]] = (
    WeakKeyDictionary()
)
_MOST_COMPARED = 1024


def require_agreement_of_ranks(
    call: str, mesh: DeviceMesh, numbers: Callable[[bool], dict[str, float]], *, check: Check
) -> Agreement:
    """Compare what the ranks of a mesh pass to a call.

    Args:
        call: the call, for messages.
        mesh: of one dimension.
        numbers: checks this rank's operands, and returns the numbers of `LOCAL` and `SHARED`: of
            contents, or of shapes and names alone.
        check: "first" compares contents where the shapes and names of all ranks are new, "always"
            in every call.

    Raises:
        HeadwiseError: of ``numbers``, on the rank that raised it.
        OptionError: the ranks differ, or another rank raised an error.
    """
    try:
        mine = checksum(*numbers(False).values())
    except HeadwiseError:
        mine = -1  # new, so that the comparison below raises it
    group = mesh.get_group()
    everyone = tuple(gather_numbers([mine], group, mesh.device_type).flatten().tolist())
    known = _COMPARED.setdefault(group, {})
    if check == "always" or everyone not in known:
        agreement = _compare_contents(call, mesh, numbers)
        if len(known) == _MOST_COMPARED:  # on all ranks alike
            known.clear()
        known[everyone] = agreement
    return known[everyone]


def _compare_contents(
    call: str, mesh: DeviceMesh, numbers: Callable[[bool], dict[str, float]]
) -> Agreement:
    refusal: HeadwiseError | None = None
    names = (*LOCAL, *SHARED)
    try:
        known = numbers(True)
        mine = [0.0, *(float(known[name]) for name in names)]
    except HeadwiseError as error:
        refusal, mine = error, [1.0] + [0.0] * len(names)
    everyone = gather_numbers(mine, mesh.get_group(), mesh.device_type).tolist()
    if refusal is not None:
        raise refusal
    if refused := [rank for rank, row in enumerate(everyone) if row[0]]:
        raise OptionError(
            saw=f"{call}: rank {refused[0]} of the mesh refused its operands",
            needed="operands that fit on every rank",
            do=f"read the message of rank {refused[0]}",
        )
    columns = dict(zip(names, list(zip(*everyone, strict=True))[1:], strict=True))
    for name, described in SHARED.items():
        values = columns[name]
        if others := [rank for rank, value in enumerate(values) if value != values[0]]:
            raise OptionError(
                saw=f"{call}: rank {others[0]} of the mesh has another {described} than rank 0",
                needed=f"the same on all {len(everyone)} ranks; masks and biases are those of the "
                "whole sequence",
                do="build it from the same numbers everywhere, e.g. after "
                "torch.distributed.broadcast",
            )
    queries, keys = (tuple(int(n) for n in columns[name]) for name in LOCAL)
    return Agreement(queries, keys)


# ---- checksums ---------------------------------------------------------------------------------


def checksum(*values: Any, contents: bool = True) -> int:
    """Return a number for values; other values have another one nearly always.

    Args:
        values: plain values, tensors, functions, and dataclasses and containers of them. Of any
            other object its type counts alone.
        contents: True to read samples of tensors and the code of functions; False to read shapes
            and names alone.
    """
    total = 0
    for part in _yield_parts(values, contents=contents, seen={}):
        total = zlib.crc32(part, total)
    return total


def _yield_parts(value: Any, *, contents: bool, seen: dict[int, Any]) -> Iterator[bytes]:
    if isinstance(value, PLAIN):
        yield repr(value).encode()
        return
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        value = torch.from_numpy(np.array(value))
    if isinstance(value, Tensor):
        yield f"{tuple(value.shape)} {value.dtype}".encode()
        if contents:
            yield _sample_bytes(value)
        return
    yield f"{type(value).__qualname__} {getattr(value, '__qualname__', '')}".encode()
    if id(value) in seen:  # a function may stand in its own closure
        return
    if not isinstance(value, tuple):
        seen[id(value)] = value
    for part in _parts_of_object(value, contents=contents):
        yield from _yield_parts(part, contents=contents, seen=seen)


def _parts_of_object(value: Any, *, contents: bool) -> Iterable[Any]:
    if isinstance(value, tuple | list):
        return value
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    if not contents or isinstance(value, type):
        return ()
    if isinstance(value, FunctionType):
        return _parts_of_function(value)
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if callable(value) and hasattr(value, "__dict__"):
        return type(value).__call__, vars(value)
    return ()


def _parts_of_function(function: FunctionType) -> Iterator[Any]:
    """Yield code, constants, defaults, and values of the closure and of globals that it reads."""
    yield from (function.__defaults__, function.__kwdefaults__)
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a name that has no value yet
            yield cell.cell_contents
    codes = [function.__code__]
    for code in codes:
        yield from (code.co_code, code.co_names)
        inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        yield tuple(constant for constant in code.co_consts if constant not in inner)
        codes += inner
        for instruction in dis.get_instructions(code):
            if instruction.opname == "LOAD_GLOBAL":
                value = function.__globals__.get(instruction.argval)
                # Of functions of other modules the name counts: a library is the same everywhere.
                is_other = getattr(value, "__module__", None) not in (None, function.__module__)
                yield instruction.argval if callable(value) and is_other else value


def _sample_bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // READ)].cpu().contiguous()
    return some.view(torch.uint8).numpy().tobytes()
