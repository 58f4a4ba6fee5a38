"""`Heads`, a parallel style of torch for attention layers, and the plan of a model."""

from __future__ import annotations

from typing import Literal, get_args

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from headwise.errors import OptionError
from headwise.layers.attention import Attention
from headwise.layers.torch_api.layer import MultiheadAttention
from headwise.sharding.agreement import CHECKS, Check, require_mesh
from headwise.sharding.heads.checks import (
    check_equal_weights,
    check_heads_divide,
    check_layer_modules,
    check_no_tied_weights,
)
from headwise.sharding.heads.divide import divide_attention, divide_multihead_attention
from headwise.sharding.heads.part import RankHeads
from headwise.support.text import describe_value

KV = Literal["split", "replicate"]
InProj = Literal["whole", "separate"]
_CHOICES = {"kv": get_args(KV), "in_proj": get_args(InProj), "check_inputs": CHECKS}


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
        require_mesh(device_mesh, "Heads()")
        for layer in self._layers or (module,):
            if getattr(layer, "part", None) is None or layer is module:
                check_layer_modules(layer)
                check_heads_divide(layer, device_mesh.size(), kv=self.kv)
        check_equal_weights(module, device_mesh)
        if isinstance(module, Attention):
            part = self._make_rank_heads(module, module.num_kv_heads, device_mesh)
            divide_attention(module, part=part, splits_kv=self.kv == "split")
        elif isinstance(module, MultiheadAttention):
            part = self._make_rank_heads(module, module.num_heads, device_mesh)
            divide_multihead_attention(module, part=part, splits_packed=self.in_proj == "separate")
        return module

    def _make_rank_heads(
        self, layer: Attention | MultiheadAttention, kv_heads: int, mesh: DeviceMesh
    ) -> RankHeads:
        return RankHeads(
            mesh,
            num_heads=layer.num_heads,
            num_kv_heads=kv_heads,
            check_inputs=self.check_inputs,
        )

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
    check_no_tied_weights(model, layers)
    style = Heads(kv, in_proj=in_proj, check_inputs=check_inputs)
    style._layers = tuple(layers.values())
    return dict.fromkeys(layers, style)
