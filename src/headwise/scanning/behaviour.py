"""Which layout a checkpoint is in, decided by a model that runs with the same weights.

What the model computes is watched, layer by layer: its scores, its values, and each head's part of
the output projection. A layout is the right one if a layer made with it, from the model's own
inputs, computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.budget import Budget
from headwise.errors import HeadwiseError, OptionError
from headwise.functional import share_heads, split_heads
from headwise.layer.attention import Attention
from headwise.layer.of_config import in_layer, options_of
from headwise.layouts.detect import Candidate, Detection, decided
from headwise.layouts.function import Function
from headwise.layouts.layout import Layout
from headwise.layouts.sizes import Sizes
from headwise.matrix import AttentionMatrix
from headwise.scanning.calls import LayerCall
from headwise.scanning.reaching import reached
from headwise.scanning.running import evaluating


@dataclass(frozen=True, eq=False)
class Seen:
    """One attention call.

    Attributes:
        x: what its module was given.
        scores: scale * q.k in float64, before masks and softcaps.
        values: what is attended to, in float64.
        out_proj: each head's part of the output projection; None where it was not found.
        is_capped: whether the scores have a softcap.
    """

    x: Tensor
    scores: Tensor
    values: Tensor
    out_proj: Tensor | None
    is_capped: bool


def by_behaviour(
    detection: Detection,
    state: Mapping[str, Tensor],
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    config: Mapping[str, Any],
) -> Detection:
    """The candidates whose layers compute what the model's do.

    Args:
        detection: by names and shapes.
        state: the tensors of the checkpoint.
        model: with the same weights.
        inputs: what it is called with; at least some tens of tokens.
        config: of the model: the numbers of rotations and norms.

    Raises:
        OptionError: no attention of the model was seen, or the config says of its rotation what
            has no counterpart here.
    """
    seen = _seen(model, inputs)
    kept, refuted = [], dict(detection.refuted)
    for group in detection.candidates:
        reasons = {
            number: _disagreement(group[0], sizes, state, seen, config)
            for number, sizes in enumerate(group[0].fits)
        }
        found = [group[0].fits[number] for number, why in reasons.items() if why is None]
        if found:
            kept.append(tuple(one.narrowed(found[0]) for one in group))
        else:
            refuted |= {one.layout.name: str(reasons[0]) for one in group}
    return decided(kept, refuted)


def _seen(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Seen]:
    given: dict[nn.Module, Tensor] = {}
    found: list[Seen] = []

    def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        state = next((x for x in states if x.is_floating_point()), None)
        if state is not None:
            given[module] = state

    def settled(call: LayerCall) -> None:
        if call.module is None or call.is_cross:
            return
        x = given[call.module]
        found.append(
            Seen(
                x,
                _scores(call.matrix),
                call.values.double(),
                call.out_proj,
                call.matrix.softcap is not None,
            )
        )

    handles = [m.register_forward_pre_hook(remember, with_kwargs=True) for m in model.modules()]
    try:
        with (
            torch.no_grad(),
            evaluating(model),
            reached(model, lambda _: None, settled=settled) as reach,
        ):
            reach.begin()
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        raise OptionError(
            saw="a model in which no self-attention was seen",
            needed="one that headwise scan can look into",
            do="compare values instead: --reference, the same weights in a layout that is known",
        )
    return found


def _disagreement(
    candidate: Candidate,
    sizes: Sizes,
    state: Mapping[str, Tensor],
    seen: list[Seen],
    config: Mapping[str, Any],
) -> str | None:
    """What the first layer that differs differs in; None where all of them agree."""
    modules = [module for module in candidate.modules if module.place.role != "cross"]
    if len(modules) != len(seen):
        return f"it has {len(modules)} modules, the model {len(seen)} layers of self-attention"
    for module, layer_seen in zip(modules, seen, strict=True):
        layout = _asked(candidate.layout, config, module.layer)
        options = options_of(config, layout.function, layer=module.layer)
        stored = {local: state[name].double() for name, local in module.tensors.items()}
        try:
            layer = _layer(layout, sizes, stored, options)
        except HeadwiseError as error:
            return f"no layer can be made: {error.saw}"
        part = _part(layer, candidate.layout.function, layer_seen)
        if part is not None:
            return f"{module.prefix}: {part} are others than the model's"
    return None


def _asked(layout: Layout, config: Mapping[str, Any], number: int) -> Layout:
    """The layout as one layer has it, less what is done to scores that are there."""
    layout = in_layer(layout, config, number)
    bare = replace(layout.function, score_bias="none", softcap="none", window="none", clip="none")
    return replace(layout, function=bare)


def _layer(
    layout: Layout, sizes: Sizes, stored: Mapping[str, Tensor], options: Mapping[str, Any]
) -> Attention:
    return Attention.from_layout(
        stored,
        layout=layout,
        num_heads=sizes["heads"],
        num_kv_heads=sizes.get("kv_heads"),
        **options,
    )


@torch.no_grad()
def _part(layer: Attention, said: Function, seen: Seen) -> str | None:
    """Which part of a layer differs by more than rounding in the model's own dtype."""
    if said.softcap is not None and (said.softcap != "none") != seen.is_capped:
        return "softcaps"
    if seen.out_proj is not None:
        heads = layer.out_proj.weight.mT.unflatten(0, (layer.num_heads, layer.value_dim))
        if not torch.equal(heads.to(seen.out_proj.dtype), seen.out_proj):
            return "output projections"
    # transformers rotates and normalises in float32, also where all else is float64.
    x = seen.x.float() if seen.x.dtype == torch.float64 else seen.x
    rounded = deepcopy(layer).to(x.dtype)

    def in_dtype_of(x: Tensor) -> Attention:
        return layer if x.dtype == torch.float64 else rounded

    def scores(x: Tensor) -> Tensor:
        return _scores(in_dtype_of(x).matrix(x))

    def values(x: Tensor) -> Tensor:
        found = split_heads(in_dtype_of(x).v_proj(x), heads=layer.num_kv_heads)
        return share_heads(found, heads=seen.values.shape[1])  # some models repeat theirs first

    for ours, theirs in ((scores, seen.scores), (values, seen.values)):
        budget = Budget.of(ours, x)
        if budget.exact.shape != theirs.shape or not budget.check(theirs):
            return ours.__name__
    return None


def _scores(matrix: AttentionMatrix) -> Tensor:
    q, k = matrix.q.double(), matrix.k.double()
    return matrix.scale * q @ share_heads(k, heads=q.shape[1]).mT
