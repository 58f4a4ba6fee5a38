"""Comparison of what the ranks of a call share: process group, mesh, inputs and options.

For operands of a sequence each rank sends 15 numbers: the lengths that it holds, and for all that
must be the same everywhere a number that tells differences: a size, or a checksum. Of large tensors
every n-th entry is read, so the comparison takes less than a millisecond. A rank whose own operands
are refused says so in its numbers, and every rank raises: none waits for it.

Before that, each rank sends one number of the shapes and names alone. Where those of all ranks were
compared before, this is enough.
"""

import dis
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.errors import HeadwiseError, OptionError

START = (
    "start the script with `torchrun --nproc-per-node=2 script.py`, "
    'and call torch.distributed.init_process_group("gloo") in it'
)

WORD, BLOCK = 8, 2048  # bytes

Check = Literal["first", "always", "never"]  # the calls in which ranks compare their arguments
CHECKS: tuple[str, ...] = get_args(Check)


def require_process_group(call: str) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise OptionError(
            saw=f"{call} without a process group", needed="an initialised process group", do=START
        )


def require_mesh(mesh: DeviceMesh, call: str) -> None:
    """Raise OptionError unless the mesh has one dimension and holds this process."""
    require_process_group(call)
    if not isinstance(mesh, DeviceMesh):
        raise OptionError(
            saw=f"{call} with a mesh of type {type(mesh).__name__}",
            needed="a DeviceMesh",
            do='mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))',
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        raise OptionError(
            saw=f"{call} with a mesh of {mesh.ndim} dimensions, {tuple(mesh.shape)}",
            needed="one dimension, over which the work is divided",
            do=f'mesh["{names[0]}"] for one of {", ".join(names)}',
        )
    if mesh.get_coordinate() is None:
        raise OptionError(
            saw=f"{call} on rank {dist.get_rank()}, which is not in the mesh "
            f"{mesh.mesh.flatten().tolist()}",
            needed="a call on the ranks of the mesh alone",
            do="leave out the call on the other ranks, or make a mesh of all of them",
        )


def require_same_shapes_on_every_rank(inputs: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
    """Raise OptionError on every rank if names, shapes or dtypes of inputs differ between ranks.

    So it does where a gradient is required on some ranks alone. Each rank sends one whole number,
    and its description where these differ.
    """
    graph = " with a gradient" if torch.is_grad_enabled() else ""
    mine = ", ".join(
        f"{name} {tuple(x.shape)} {x.dtype}{graph if x.requires_grad else ''}"
        for name, x in inputs.items()
    )
    device = next(iter(inputs.values())).device
    number = torch.tensor([zlib.crc32(mine.encode())], device=device)
    if (other := _find_differing_rank(number, mesh)) is not None:
        described: list[str] = [""] * mesh.size()
        dist.all_gather_object(described, mine, group=mesh.get_group())
        raise OptionError(
            saw=f"the inputs differ between ranks: rank {other} of the mesh holds "
            f"{described[other]}, and rank 0 {described[0]}",
            needed=f"the same names, shapes and dtypes on all {mesh.size()} ranks",
            do="give every rank the same batch, e.g. after torch.distributed.broadcast",
        )


def require_same_on_every_rank(name: str, tensor: Tensor, mesh: DeviceMesh) -> None:
    """Raise OptionError on every rank if the ranks hold different tensors.

    The ranks compare the shape and sums of the bits: 11 whole numbers. A sum takes 0.13 ms for 4 MB
    on one core, and depends on no order of additions. Two tensors that differ have the same sums
    with a probability of 2**-64, or where 8-byte words change places within 2,048 bytes.
    """
    if (other := _find_differing_rank(_compute_fingerprint(tensor), mesh)) is not None:
        raise OptionError(
            saw=f"{name} differs between ranks: rank {other} of the mesh holds another {name} "
            "than rank 0",
            needed=f"the same {name} on all {mesh.size()} ranks",
            do=f"torch.distributed.broadcast({name}, src=0), or load the same file everywhere",
        )


def _find_differing_rank(numbers: Tensor, mesh: DeviceMesh) -> int | None:
    gathered = [torch.empty_like(numbers) for _ in range(mesh.size())]
    dist.all_gather(gathered, numbers, group=mesh.get_group())
    return next((n for n, x in enumerate(gathered) if not torch.equal(x, gathered[0])), None)


def _compute_fingerprint(tensor: Tensor) -> Tensor:
    """Return the axes, up to 8 lengths, and two sums of the bits, weighted by their places."""
    x = tensor.detach().contiguous()
    if x.storage_offset() * x.element_size() % WORD:
        x = x.clone()  # words begin at multiples of 8 bytes
    bits = x.flatten().view(torch.uint8)
    blocks = len(bits) // BLOCK
    whole, rest = bits.split([blocks * BLOCK, len(bits) - blocks * BLOCK])
    words = whole.view(torch.int64).view(blocks, BLOCK // WORD)
    numbers = (words.sum(1), rest.long())
    # Modulo 2**64.
    sums = [(x * torch.arange(1, len(x) + 1, device=x.device)).sum() for x in numbers]
    shape = [tensor.dim(), *tensor.shape[:8]]
    lengths = torch.tensor(shape + [0] * (9 - len(shape)), device=x.device)
    return torch.cat([lengths, torch.stack(sums)])


# ---- operands of a sequence --------------------------------------------------------------------

# Values that are equal where their repr is.
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
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


def gather_numbers(numbers: Sequence[float], mesh: DeviceMesh) -> list[list[float]]:
    mine = torch.tensor(numbers, dtype=torch.float64, device=mesh.device_type)
    everyone = mine.new_empty(mesh.size(), len(numbers))
    dist.all_gather_single(everyone.view(-1), mine, mesh.get_group())
    return everyone.tolist()


def require_agreement_of_ranks(
    call: str, mesh: DeviceMesh, numbers: Callable[[bool], dict[str, float]], *, check: Check
) -> Agreement:
    """Compare what the ranks of a mesh pass to a call.

    ``numbers`` checks this rank's operands, and returns the numbers of `LOCAL` and `SHARED`: of
    contents, or of shapes and names alone. Contents are compared where the shapes and names of all
    ranks are new, and in every call with ``check="always"``.

    Raises:
        HeadwiseError: of ``numbers``, on the rank that raised it.
        OptionError: the ranks differ, or another rank raised an error.
    """
    try:
        mine = checksum(*numbers(False).values())
    except HeadwiseError:
        mine = -1  # new, so that the comparison below raises it
    everyone = tuple(number for (number,) in gather_numbers([mine], mesh))
    known = _COMPARED.setdefault(mesh.get_group(), {})
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
    everyone = gather_numbers(mine, mesh)
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

    Read are plain values, samples of tensors, the code of functions, and what dataclasses and
    containers hold; of any other object its type. Without ``contents``, shapes and names alone.
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
            flat = value.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // READ)].cpu().contiguous()
            yield some.view(torch.uint8).numpy().tobytes()
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
