"""Which layout a checkpoint is in, decided by a model that runs with the same weights.

What the model computes is watched, layer by layer: its scores, its values, and each head's part of
the output projection. A layout is the right one if a layer made with it, from the model's own
inputs, computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, OptionError
from headwise.layer.attention import Attention
from headwise.layer.of_config import options_of
from headwise.layouts.detect import Candidate, Detection, decided
from headwise.layouts.layout import Layout
from headwise.layouts.sizes import Sizes
from headwise.scanning.calls import LayerCall
from headwise.scanning.reaching import reached
from headwise.scanning.running import evaluating


@dataclass(frozen=True, eq=False)
class Seen:
    """One attention call, in float64.

    Attributes:
        x: what its module was given.
        scores: scale * q.k, before masks.
        values: what is attended to.
        out_proj: each head's part of the output projection; None where it was not found.
        unit: the unit roundoff of what the model computed in.
    """

    x: Tensor
    scores: Tensor
    values: Tensor
    out_proj: Tensor | None
    unit: float


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
        OptionError: no attention of the model was seen, or not in as many layers.
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
                x.double(),
                _scores(call.matrix.q, call.matrix.k, call.matrix.scale),
                call.values.double(),
                None if call.out_proj is None else call.out_proj.double(),
                torch.finfo(x.dtype).eps,
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


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    q, k = q.double(), k.double()
    return scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT


def _disagreement(
    candidate: Candidate,
    sizes: Sizes,
    state: Mapping[str, Tensor],
    seen: list[Seen],
    config: Mapping[str, Any],
) -> str | None:
    """What the first layer that differs differs in; None where all of them agree."""
    if len(candidate.modules) != len(seen):
        return f"it has {len(candidate.modules)} modules, the model {len(seen)} layers"
    for module, layer_seen in zip(candidate.modules, seen, strict=True):
        stored = {local: state[name] for name, local in module.tensors.items()}
        try:
            layer = _layer(candidate.layout, sizes, stored, config)
        except HeadwiseError as error:
            return f"no layer can be made: {error.saw}"
        part = _part(layer, layer_seen)
        if part is not None:
            return f"{module.prefix}: {part} are others than the model's"
    return None


def _layer(
    layout: Layout, sizes: Sizes, stored: Mapping[str, Tensor], config: Mapping[str, Any]
) -> Attention:
    return Attention.from_layout(
        {name: x.double() for name, x in stored.items()},
        layout=layout,
        num_heads=sizes["heads"],
        num_kv_heads=sizes.get("kv_heads"),
        **options_of(config, layout.function),
    )


@torch.no_grad()
def _part(layer: Attention, seen: Seen) -> str | None:
    """Which part of a layer differs by more than rounding in the model's own dtype."""
    matrix = layer.matrix(seen.x)
    scores = _scores(matrix.q, matrix.k, matrix.scale)
    values = layer.v_proj(seen.x).unflatten(-1, (layer.num_kv_heads, -1)).transpose(1, 2)
    pairs = {"scores": (scores, seen.scores), "values": (values, seen.values)}
    if seen.out_proj is not None:
        heads = layer.out_proj.weight.mT.unflatten(0, (layer.num_heads, layer.value_dim))
        pairs["output projections"] = (heads, seen.out_proj)
    terms = layer.embed_dim + layer.head_dim
    for name, (ours, theirs) in pairs.items():
        if ours.shape != theirs.shape:
            return name
        # Sums of `terms` products of numbers as large as the largest: n u of the largest result.
        if float((ours - theirs).abs().max()) > 4 * terms * seen.unit * float(theirs.abs().max()):
            return name
    return None
