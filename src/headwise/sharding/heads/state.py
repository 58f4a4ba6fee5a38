"""State dicts of a sharded model in the form of the unsharded one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from headwise.errors import OptionError, ShapeError
from headwise.layers.torch_api.layer import PACKED, SEPARATE, MultiheadAttention
from headwise.sharding.agreement import require_same_on_every_rank
from headwise.sharding.heads.part import RankHeads
from headwise.support.text import describe_value

SHOWN = 4  # names in a message


def gather_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole state dict on every rank: plain tensors, as the unsharded model has them.

    All ranks call it. The tensors are copies. Each rank holds the whole model; for a model too
    large for that, use torch.distributed.checkpoint with ``model.state_dict()``.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        state[name] = whole.detach().clone()
    for prefix in _find_unpacked_layers(model):
        parts = [state.pop(prefix + name) for name in SEPARATE]
        state[prefix + PACKED] = torch.cat(parts)
    return state


def load_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a whole state dict, as of the unsharded model, into a sharded model.

    All ranks call it with the same tensors; each copies its share. ``state`` and its tensors are
    not changed.

    Raises:
        OptionError: names that are missing or that the model does not have, or other values on
            another rank.
        ShapeError: a tensor of another shape than the parameter.
    """
    values = dict(state)
    for prefix in _find_unpacked_layers(model):
        if (packed := values.pop(prefix + PACKED, None)) is not None:
            parts = packed.chunk(len(SEPARATE))
            values |= {prefix + name: part for name, part in zip(SEPARATE, parts, strict=True)}
    targets = model.state_dict()
    _require_same_names(values, targets)
    for name, target in targets.items():
        if values[name].shape != target.shape:
            raise ShapeError(
                saw=f"{name} of shape {tuple(values[name].shape)}",
                needed=f"{tuple(target.shape)}, the shape of the whole parameter",
                do="pass the state dict of the unsharded model",
            )
    shares = {
        name: _take_rank_share(name, values[name], target) for name, target in targets.items()
    }
    model.load_state_dict(shares)


def _take_rank_share(name: str, value: Tensor, target: Tensor) -> Tensor:
    """Return the share of this rank as a DTensor like the target, or the value for a plain one."""
    if not isinstance(target, DTensor):
        return value
    mesh = target.device_mesh
    for dimension in mesh.mesh_dim_names or (None,):
        require_same_on_every_rank(name, value, mesh if dimension is None else mesh[dimension])
    value = value.detach().to(target.device, target.dtype)
    return distribute_tensor(value, mesh, target.placements, src_data_rank=None)


def _find_unpacked_layers(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        part = module.part if isinstance(module, MultiheadAttention) else None
        if isinstance(part, RankHeads) and part.has_packed_weight:
            yield f"{name}." if name else ""


def _require_same_names(values: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    missing, unknown = sorted(targets.keys() - values), sorted(values.keys() - targets)
    for names, problem in ((missing, "is missing"), (unknown, "is of no parameter")):
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise OptionError(
                saw=f"a state in which {', '.join(names[:SHOWN])}{more} {problem}",
                needed=f"the {len(targets)} names of the unsharded model",
                do="pass the state_dict() of the unsharded model, or gather_state(model)",
            )
    for name, value in values.items():
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            raise OptionError(
                saw=f"{name}={describe_value(value)}",
                needed="a plain tensor, whole",
                do="gather_state(model), or set_model_state_dict of torch for DTensors",
            )
