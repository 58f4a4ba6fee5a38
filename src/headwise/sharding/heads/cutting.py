"""Cutting of a layer: its parameters become DTensors, its modules compute with their shares."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from headwise.layers.native.attention import Attention
from headwise.layers.native.qk_norm import Norm
from headwise.layers.positions.distance_bias import T5BucketTable
from headwise.layers.torch_api.layer import MultiheadAttention
from headwise.layers.torch_api.state_dict_forms import PACKED, SEPARATE
from headwise.sharding.heads.modules import (
    HeadsNorm,
    HeadsProjection,
    SharedEmbedding,
    SumProjection,
    WidthNorm,
)
from headwise.sharding.heads.rank_heads import RankHeads


def cut_attention(layer: Attention, *, part: RankHeads, splits_kv: bool) -> None:
    """Divide the heads of a layer, its kv heads too if ``splits_kv``."""
    _cut_heads(layer.q_proj, part)
    if splits_kv:
        _cut_heads(layer.k_proj, part)
        _cut_heads(layer.v_proj, part)
    else:
        is_width = layer.qk_norm is not None and layer.qk_norm.over == "width"
        # The norm of a width needs the keys of all heads; it leaves out those of other ranks.
        _replicate(layer.k_proj, None if is_width else _channels(part, layer.head_dim), part)
        _replicate(layer.v_proj, _channels(part, layer.value_dim), part)
    _cut_output(layer.out_proj, part)
    if layer.qk_norm is not None:
        _cut_norms(layer, part, splits_kv=splits_kv)
    if layer.sink is not None:
        _distribute(layer, "sink", Shard(0), part)
    if isinstance(layer.score_bias, T5BucketTable):
        table = layer.score_bias.relative_attention_bias
        table.__class__ = SharedEmbedding
        _distribute(table, "weight", Replicate(), part)
    layer.part = part


def cut_multihead(layer: MultiheadAttention, *, part: RankHeads, splits_packed: bool) -> None:
    """Divide the heads of a drop-in; ``splits_packed`` also divides a packed weight."""
    if splits_packed and layer.in_proj_weight is not None:
        _unpack(layer)
        part.has_packed_weight = True
    placements: dict[str, Placement] = dict.fromkeys(SEPARATE, Shard(0))
    placements |= {"in_proj_weight": Replicate(), "in_proj_bias": Replicate()}
    placements |= {"bias_k": Shard(2), "bias_v": Shard(2)}
    for name, placement in placements.items():
        _distribute(layer, name, placement, part)
    _cut_output(layer.out_proj, part)
    layer.part = part


def _unpack(layer: MultiheadAttention) -> None:
    """Replace the packed weight of queries, keys and values by three weights."""
    packed = layer.in_proj_weight
    layer.register_parameter(PACKED, None)
    layer._qkv_same_embed_dim = False
    for name, weight in zip(SEPARATE, packed.detach().chunk(3), strict=True):
        layer.register_parameter(name, nn.Parameter(weight, packed.requires_grad))


def _cut_heads(projection: nn.Linear, part: RankHeads) -> None:
    projection.__class__ = HeadsProjection
    projection.channels = None  # type: ignore[assignment]
    _distribute(projection, "weight", Shard(0), part)
    _distribute(projection, "bias", Shard(0), part)


def _replicate(module: nn.Linear | Norm, channels: slice | None, part: RankHeads) -> None:
    """Let every rank hold the whole, and use these channels of the result."""
    module.__class__ = HeadsNorm if isinstance(module, Norm) else HeadsProjection
    module.channels = channels  # type: ignore[assignment]
    _distribute(module, "weight", Replicate(), part)
    _distribute(module, "bias", Replicate(), part)


def _cut_output(projection: nn.Linear, part: RankHeads) -> None:
    projection.__class__ = SumProjection
    projection.part = part  # type: ignore[assignment]
    _distribute(projection, "weight", Shard(1), part)
    _distribute(projection, "bias", Replicate(), part)


def _cut_norms(layer: Attention, part: RankHeads, *, splits_kv: bool) -> None:
    q_norm, k_norm = layer.q_norm, layer.k_norm
    assert isinstance(q_norm, Norm)
    assert isinstance(k_norm, Norm)
    if q_norm.options.over == "head":
        _replicate(q_norm, None, part)
        _replicate(k_norm, None, part)
        return
    _cut_width(q_norm, part)
    if splits_kv:
        _cut_width(k_norm, part)
    else:
        _replicate(k_norm, _channels(part, layer.head_dim), part)


def _cut_width(norm: Norm, part: RankHeads) -> None:
    width = len(norm.weight)
    norm.__class__ = WidthNorm
    norm.part, norm.width = part, width  # type: ignore[assignment]
    _distribute(norm, "weight", Shard(0), part)
    _distribute(norm, "bias", Shard(0), part)


def _channels(part: RankHeads, width: int) -> slice:
    """Return the channels of the kv heads that a rank uses."""
    return slice(part.kv_heads.start * width, part.kv_heads.stop * width)


def _distribute(module: nn.Module, name: str, placement: Placement, part: RankHeads) -> None:
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
