"""The self-attention of a running model, and which modules of a checkpoint it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.layouts.places import Module
from headwise.matrix import AttentionMatrix
from headwise.reference import share_heads
from headwise.scanning.captured_call import CapturedCall
from headwise.scanning.reaching import reached
from headwise.support.modes import evaluating


@dataclass(frozen=True, eq=False)
class Seen:
    """The first attention call of one module of a model.

    Attributes:
        module: which.
        name: of it in the model.
        x: what it was given.
        scores: (batch, heads, queries, keys): scale * q.k in float64, before masks and softcaps.
        values: what is attended to, in float64.
        out_proj: each head's part of the output projection; None where it was not found.
        is_capped: whether the scores have a softcap.
    """

    module: nn.Module
    name: str
    x: Tensor
    scores: Tensor
    values: Tensor
    out_proj: Tensor | None
    is_capped: bool

    @property
    def is_of_sequences(self) -> bool:
        """Whether it was given the (batch, length, embed_dim) that attends to itself.

        Layers that cut pictures into windows, or join sequences, are given something else.
        """
        batch, _, queries, keys = self.scores.shape
        return self.x.dim() == 3 and self.x.shape[:2] == (batch, queries) and queries == keys


def seen_in(model: nn.Module, inputs: Mapping[str, Any]) -> list[Seen]:
    """The modules of a model that attend to what they are given, in the order in which they run."""
    found: dict[nn.Module, Seen] = {}

    def settled(call: CapturedCall) -> None:
        if call.module is None or call.is_cross or call.module in found:
            return
        if call.state is None or call.values is None:
            return
        found[call.module] = Seen(
            module=call.module,
            name=call.layer,
            x=call.state,
            scores=scores_of(call.matrix),
            values=call.values.double(),
            out_proj=call.out_proj,
            is_capped=call.matrix.softcap is not None,
        )

    with torch.no_grad(), evaluating(model), reached(model, settled=settled) as reach:
        reach.begin()
        model(**inputs)
    return list(found.values())


def scores_of(matrix: AttentionMatrix) -> Tensor:
    """scale * q.k in float64."""
    q, k = matrix.q.double(), matrix.k.double()
    return matrix.scale * q @ share_heads(k, heads=q.shape[1]).mT


def paired(
    modules: Iterable[Module], seen: Iterable[Seen], state: Mapping[str, Tensor]
) -> list[tuple[Module, Seen]]:
    """The modules of a checkpoint with those of the model that hold the same matrices.

    Where none does, the weights are others or in another layout: then the names tell, and else the
    order, if there are as many of both. What attends to something else has no pair, and neither
    have the parts of a model that did not run.

    Args:
        modules: of the checkpoint.
        seen: the self-attention of the model.
        state: the tensors of the checkpoint.
    """
    left, waiting, pairs = list(seen), [], []
    for module in modules:
        own = _that_holds([state[name] for name in module.tensors], left)
        if own is None:
            waiting.append(module)
        else:
            left.remove(own)
            pairs.append((module, own))
    for module in list(waiting):
        own = next((one for one in left if _is_named(one, module)), None)
        if own is not None:
            left.remove(own)
            waiting.remove(module)
            pairs.append((module, own))
    if not pairs and len(waiting) == len(left):
        return list(zip(waiting, left, strict=True))
    return pairs


def _that_holds(tensors: Iterable[Tensor], among: Iterable[Seen]) -> Seen | None:
    """The one that shares most matrices with these tensors: some may be the same everywhere."""
    matrices = [x for x in tensors if x.dim() > 1]
    shared = {one: _shared(matrices, one.module) for one in among}
    most = max(shared.values(), default=0)
    return next((one for one, count in shared.items() if count == most), None) if most else None


def _shared(matrices: Iterable[Tensor], module: nn.Module) -> int:
    own = list(module.parameters())
    return sum(any(_is_equal(x, parameter) for parameter in own) for x in matrices)


def _is_equal(x: Tensor, parameter: Tensor) -> bool:
    if x.shape != parameter.shape:
        return False
    # Most differ in the first row; the whole of a large file is read once only.
    return torch.equal(x[0].to(parameter.dtype), parameter[0]) and torch.equal(
        x.to(parameter.dtype), parameter
    )


def _is_named(seen: Seen, module: Module) -> bool:
    """Whether one's name is within the other's: a base model's lack what stands in front."""
    one, other = f".{seen.name}.", "." + module.prefix.rstrip("./") + "."
    return module.prefix != "" and (one in other or other in one)
