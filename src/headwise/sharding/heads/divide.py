"""Cutting of a layer: its parameters become DTensors, its modules compute with their shares."""

from __future__ import annotations

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
            _divide_head_projection(projection, part)
        else:
            width = getattr(layer, pattern.axes[0].before[1])
            is_width = layer.qk_norm is not None and layer.qk_norm.over == "width"
            # The norm of a width needs the keys of all heads; it leaves out those of other ranks.
            channels = None if is_width and name == "k_proj" else _kv_channels_of_rank(part, width)
            _replicate_on_ranks(projection, channels, part)
    if layer.qk_norm is not None:
        _divide_norms(layer, part, splits_kv=splits_kv)
    if layer.sink is not None:
        _distribute_parameter(layer, "sink", Shard(0), part)
    if isinstance(layer.score_bias, distance.T5BucketTable):
        table = layer.score_bias.relative_attention_bias
        table.__class__ = ranks.ReplicatedEmbedding
        _distribute_parameter(table, "weight", Replicate(), part)
    layer.part = part


def divide_multihead_attention(
    layer: MultiheadAttention, *, part: RankHeads, splits_packed: bool
) -> None:
    """Divide the heads of a drop-in; ``splits_packed`` also divides a packed weight."""
    if splits_packed and layer.in_proj_weight is not None:
        _unpack_in_proj_weight(layer)
        part.has_packed_weight = True
    placements: dict[str, Placement] = dict.fromkeys(SEPARATE, Shard(0))
    placements |= {"in_proj_weight": Replicate(), "in_proj_bias": Replicate()}
    placements |= {"bias_k": Shard(2), "bias_v": Shard(2)}
    for name, placement in placements.items():
        _distribute_parameter(layer, name, placement, part)
    _divide_output_projection(layer.out_proj, part)
    layer.part = part


def _unpack_in_proj_weight(layer: MultiheadAttention) -> None:
    """Replace the packed weight of queries, keys and values by three weights."""
    packed = layer.in_proj_weight
    layer.register_parameter(PACKED, None)
    layer._qkv_same_embed_dim = False
    for name, weight in zip(SEPARATE, packed.detach().chunk(3), strict=True):
        layer.register_parameter(name, nn.Parameter(weight, packed.requires_grad))


def _divide_head_projection(projection: nn.Linear, part: RankHeads) -> None:
    projection.__class__ = ranks.HeadsProjection
    projection.channels = None  # type: ignore[assignment]
    _distribute_parameter(projection, "weight", Shard(0), part)
    _distribute_parameter(projection, "bias", Shard(0), part)


def _replicate_on_ranks(module: nn.Linear | Norm, channels: slice | None, part: RankHeads) -> None:
    """Let every rank hold the whole, and use these channels of the result."""
    module.__class__ = ranks.HeadsNorm if isinstance(module, Norm) else ranks.HeadsProjection
    module.channels = channels  # type: ignore[assignment]
    _distribute_parameter(module, "weight", Replicate(), part)
    _distribute_parameter(module, "bias", Replicate(), part)


def _divide_output_projection(projection: nn.Linear, part: RankHeads) -> None:
    projection.__class__ = ranks.RankSummedOutputProjection
    projection.part = part  # type: ignore[assignment]
    _distribute_parameter(projection, "weight", Shard(1), part)
    _distribute_parameter(projection, "bias", Replicate(), part)


def _divide_norms(layer: Attention, part: RankHeads, *, splits_kv: bool) -> None:
    q_norm, k_norm = layer.q_norm, layer.k_norm
    assert isinstance(q_norm, Norm)
    assert isinstance(k_norm, Norm)
    if q_norm.options.over == "head":
        _replicate_on_ranks(q_norm, None, part)
        _replicate_on_ranks(k_norm, None, part)
        return
    _divide_width_norm(q_norm, part)
    if splits_kv:
        _divide_width_norm(k_norm, part)
    else:
        _replicate_on_ranks(k_norm, _kv_channels_of_rank(part, layer.head_dim), part)


def _divide_width_norm(norm: Norm, part: RankHeads) -> None:
    width = len(norm.weight)
    norm.__class__ = ranks.WidthNormOverRanks
    norm.part, norm.width = part, width  # type: ignore[assignment]
    _distribute_parameter(norm, "weight", Shard(0), part)
    _distribute_parameter(norm, "bias", Shard(0), part)


def _kv_channels_of_rank(part: RankHeads, width: int) -> slice:
    """Return the channels of the kv heads that a rank uses."""
    return slice(part.kv_heads.start * width, part.kv_heads.stop * width)


def _distribute_parameter(
    module: nn.Module, name: str, placement: Placement, part: RankHeads
) -> None:
    """Replace a parameter, where the module has it, by a DTensor of which each rank has a share."""
    parameter = getattr(module, name)
    if parameter is None:
        return
    share: Tensor = parameter.detach()
    if isinstance(placement, Shard):
        share = share.chunk(part.mesh.size(), placement.dim)[part.mesh.get_local_rank()]
    share = share.clone(memory_format=torch.contiguous_format)
    whole = DTensor.from_local(share, part.mesh, [placement], run_check=False)
    module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
