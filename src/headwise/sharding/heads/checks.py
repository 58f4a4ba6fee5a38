"""Checks of a layer before its heads are divided."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from headwise.errors import OptionError
from headwise.layers.attention import Attention
from headwise.layers.distance import T5BucketTable
from headwise.layers.norm import Norm
from headwise.layers.torch_api.layer import PACKED, SEPARATE, MultiheadAttention
from headwise.sharding.agreement import require_same_on_every_rank

_LINEAR = (nn.Linear, NonDynamicallyQuantizableLinear)
_KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "proj": _LINEAR,  # q_proj, out_proj and so on
    "norm": (Norm,),
    "relative_attention_bias": (nn.Embedding,),
}
_PARAMETERS = ("sink", PACKED, "in_proj_bias", *SEPARATE, "bias_k", "bias_v")


def check_layer_modules(layer: nn.Module) -> None:
    """Raise OptionError unless the parameters and modules of a layer are those that it was made of.

    A score bias of the user's own may hold anything: each rank computes it for all heads.
    """
    if not isinstance(layer, Attention | MultiheadAttention):
        raise OptionError(
            saw=f"Heads() for a {type(layer).__name__}",
            needed="headwise.Attention or headwise.MultiheadAttention",
            do="headwise.upgrade(model) first, where the layer is torch's",
        )
    if layer.part is not None:
        raise OptionError(
            saw=f"Heads() for a layer that computes {layer.part} of {layer.num_heads} already",
            needed="a layer that computes all of its heads",
            do="parallelize each layer once",
        )
    is_table = isinstance(getattr(layer, "score_bias", None), T5BucketTable)
    for name, module in layer.named_modules():
        if name.startswith("score_bias") and not is_table:
            continue
        _check_module(name, module)
    for name, parameter in layer.named_parameters():
        if isinstance(parameter, DTensor):
            raise OptionError(
                saw=f"Heads() for a layer whose {name} is a DTensor already",
                needed="plain parameters",
                do="parallelize_module(..., Heads()) first, then fully_shard",
            )
        if "." not in name and name not in _PARAMETERS:
            raise OptionError(
                saw=f"Heads() for a {type(layer).__name__} with a parameter of its own, {name}",
                needed="the parameters of headwise's layer",
                do=f"move {name} into a module outside of the layer",
            )


def _check_module(name: str, module: nn.Module) -> None:
    if name in ("", "score_bias"):
        return
    last = name.rpartition(".")[2]
    kinds = _KINDS.get(last) or _KINDS.get(last.rpartition("_")[2], ())
    if type(module) not in kinds:
        described = " with a parametrization" if is_parametrized(module) else ""
        raise OptionError(
            saw=f"Heads() for a layer whose {name} is a {type(module).__name__}{described}",
            needed="the projections and norms that the layer was made with",
            do="parallelize the layer before adapters or quantisation, or without them",
        )


def check_heads_divide(layer: nn.Module, ranks: int, *, kv: str) -> None:
    """Raise OptionError unless ranks divide the heads of a layer, and kv heads if these split."""
    assert isinstance(layer, Attention | MultiheadAttention)
    counts = {"num_heads": layer.num_heads}
    if isinstance(layer, Attention) and kv == "split":
        counts["num_kv_heads"] = layer.num_kv_heads
    for name, count in counts.items():
        if count % ranks == 0:
            continue
        fitting = [str(n) for n in range(1, count + 1) if count % n == 0]
        remedy = f"a mesh of {', '.join(fitting)} ranks"
        if name == "num_kv_heads":
            remedy = f'Heads(kv="replicate"), or {remedy}'
        raise OptionError(
            saw=f"Heads() for {name}={count} over {ranks} ranks",
            needed=f"{name} divisible by the number of ranks",
            do=remedy,
        )


def check_equal_weights(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Raise OptionError on every rank if ranks hold different weights."""
    for name, tensor in layer.state_dict().items():
        if not tensor.is_meta:
            require_same_on_every_rank(name, tensor, mesh)


def check_no_tied_weights(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raise OptionError if a weight of a layer is a weight of another module too."""
    names: dict[int, str] = {}
    starts = tuple(f"{name}." for name in layers)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name and (first.startswith(starts) or name.startswith(starts)):
            raise OptionError(
                saw=f"{first} and {name} are one parameter",
                needed="weights of attention layers that belong to one module",
                do="copy one of the two, or leave these layers out of the plan",
            )
