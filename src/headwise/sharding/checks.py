"""Checks of the process group, the device mesh and the inputs that all ranks must share."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.errors import OptionError

START = (
    "start the script with `torchrun --nproc-per-node=2 script.py`, "
    'and call torch.distributed.init_process_group("gloo") in it'
)

WORD, BLOCK = 8, 2048  # bytes

Check = Literal["first", "always", "never"]  # the calls in which ranks compare their arguments
CHECKS: tuple[str, ...] = get_args(Check)


def require_process_group(call: str) -> None:
    """Raise OptionError unless torch.distributed has a process group.

    Args:
        call: the call that needs it, as the caller wrote it.
    """
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
    gathered = [torch.empty_like(number) for _ in range(mesh.size())]
    dist.all_gather(gathered, number, group=mesh.get_group())
    differing = [rank for rank, other in enumerate(gathered) if not torch.equal(other, gathered[0])]
    if differing:
        described: list[str] = [""] * mesh.size()
        dist.all_gather_object(described, mine, group=mesh.get_group())
        raise OptionError(
            saw=f"the inputs differ between ranks: rank {differing[0]} of the mesh holds "
            f"{described[differing[0]]}, and rank 0 {described[0]}",
            needed=f"the same names, shapes and dtypes on all {mesh.size()} ranks",
            do="give every rank the same batch, e.g. after torch.distributed.broadcast",
        )


def require_same_on_every_rank(name: str, tensor: Tensor, mesh: DeviceMesh) -> None:
    """Raise OptionError on every rank if the ranks hold different tensors.

    The ranks compare the shape and sums of the bits: 11 whole numbers. A sum takes 0.13 ms for 4 MB
    on one core, and depends on no order of additions. Two tensors that differ have the same sums
    with a probability of 2**-64, or where 8-byte words change places within 2,048 bytes.
    """
    numbers = _compute_fingerprint(tensor)
    gathered = [torch.empty_like(numbers) for _ in range(mesh.size())]
    dist.all_gather(gathered, numbers, group=mesh.get_group())
    differing = [rank for rank, other in enumerate(gathered) if not torch.equal(other, gathered[0])]
    if differing:
        raise OptionError(
            saw=f"{name} differs between ranks: rank {differing[0]} of the mesh holds another "
            f"{name} than rank 0",
            needed=f"the same {name} on all {mesh.size()} ranks",
            do=f"torch.distributed.broadcast({name}, src=0), or load the same file everywhere",
        )


def _compute_fingerprint(tensor: Tensor) -> Tensor:
    """Return the axes, up to 8 lengths, and two sums of the bits, weighted by their places."""
    x = tensor.detach().contiguous()
    if x.storage_offset() * x.element_size() % WORD:
        x = x.clone()  # words begin at multiples of 8 bytes
    bits = x.flatten().view(torch.uint8)
    blocks = len(bits) // BLOCK
    whole, rest = bits.split([blocks * BLOCK, len(bits) - blocks * BLOCK])
    words = whole.view(torch.int64).view(blocks, BLOCK // WORD)
    sums = [_sum_weighted_by_place(words.sum(1)), _sum_weighted_by_place(rest.long())]
    shape = [tensor.dim(), *tensor.shape[:8]]
    lengths = torch.tensor(shape + [0] * (9 - len(shape)), device=x.device)
    return torch.cat([lengths, torch.stack(sums)])


def _sum_weighted_by_place(numbers: Tensor) -> Tensor:
    """Return the sum of integers times their places, modulo 2**64."""
    return (numbers * torch.arange(1, len(numbers) + 1, device=numbers.device)).sum()
