"""Cuts at full size: heads that a cut takes out stay, and give nothing."""

from __future__ import annotations

from headwise.errors import OptionError
from headwise.surgery.cut import Cut, LayerCut
from headwise.surgery.steps import Basis, Merge, Refit, Shift, Step, Take, Zero


def full_size(cut: Cut) -> Cut:
    """Return the cut of the same function that leaves every layer its numbers of heads.

    Heads that are taken out become zero; merged kv heads become equal copies. The outputs are those
    of the given cut up to rounding.

    Raises:
        OptionError: a merge or another basis after heads were taken out, or more kv heads than
            before.
    """
    return Cut({name: _full_layer(layer) for name, layer in cut})


def _full_layer(cut: LayerCut) -> LayerCut:
    full = LayerCut(cut.num_heads, cut.num_kv_heads)
    at = [*range(cut.num_heads)]  # head of the cut layer -> head of the full one
    for step in cut.steps:
        full, at = _add_step(full, at, step)
    left = len(full.origins.kv)
    if left > cut.num_kv_heads:
        raise _no_full_size(f"{left} kv heads, where the model has {cut.num_kv_heads}")
    return full if left == cut.num_kv_heads else full.expand(cut.num_kv_heads)


def _add_step(full: LayerCut, at: list[int], step: Step) -> tuple[LayerCut, list[int]]:
    is_whole = at == [*range(full.num_heads)]
    if isinstance(step, Take) and not (is_whole and len(step.heads) == step.total):
        # Origins keep their kv heads, so that copies of these change nothing.
        gone = [at[head] for head in step.gone]
        return full.zero(gone) if gone else full, [at[head] for head in step.heads]
    if isinstance(step, Zero):
        return full.zero([at[head] for head in step.heads]), at
    if isinstance(step, Refit):
        wo = step.wo.new_zeros(full.num_heads, *step.wo.shape[1:])
        wo[at] = step.wo
        return full.refit(wo, step.bo), at
    if isinstance(step, Merge | Basis) and not is_whole:
        raise _no_full_size(f"a {step.kind} after heads were taken out")
    assert isinstance(step, Take | Merge | Basis | Shift)
    return full.then(step), at


def _no_full_size(saw: str) -> OptionError:
    return OptionError(
        saw=saw,
        needed="a cut that a layer of its original size can hold",
        do="take heads out in the last step, or write a smaller model",
    )
