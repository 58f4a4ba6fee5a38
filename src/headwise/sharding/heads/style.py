"""`Heads`, a parallel style of torch for attention layers, and the plan of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from headwise.errors import OptionError
from headwise.layers.attention import Attention
from headwise.layers.distance import T5BucketTable
from headwise.layers.norm import Norm
from headwise.layers.torch_api.layer import PACKED, SEPARATE, MultiheadAttention
from headwise.sharding import agreement
from headwise.sharding.agreement import Check
from headwise.sharding.heads.divide import divide_attention, divide_multihead_attention
from headwise.sharding.heads.part import RankHeads
from headwise.support.text import describe_value

KV = Literal["split", "replicate"]
InProj = Literal["whole", "separate"]
_LINEAR = (nn.Linear, NonDynamicallyQuantizableLinear)
_KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "proj": _LINEAR,  # q_proj, out_proj and so on
    "norm": (Norm,),
    "relative_attention_bias": (nn.Embedding,),
}
_PARAMETERS = ("sink", PACKED, "in_proj_bias", *SEPARATE, "bias_k", "bias_v")
_CHOICES = {"kv": get_args(KV), "in_proj": get_args(InProj), "check_inputs": agreement.CHECKS}


class Heads(ParallelStyle):
    """Parallel style that divides the heads of an attention layer over ranks.

    Each rank computes as many heads, from the same input. The outputs are summed by one all-reduce
    of the output projection; one all-reduce in the backward pass sums the gradients of all inputs.
    Parameters become DTensors under their names.

        parallelize_module(layer, mesh, Heads())
        parallelize_module(model, mesh, heads_plan(model))

    Args:
        kv: "split" divides the kv heads too, so their number is a multiple of that of ranks;
            "replicate" keeps the weights of all kv heads on every rank, which computes those that
            its query heads use.
        in_proj: for a packed ``in_proj_weight`` of `MultiheadAttention`: "whole" keeps it on every
            rank; "separate" replaces it by ``q_proj_weight``, ``k_proj_weight`` and
            ``v_proj_weight``, which are divided.
        check_inputs: the calls in which ranks compare the values of their inputs, and raise where
            these differ: the "first", "always" or "never". The first two compare shapes in every
            call. Nothing is compared in a compiled graph.

    Raises:
        OptionError: an option that does not exist. For a layer: heads that the ranks do not divide,
            modules that are not headwise's own, or other weights on another rank. Nothing is
            divided then.
    """

    def __init__(
        self, kv: KV = "split", *, in_proj: InProj = "whole", check_inputs: Check = "first"
    ) -> None:
        super().__init__()
        self.kv, self.in_proj, self.check_inputs = kv, in_proj, check_inputs
        self._layers: tuple[nn.Module, ...] = ()  # all layers of a plan
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise OptionError(
                    saw=f"Heads({name}={describe_value(getattr(self, name))})",
                    needed=" or ".join(f'"{choice}"' for choice in choices),
                    do=f'{name}="{choices[0]}" is the default',
                )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        agreement.require_mesh(device_mesh, "Heads()")
        for layer in self._layers or (module,):
            if getattr(layer, "part", None) is None or layer is module:
                _check_layer_modules(layer)
                _check_heads_divide(layer, device_mesh.size(), kv=self.kv)
        for name, tensor in module.state_dict().items():
            if not tensor.is_meta:
                agreement.require_same_on_every_rank(name, tensor, device_mesh)
        assert isinstance(module, Attention | MultiheadAttention)
        kv_heads = module.num_kv_heads if isinstance(module, Attention) else module.num_heads
        heads = {"num_heads": module.num_heads, "num_kv_heads": kv_heads}
        part = RankHeads(device_mesh, **heads, check_inputs=self.check_inputs)
        if isinstance(module, Attention):
            divide_attention(module, part=part, splits_kv=self.kv == "split")
        else:
            divide_multihead_attention(module, part=part, splits_packed=self.in_proj == "separate")
        return module

    def __repr__(self) -> str:
        options = ", ".join(f'{name}="{getattr(self, name)}"' for name in _CHOICES)
        return f"Heads({options})"


def heads_plan(
    model: nn.Module,
    *,
    kv: KV = "split",
    in_proj: InProj = "whole",
    check_inputs: Check = "first",
) -> dict[str, ParallelStyle]:
    """Return the plan that divides the heads of every attention layer of a model.

    All layers are checked before the first is divided.

    Args:
        model: holds layers of `Attention` and `MultiheadAttention`.
        kv: see `Heads`.
        in_proj: see `Heads`.
        check_inputs: see `Heads`.

    Raises:
        OptionError: no such layer, the model is such a layer itself, or weights of a layer that are
            weights of another module too.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Attention | MultiheadAttention)
    }
    if not layers or "" in layers:
        itself = "" in layers
        raise OptionError(
            saw=f"heads_plan of a {type(model).__name__}"
            + ("" if itself else " without a headwise attention layer"),
            needed="a model that holds headwise.Attention or headwise.MultiheadAttention",
            do="parallelize_module(layer, mesh, Heads()) for one layer"
            if itself
            else "headwise.upgrade(model) first, where its layers are torch's",
        )
    _check_no_tied_weights(model, layers)
    style = Heads(kv, in_proj=in_proj, check_inputs=check_inputs)
    style._layers = tuple(layers.values())
    return dict.fromkeys(layers, style)


# ---- checks before heads are divided -----------------------------------------------------------


def _check_layer_modules(layer: nn.Module) -> None:
    """Raise OptionError unless a layer has the parameters and modules that it was made of.

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
        if name not in ("", "score_bias") and (is_table or not name.startswith("score_bias")):
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
    last = name.rpartition(".")[2]
    kinds = _KINDS.get(last) or _KINDS.get(last.rpartition("_")[2], ())
    if type(module) not in kinds:
        described = " with a parametrization" if is_parametrized(module) else ""
        raise OptionError(
            saw=f"Heads() for a layer whose {name} is a {type(module).__name__}{described}",
            needed="the projections and norms that the layer was made with",
            do="parallelize the layer before adapters or quantisation, or without them",
        )


def _check_heads_divide(layer: nn.Module, ranks: int, *, kv: str) -> None:
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


def _check_no_tied_weights(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
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
