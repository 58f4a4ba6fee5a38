"""`upgrade`: every torch.nn.MultiheadAttention of a model becomes the drop-in, in place.

A layer is swapped by giving it another class. So it stays the very object it was, with its
parameters, hooks, flags and parametrizations, and whoever holds a reference to it (an optimizer, a
wrapper, another module) holds the new layer. The drop-in adds no state, which makes this safe.

torch's encoder layers do not call their attention in eval under no_grad: a fused path reads its
weights. Where a layer was swapped, those paths are switched off by plain attributes, which survive
deepcopy and pickle.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from headwise.layers.torch_api.change import Change, LayerChange, largest_difference, measure, run
from headwise.layers.torch_api.layer import MultiheadAttention

SHOWN = 4


@dataclass(frozen=True)
class Upgrade:
    """What `upgrade` did; print it.

    Attributes:
        swapped: the names of the layers that were swapped; "" is the model itself.
        kept: the names of the attention layers that were not, and why.
        switched_off: the modules whose fused path was switched off, and by which attribute.
        change: the measured change of the output.
    """

    swapped: tuple[str, ...]
    kept: dict[str, str]
    switched_off: dict[str, str]
    change: Change

    def __str__(self) -> str:
        head = f"Upgrade: {_count(len(self.swapped), 'layer')} swapped, {len(self.kept)} kept"
        if not self.swapped and not self.kept:
            return (
                f"{head}\n  There is no torch.nn.MultiheadAttention in it; others are not touched."
            )
        parts = {
            "swapped": [_shown(name) for name in self.swapped],
            "kept": [f"{_shown(name)}: {reason}" for name, reason in self.kept.items()],
            "switched off": [f"{_shown(name)}: {a}" for name, a in self.switched_off.items()],
            "change": str(self.change).splitlines() if self.swapped else [],
        }
        if any(a.startswith("use_nested_tensor") for a in self.switched_off.values()):
            parts["change"].append(
                "padded positions are computed now; torch's nested path returned zeros there"
            )
        return "\n".join([head, *(line for label in parts for line in _lines(label, parts[label]))])

    __repr__ = __str__


def upgrade(model: nn.Module, *inputs: Any, **options: Any) -> Upgrade:
    """Swap every torch.nn.MultiheadAttention of ``model`` for `MultiheadAttention`, in place.

    The change of the output is measured for each layer alone, on a seeded random input of its own
    width, in eval mode under no_grad. With example ``inputs`` (and ``options``) the model itself is
    run before and after as well. Modes and random state are put back; hooks see these runs.

    Subclasses of torch's layer are kept: what they add would be lost. So are layers whose
    ``forward`` was replaced on the instance.

    Raises:
        what the model raises on the example inputs; the model is then as it was before.
    """
    before = run(model, inputs, options) if inputs or options else None
    names, kept = _find(model)
    layers: dict[str, LayerChange] = {}
    with ExitStack() as undo:
        for layer, (name, *_) in names.items():
            undo.callback(setattr, layer, "__class__", layer.__class__)
            layer.__class__ = _class_for(layer)
            layers[name] = measure(layer)
        switched_off = dict(_switch_off(model, undo))
        after = None if before is None else run(model, inputs, options)
        undo.pop_all()  # nothing failed: it stays
    output = None if before is None or after is None else largest_difference(before, after)
    swapped = tuple(name for group in names.values() for name in group)
    return Upgrade(swapped, kept, switched_off, Change(layers, output))


def _find(model: nn.Module) -> tuple[dict[nn.MultiheadAttention, list[str]], dict[str, str]]:
    """The layers to swap, each with all its names, and those to keep with the reason."""
    names: dict[nn.MultiheadAttention, list[str]] = {}
    kept: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, torch.jit.ScriptModule):
            if getattr(module, "original_name", "") == "MultiheadAttention":
                kept[name] = "scripted: its code is compiled into it"
        elif isinstance(module, nn.MultiheadAttention):
            reason = _reason_to_keep(module)
            if reason:
                kept[name] = reason
            else:
                names.setdefault(module, []).append(name)
    return names, kept


def _reason_to_keep(module: nn.MultiheadAttention) -> str | None:
    if isinstance(module, MultiheadAttention):
        return "already headwise's"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    kind = _own_class(module)
    if kind is not nn.MultiheadAttention:
        return f"{kind.__module__}.{kind.__qualname__} is a subclass: what it adds would be lost"
    return None


def _own_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, without the one that parametrize puts over it."""
    kind = type(module)
    return kind.__bases__[0] if is_parametrized(module) else kind


def _class_for(layer: nn.MultiheadAttention) -> type[MultiheadAttention]:
    if not is_parametrized(layer):
        return MultiheadAttention
    # parametrize keeps its properties on a class made for this one module: put it over ours.
    own = {k: v for k, v in vars(type(layer)).items() if k not in ("__dict__", "__weakref__")}
    return type(type(layer).__name__, (MultiheadAttention,), own)


def _switch_off(model: nn.Module, undo: ExitStack) -> Iterator[tuple[str, str]]:
    """Turn off the fused paths that would read the weights of a swapped layer."""
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            attribute, off, inner = "activation_relu_or_gelu", 0, [module]
        elif isinstance(module, nn.TransformerEncoder):
            attribute, off, inner = "use_nested_tensor", False, list(module.layers)
        else:
            continue
        ours = any(isinstance(getattr(x, "self_attn", None), MultiheadAttention) for x in inner)
        if ours and getattr(module, attribute, off) != off:
            undo.callback(setattr, module, attribute, getattr(module, attribute))
            setattr(module, attribute, off)
            yield name, f"{attribute} = {off}"


def _shown(name: str) -> str:
    return name or "(the model itself)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _lines(label: str, entries: list[str]) -> list[str]:
    more = len(entries) - SHOWN
    shown = entries if more <= 1 else [*entries[:SHOWN], f"... and {more} more"]
    labels = [label, *[""] * len(shown)]
    return [f"  {label:<13}{entry}" for label, entry in zip(labels, shown, strict=False)]
