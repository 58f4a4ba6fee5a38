"""`upgrade`: every torch.nn.MultiheadAttention of a model becomes the drop-in, in place.

A layer is swapped by giving it another class. So it stays the very object it was, with its
parameters, hooks, flags and parametrizations, and whoever holds a reference to it (an optimizer, a
wrapper, another module) holds the new layer. The drop-in adds no state, which makes this safe.

torch's encoder layers do not call their attention in eval under no_grad: a fused path reads its
weights. Where a layer was swapped, those paths are switched off by plain attributes, which survive
deepcopy and pickle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import multi_head_attention_forward
from torch.nn.utils.parametrize import is_parametrized

from headwise.error_budget.budget import Budget, BudgetVerdict
from headwise.layers.torch_api.layer import MultiheadAttention
from headwise.support.module_modes import evaluating
from headwise.support.nested_tensors import leaves

SHOWN = 4  # entries of a list in print
BATCH, LENGTH, SEED = 3, 17, 0  # of the input on which a layer is measured


@dataclass(frozen=True)
class OutputDifference:
    """The largest absolute difference between two runs, where both are finite.

    Attributes:
        largest: infinite where a value was finite and is not any more.
        scale: the largest absolute value before.
        mended: how many values were NaN or infinite before and are finite now.
    """

    largest: float
    scale: float
    mended: int

    def __str__(self) -> str:
        text = f"{self.largest:.2g} at most, of values up to {self.scale:.2g}"
        return f"{text}; {self.mended} that were not finite are now" if self.mended else text


@dataclass(frozen=True)
class LayerChange:
    """One layer alone, on a seeded random input.

    Attributes:
        difference: None where nothing can be computed: on the meta device, with parameters of
            several dtypes, or with an ``out_proj`` that has no weight for torch's forward.
        verdict: the new output against the float64 reference; None where ``out_proj`` does more.
        note: what else changes with the swap.
    """

    difference: OutputDifference | None
    verdict: BudgetVerdict | None
    note: str | None


@dataclass(frozen=True)
class UpgradeChange:
    """The measured change of the output.

    Attributes:
        layers: for each swapped layer, by its first name.
        output: of the whole model on the example inputs; None where none were given.
    """

    layers: Mapping[str, LayerChange]
    output: OutputDifference | None

    @property
    def largest(self) -> float:
        """The largest absolute difference that was measured: of the output, else of a layer."""
        if self.output is not None:
            return self.output.largest
        found = (c.difference.largest for c in self.layers.values() if c.difference)
        return max(found, default=0.0)

    @property
    def within_budget(self) -> bool:
        """Whether every layer that could be measured is within the error budget."""
        return all(c.verdict for c in self.layers.values() if c.verdict is not None)

    def __str__(self) -> str:
        lines = [] if self.output is None else [f"of the model's output: {self.output}"]
        measured = [c for c in self.layers.values() if c.difference is not None]
        if measured:
            worst = max((c.difference.largest for c in measured if c.difference), default=0.0)
            verdicts = [c.verdict for c in measured if c.verdict is not None]
            inside = sum(bool(verdict) for verdict in verdicts)
            judged = f"; {inside} of {len(verdicts)} within the error budget" if verdicts else ""
            lines.append(f"of each layer alone: {worst:.2g} at most{judged}")
        if len(measured) < len(self.layers):
            lines.append(f"not measured: {len(self.layers) - len(measured)}")
        lines += [f"{name or 'the layer'}: {c.note}" for name, c in self.layers.items() if c.note]
        return "\n".join(lines)


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
    change: UpgradeChange

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
        Exception: whatever the model raises on the example inputs. The model is then as it was.
    """
    before = _run(model, inputs, options) if inputs or options else None
    names, kept = _find(model)
    layers: dict[str, LayerChange] = {}
    with ExitStack() as undo:
        for layer, (name, *_) in names.items():
            undo.callback(setattr, layer, "__class__", layer.__class__)
            layer.__class__ = _class_for(layer)
            layers[name] = _measure(layer)
        switched_off = dict(_switch_off(model, undo))
        after = None if before is None else _run(model, inputs, options)
        undo.pop_all()  # nothing failed: it stays
    output = None if before is None or after is None else _largest_difference(before, after)
    swapped = tuple(name for group in names.values() for name in group)
    return Upgrade(swapped, kept, switched_off, UpgradeChange(layers, output))


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


# ---- the measured change -------------------------------------------------------------------------


