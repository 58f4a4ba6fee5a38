"""Heads of attention layers over ranks: a parallel style of torch, its plan, and state dicts.

A module keeps its object, hooks and names, and gets one of the classes here. Parameters become
DTensors, and each forward pass computes with what this rank holds of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from headwise.errors import OptionError, ShapeError
from headwise.layers import conversion
from headwise.layers.attention import Attention
from headwise.layers.base import LATENTS, HeadPart
from headwise.layers.distance import T5BucketTable
from headwise.layers.linear import apply_linear
from headwise.layers.norm import Norm
from headwise.layers.torch_api.layer import PACKED, SEPARATE, MultiheadAttention
from headwise.layouts.pattern import Pattern, find_axis_led_by
from headwise.layouts.registry import layout
from headwise.sharding import agreement, collectives
from headwise.sharding.agreement import Check
from headwise.support.text import describe_value
from headwise.support.tracing import may_read_values

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


P = TypeVar("P", Tensor, Tensor | None)


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
            last = name.rpartition(".")[2]
            kinds = _KINDS.get(last) or _KINDS.get(last.rpartition("_")[2], ())
            if type(module) not in kinds:
                described = " with a parametrization" if is_parametrized(module) else ""
                raise OptionError(
                    saw=f"Heads() for a layer whose {name} is a {type(module).__name__}{described}",
                    needed="the projections and norms that the layer was made with",
                    do="parallelize the layer before adapters or quantisation, or without them",
                )
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
    patterns = conversion.layout_of_layer(layer).patterns
    divided = ("heads", "kv_heads") if splits_kv else ("heads",)
    is_width = layer.qk_norm is not None and layer.qk_norm.over == "width"
    if layer.output_norm is not None and layer.output_norm.over == "width":
        raise OptionError(
            saw=f"output_norm={layer.output_norm} of a layer whose heads are divided over ranks",
            needed="a norm of each head: this one needs the outputs of all heads on each rank",
            do="leave this layer whole, or use QKNorm(has_weight=False)",
        )
    for whole in filter(None, (layer.place_tables, layer.differential)):
        raise OptionError(
            saw=f"{whole} of a layer whose heads are divided over ranks",
            needed="scores of distances, queries and keys, and heads that are not paired",
            do="leave this layer whole",
        )
    for name, module in layer.named_modules():
        if name.startswith("score_bias") and not isinstance(layer.score_bias, T5BucketTable):
            continue
        is_whole = not _distribute_parameters(name, module, patterns, divided, part)
        width = layer.value_dim if name == "v_proj" else layer.head_dim
        rows = slice(part.kv_heads.start * width, part.kv_heads.stop * width)
        if name == "out_proj":
            _change_class(module, RankSummedOutputProjection, part=part)
        elif isinstance(module, nn.Linear):
            # The norm of a width needs the keys of all heads; it leaves out those of other ranks.
            # Latents have no heads.
            is_all = not is_whole or (is_width and name == "k_proj") or name in LATENTS
            _change_class(module, HeadsProjection, channels=None if is_all else rows)
        elif isinstance(module, Norm) and (not is_width or name == "o_norm"):  # of each head
            _change_class(module, HeadsNorm, channels=None)
        elif isinstance(module, Norm) and not is_whole:
            _change_class(module, WidthNormOverRanks, part=part, width=module.width)
        elif isinstance(module, Norm):
            _change_class(module, HeadsNorm, channels=rows)
        elif isinstance(module, nn.Embedding):
            _change_class(module, ReplicatedEmbedding)
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
    stored = layout("torch-separate" if layer.in_proj_weight is None else "torch-packed")
    for name, module in layer.named_modules():
        _distribute_parameters(name, module, stored.patterns, ("heads",), part)
    _change_class(layer.out_proj, RankSummedOutputProjection, part=part)
    layer.part = part


def _change_class(module: nn.Module, kind: type[nn.Module], **attributes: Any) -> None:
    module.__class__ = kind
    for name, value in attributes.items():
        setattr(module, name, value)


def _distribute_parameters(
    prefix: str,
    module: nn.Module,
    patterns: Mapping[str, Pattern],
    divided: tuple[str, ...],
    part: RankHeads,
) -> bool:
    """Make DTensors of the parameters that a module holds itself; return True if one is divided.

    A parameter is divided along the axis that its heads lead. Several projections in one parameter,
    and a table of distances, stay whole on each rank.
    """
    is_divided = False
    for name, parameter in list(module.named_parameters(recurse=False)):
        pattern = patterns[f"{prefix}.{name}" if prefix else name]
        led = None if "distances" in pattern.tensors else find_axis_led_by(pattern, divided)
        placement: Placement = Replicate()
        share: Tensor = parameter.detach()
        if led is not None and not led.each_block:
            placement, is_divided = Shard(led.dim), True
            share = share.chunk(part.mesh.size(), led.dim)[part.mesh.get_local_rank()]
        share = share.clone(memory_format=torch.contiguous_format)
        whole = DTensor.from_local(share, part.mesh, [placement], run_check=False)
        module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    return is_divided


# ---- the part of one rank -----------------------------------------------------------------------


class RankHeads(HeadPart):
    """The heads that this process computes; each rank of the mesh has as many."""

    def __init__(
        self, mesh: DeviceMesh, *, num_heads: int, num_kv_heads: int, check_inputs: agreement.Check
    ) -> None:
        each = num_heads // mesh.size()
        first = mesh.get_local_rank() * each
        heads = range(first, first + each)
        super().__init__(heads, num_heads=num_heads, num_kv_heads=num_kv_heads)
        self.mesh = mesh
        self.has_packed_weight = False  # True if in_proj_weight was cut into three
        self._check, self._has_compared = check_inputs, False

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    def check_inputs_and_sum_gradients(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs; their gradients are summed over ranks."""
        for name, tensor in inputs.items():
            if isinstance(tensor, DTensor):
                raise OptionError(
                    saw=f"{name} is a DTensor, for a layer whose heads are divided over ranks",
                    needed="the same plain tensor on every rank",
                    do=f"{name}.full_tensor(), or {name}.to_local() where it is replicated",
                )
        if self._check != "never" and all(map(may_read_values, inputs.values())):
            agreement.require_same_shapes_on_every_rank(inputs, self.mesh)
            if self._check == "always" or not self._has_compared:
                for name, tensor in inputs.items():
                    agreement.require_same_on_every_rank(name, tensor, self.mesh)
                self._has_compared = True
        summed = collectives.sum_backward(list(inputs.values()), group=self.group)
        return dict(zip(inputs, summed, strict=True))

    def own_share_of_parameter(self, parameter: Tensor) -> Tensor:
        return local_part(parameter)

    def weights_of_all_heads(self, weights: Tensor, *, average: bool) -> Tensor:
        """Return the mean over all heads, or the weights of all."""
        weights = super().weights_of_all_heads(weights, average=average)
        join = collectives.sum_forward if average else collectives.gather_heads_of_ranks
        return join(weights, group=self.group)


