"""`Heads`, a parallel style of torch for attention layers, the plan of a model, and the division.

Parameters of a layer become DTensors, and its modules compute with their shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from headwise.errors import OptionError
from headwise.layers import conversion
from headwise.layers.attention import Attention
from headwise.layers.distance import T5BucketTable
from headwise.layers.norm import Norm
from headwise.layers.torch_api.layer import PACKED, SEPARATE, MultiheadAttention
from headwise.layouts.pattern import find_axis_led_by
from headwise.sharding import agreement
from headwise.sharding.agreement import Check
from headwise.sharding.heads import part as ranks
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
    model: nn.Module, *, kv: KV = "split", in_proj: InProj = "whole", check_inputs: Check = "first"
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


# ---- division ---------------------------------------------------------------------------------


def divide_attention(layer: Attention, *, part: RankHeads, splits_kv: bool) -> None:
    """Divide the heads of a layer, its kv heads too if ``splits_kv``."""
    patterns = conversion.layout_of_layer(layer).patterns
    for name, projection in layer.named_children():
        if not isinstance(projection, nn.Linear):
            continue
        pattern = patterns[f"{name}.weight"]
        led = find_axis_led_by(pattern, ("heads", "kv_heads"))
        assert led is not None
        if led.dim == 1:
            _divide_output_projection(projection, part)
        elif led.name == "heads" or splits_kv:
            _divide(projection, ranks.HeadsProjection, Shard(0), Shard(0), part, channels=None)
        else:
            width = getattr(layer, pattern.axes[0].before[1])
            is_width = layer.qk_norm is not None and layer.qk_norm.over == "width"
            # The norm of a width needs the keys of all heads; it leaves out those of other ranks.
            channels = None if is_width and name == "k_proj" else _kv_channels_of_rank(part, width)
            kind = ranks.HeadsProjection
            _divide(projection, kind, Replicate(), Replicate(), part, channels=channels)
    if layer.qk_norm is not None:
        _divide_norms(layer, part, splits_kv=splits_kv)
    _distribute_parameter(layer, "sink", Shard(0), part)
    if isinstance(layer.score_bias, T5BucketTable):
        table = layer.score_bias.relative_attention_bias
        _divide(table, ranks.ReplicatedEmbedding, Replicate(), Replicate(), part)
    layer.part = part


def divide_multihead_attention(
    layer: MultiheadAttention, *, part: RankHeads, splits_packed: bool
) -> None:
    """Divide the heads of a drop-in; ``splits_packed`` also divides a packed weight."""
    packed = layer.in_proj_weight
    if splits_packed and packed is not None:
        part.has_packed_weight = True
        layer.register_parameter(PACKED, None)
        layer._qkv_same_embed_dim = False
        for name, weight in zip(SEPARATE, packed.detach().chunk(3), strict=True):
            layer.register_parameter(name, nn.Parameter(weight, packed.requires_grad))
    placements: dict[str, Placement] = dict.fromkeys(SEPARATE, Shard(0))
    placements |= {"in_proj_weight": Replicate(), "in_proj_bias": Replicate()}
    placements |= {"bias_k": Shard(2), "bias_v": Shard(2)}
    for name, placement in placements.items():
        _distribute_parameter(layer, name, placement, part)
    _divide_output_projection(layer.out_proj, part)
    layer.part = part


def _divide(
    module: nn.Module,
    kind: type[nn.Module],
    weight: Placement,
    bias: Placement,
    part: RankHeads,
    /,
    **attributes: Any,
) -> None:
    module.__class__ = kind
    for name, value in attributes.items():
        setattr(module, name, value)
    _distribute_parameter(module, "weight", weight, part)
    _distribute_parameter(module, "bias", bias, part)


def _divide_output_projection(projection: nn.Linear, part: RankHeads) -> None:
    kind = ranks.RankSummedOutputProjection
    _divide(projection, kind, Shard(1), Replicate(), part, part=part)


def _divide_norms(layer: Attention, part: RankHeads, *, splits_kv: bool) -> None:
    for norm, splits in ((layer.q_norm, True), (layer.k_norm, splits_kv)):
        assert isinstance(norm, Norm)
        if norm.options.over == "width" and splits:
            kind, width = ranks.WidthNormOverRanks, len(norm.weight)
            _divide(norm, kind, Shard(0), Shard(0), part, part=part, width=width)
            continue
        is_width = norm.options.over == "width"
        channels = _kv_channels_of_rank(part, layer.head_dim) if is_width else None
        _divide(norm, ranks.HeadsNorm, Replicate(), Replicate(), part, channels=channels)


def _kv_channels_of_rank(part: RankHeads, width: int) -> slice:
    return slice(part.kv_heads.start * width, part.kv_heads.stop * width)


def _distribute_parameter(
    module: nn.Module, name: str, placement: Placement, part: RankHeads
) -> None:
    parameter = getattr(module, name, None)
    if parameter is None:
        return
    share: Tensor = parameter.detach()
    if isinstance(placement, Shard):
        share = share.chunk(part.mesh.size(), placement.dim)[part.mesh.get_local_rank()]
    share = share.clone(memory_format=torch.contiguous_format)
    whole = DTensor.from_local(share, part.mesh, [placement], run_check=False)
    module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