def _measure(layer: nn.MultiheadAttention) -> LayerChange:
    """torch's forward against ours, on the same layer and a seeded random input."""
    note = _note(layer)
    like = next(layer.parameters())
    if like.is_meta:
        return LayerChange(None, None, note)
    if len({parameter.dtype for parameter in layer.parameters()}) > 1:
        return LayerChange(None, None, note or "its parameters have several dtypes")
    if not isinstance(getattr(layer.out_proj, "weight", None), Tensor):
        return LayerChange(None, None, note)  # torch's own forward cannot be run to compare
    generator = torch.Generator().manual_seed(SEED)

    def drawn(width: int) -> Tensor:
        return torch.randn(BATCH, LENGTH, width, generator=generator).to(like)

    x = drawn(layer.embed_dim)
    inputs = (x, x, x)
    if layer.kdim != layer.embed_dim or layer.vdim != layer.embed_dim:
        inputs = (x, drawn(layer.kdim), drawn(layer.vdim))
    with evaluating(layer), torch.no_grad():
        before = nn.MultiheadAttention.forward(layer, *inputs, need_weights=False)[0]
        after = MultiheadAttention.forward(layer, *inputs, need_weights=False)[0]  # type: ignore[arg-type]
        # What out_proj adds when it is called is no error, and no part of the reference.
        verdict = _budget(layer, inputs).check(after) if note is None else None
    return LayerChange(_largest_difference([before], [after]), verdict, note)


def _run(model: nn.Module, inputs: Sequence[Any], options: Mapping[str, Any]) -> list[Tensor]:
    """Every tensor of the model's output, in eval mode under no_grad, from one random state."""
    with evaluating(model), torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(SEED)
        output = model(*inputs, **options)
    tensors = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
    parts = [part for leaf in tensors for part in (leaf.unbind() if leaf.is_nested else (leaf,))]
    return [part.detach().clone() for part in parts if part.is_floating_point()]


def _largest_difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> OutputDifference:
    """Element by element; see `OutputDifference`."""
    largest, scale, mended = 0.0, 0.0, 0
    for x, y in zip(before, after, strict=True):
        x, y = x.double(), y.double()
        was, is_now = x.isfinite(), y.isfinite()
        gap = (x - y).abs().where(was & is_now, 0.0)
        gap = gap.masked_fill(was & ~is_now, torch.inf)
        if gap.numel():
            largest = max(largest, float(gap.max()))
            scale = max(scale, float(x.abs().where(was, 0.0).max()))
        mended += int((~was & is_now).sum())
    return OutputDifference(largest, scale, mended)


def _budget(layer: nn.MultiheadAttention, inputs: tuple[Tensor, ...]) -> Budget:
    """The error budget of the whole layer: plain torch is its own slow path, in each dtype."""
    same = inputs[0] is inputs[1]

    def plain(*x: Tensor) -> Tensor:
        def cast(weight: Tensor | None) -> Tensor | None:
            return None if weight is None else weight.to(x[0].dtype)

        query, key, value = (x[0], x[0], x[0]) if same else x
        if layer.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        output = multi_head_attention_forward(
            query,
            key,
            value,
            layer.embed_dim,
            layer.num_heads,
            cast(layer.in_proj_weight),
            cast(layer.in_proj_bias),
            cast(layer.bias_k),
            cast(layer.bias_v),
            layer.add_zero_attn,
            0.0,
            layer.out_proj.weight.to(x[0].dtype),
            cast(layer.out_proj.bias),
            use_separate_proj_weight=not layer._qkv_same_embed_dim,
            q_proj_weight=cast(layer.q_proj_weight),
            k_proj_weight=cast(layer.k_proj_weight),
            v_proj_weight=cast(layer.v_proj_weight),
        )[0]
        return output.transpose(0, 1) if layer.batch_first else output

    inputs = inputs[:1] if same else inputs
    if inputs[0].dtype != torch.float64:
        return Budget.of(plain, *inputs, name="output")
    # Plain torch in float64 is the reference itself: its error is that of float32, scaled.
    single = Budget.of(plain, *(x.float() for x in inputs), name="output")
    scale = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    allowed = single.allowed * scale
    return replace(single, dtype=torch.float64, exact=plain(*inputs), allowed=allowed)


def _note(layer: nn.MultiheadAttention) -> str | None:
    out_proj = layer.out_proj
    if type(out_proj) not in (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return f"out_proj is a {type(out_proj).__name__}, which is really called from now on"
    if out_proj._forward_hooks or out_proj._forward_pre_hooks:
        return "out_proj has hooks, which really run from now on"
    return None