def local_part(parameter: P, *, heads_of_this_rank: bool = True) -> P:
    """Return what this rank holds of a parameter, as a plain tensor.

    With ``heads_of_this_rank`` it is used for these alone: where all ranks hold the whole, the
    gradient is then the sum over ranks.

    Raises:
        OptionError: a parameter that FSDP divides as well, and has not gathered for this call.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if parameter.device_mesh.ndim != 1:
        raise OptionError(
            saw=f"weights that are divided over a mesh {tuple(parameter.device_mesh.shape)}, "
            "outside of the forward pass for which FSDP gathers them",
            needed="weights that are divided by heads alone",
            do='register_fsdp_forward_method(layer, "matrix") for a call of layer.matrix',
        )
    (placement,) = parameter.placements
    is_summed = heads_of_this_rank and isinstance(placement, Replicate)
    return parameter.to_local(grad_placements=[Partial() if is_summed else placement])


# ---- modules -----------------------------------------------------------------------------------


class HeadsProjection(nn.Linear):
    """Projection to the channels of this rank's heads.

    Attributes:
        channels: those of its heads, where each rank holds the weights of all; else None.
    """

    channels: slice | None

    @property
    def computed_widths(self) -> tuple[int, int]:
        """The input width, and the number of channels that this rank computes."""
        rows = local_part(self.weight)[self.channels or slice(None)]
        return self.in_features, len(rows)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name for it)
        """Project (..., in_features) to this rank's share of out_features."""
        weight, bias = local_part(self.weight), local_part(self.bias)
        if self.channels is not None:
            weight = weight[self.channels]
            bias = None if bias is None else bias[self.channels]
        return apply_linear(input, weight, bias)


class RankSummedOutputProjection(nn.Linear):
    """Output projection: the sum over ranks of the products of their heads, then the bias."""

    part: RankHeads

    @property
    def computed_widths(self) -> tuple[int, int]:
        """The number of channels of this rank's heads, and the output width."""
        return local_part(self.weight).shape[1], self.out_features

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name for it)
        """Project this rank's share of in_features to the output of all heads."""
        product = apply_linear(input, local_part(self.weight), None)
        output = collectives.sum_forward(product, group=self.part.group)
        if self.bias is None:
            return output
        bias = local_part(self.bias, heads_of_this_rank=False)
        return (output + bias).to(output.dtype)


class HeadsNorm(Norm):
    """Norm of what this rank holds: of each head, or of a width that every rank computes.

    Attributes:
        channels: those of this rank's heads, where the norm is of all heads together; else None.
    """

    channels: slice | None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis; return the channels of this rank's heads."""
        normed = self.options.normalise(x, local_part(self.weight), local_part(self.bias))
        return normed if self.channels is None else normed[..., self.channels]


class WidthNormOverRanks(Norm):
    """Norm of the width of all heads, of which each rank has its own channels.

    The sums over channels are sums over ranks: one all-reduce in each direction, two for a norm
    with a mean.
    """

    part: RankHeads
    width: int

    def forward(self, x: Tensor) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        weight, bias = local_part(self.weight), local_part(self.bias)
        assert weight is not None
        wide, weight = x.to(exact), weight.to(exact)
        if self.options.one_plus:
            weight = 1.0 + weight
        if bias is not None:
            wide = wide - self._mean_over_ranks(wide)
        scale = torch.rsqrt(self._mean_over_ranks(wide.square()) + self.options.eps)
        normed = wide * scale * weight
        return (normed if bias is None else normed + bias.to(exact)).to(x.dtype)

    def _mean_over_ranks(self, x: Tensor) -> Tensor:
        total = x.sum(-1, keepdim=True)
        return collectives.sum_forward_and_backward(total, group=self.part.group) / self.width


class ReplicatedEmbedding(nn.Embedding):
    """Table that every rank holds, and reads for all heads."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name for it)
        return F.embedding(input, local_part(self.weight, heads_of_this_rank=False))


# ---- state dicts ---------------------------------------------------------------------------------

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
    for name, target in targets.items():
        if isinstance(target, DTensor):
            value, mesh = values[name], target.device_mesh
            for dim in mesh.mesh_dim_names or (None,):
                part = mesh if dim is None else mesh[dim]
                agreement.require_same_on_every_rank(name, value, part)
            value = value.detach().to(target.device, target.dtype)
            values[name] = distribute_tensor(value, mesh, target.placements, src_data_rank=None)
    model.load_state_dict(values)


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
