"""Cutting of a layer: its parameters become DTensors, its modules compute with their shares."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from headwise.layers import conversion, distance
from headwise.layers.attention import Attention
from headwise.layers.norm import Norm
from headwise.layers.torch_api.layer import PACKED, SEPARATE, MultiheadAttention
from headwise.layouts.pattern import find_axis_led_by
from headwise.sharding.heads import part as ranks
from headwise.sharding.heads.part import RankHeads


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
    if isinstance(layer.score_bias, distance.T5BucketTable):
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
    """Give a module its class over ranks, with these attributes, and its parameters placements."""
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
    """Return the channels of the kv heads that a rank uses."""
    return slice(part.kv_heads.start * width, part.kv_heads.stop * width)


def _distribute_parameter(
    module: nn.Module, name: str, placement: Placement, part: RankHeads
) -> None:
    """Replace a parameter, where the module has it, by a DTensor of which each rank has a share."""
    parameter = getattr(module, name, None)
    if parameter is None:
        return
    share: Tensor = parameter.detach()
    if isinstance(placement, Shard):
        share = share.chunk(part.mesh.size(), placement.dim)[part.mesh.get_local_rank()]
    share = share.clone(memory_format=torch.contiguous_format)
    whole = DTensor.from_local(share, part.mesh, [placement], run_check=False)
    module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
