"""In-place replacement of a model's torch.nn.MultiheadAttention layers by the drop-in.

`upgrade` changes the class of each layer. The object keeps its parameters, hooks, flags and
parametrizations, and references to it (in an optimizer, a wrapper, another module) stay valid. The
drop-in adds no state, which makes this safe.

torch's encoder layers do not call their attention in eval under no_grad: a fused path reads its
weights. `upgrade` switches these paths off by plain attributes of the modules, which survive
deepcopy and pickle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import multi_head_attention_forward
from torch.nn.utils.parametrize import is_parametrized

from headwise.function.budget import Budget, BudgetVerdict
from headwise.function.rounding import allow_two_runs
from headwise.layers.torch_api.layer import MultiheadAttention
from headwise.support.tensors import iterate_leaves
from headwise.support.text import describe_count
from headwise.support.tracing import evaluation_mode

SCRIPTING = "torch.jit.script of a swapped layer; use torch.export, or script the model before"
PRINTED = 4  # entries of each printed list
BATCH, LENGTH, SEED = 3, 17, 0  # of the input on which a layer is measured


@dataclass(frozen=True)
class OutputDifference:
    """Difference between the outputs of two runs."""

    largest: float  # the largest absolute difference; infinite if a value was finite before only
    scale: float  # the largest absolute value before
    mended: int  # the number of values that were NaN or infinite before and are finite now

    def __str__(self) -> str:
        more = f"; {self.mended} NaN or infinite values are now finite" if self.mended else ""
        return f"{self.largest:.2g} at most, of values up to {self.scale:.2g}{more}"


@dataclass(frozen=True)
class LayerChange:
    """Measured change of one layer alone, on a seeded random input."""

    # None if torch's forward cannot run: on the meta device, with parameters of several dtypes, or
    # with an ``out_proj`` without a weight
    difference: OutputDifference | None
    # the new output against the float64 reference; None if out_proj has hooks or is no plain linear
    verdict: BudgetVerdict | None
    note: str | None  # another change of behaviour


@dataclass(frozen=True)
class UpgradeChange:
    """Measured change of the output.

    Attributes:
        layers: the change of each swapped layer, by its first name.
        output: the change of the whole model on the example inputs; None without inputs.
    """

    layers: Mapping[str, LayerChange]
    output: OutputDifference | None

    @property
    def largest(self) -> float:
        """The largest absolute difference: of the model's output, else of any layer."""
        if self.output is not None:
            return self.output.largest
        differences = (c.difference.largest for c in self.layers.values() if c.difference)
        return max(differences, default=0.0)

    @property
    def within_budget(self) -> bool:
        """True if every layer with a verdict is within the error budget."""
        return all(c.verdict for c in self.layers.values() if c.verdict is not None)

    def __str__(self) -> str:
        lines = [] if self.output is None else [f"output of the model: {self.output}"]
        measured = [c for c in self.layers.values() if c.difference is not None]
        if measured:
            worst = max((c.difference.largest for c in measured if c.difference), default=0.0)
            verdicts = [c.verdict for c in measured if c.verdict is not None]
            inside = sum(bool(verdict) for verdict in verdicts)
            judged = f"; {inside} of {len(verdicts)} within the error budget" if verdicts else ""
            lines.append(f"each layer alone: {worst:.2g} at most{judged}")
        if len(measured) < len(self.layers):
            lines.append(f"not measured: {len(self.layers) - len(measured)}")
        lines += [f"{name or 'the layer'}: {c.note}" for name, c in self.layers.items() if c.note]
        return "\n".join(lines)


@dataclass(frozen=True)
class Upgrade:
    """Printable report of `upgrade`.

    Attributes:
        swapped: the names of the swapped layers; "" is the model itself.
        kept: name -> reason, for the attention layers that were not swapped.
        switched_off: name -> attribute, for the modules whose fused path was switched off.
        change: the measured change of the output.
        is_transformers_model: True for a model of transformers, by its ``config.model_type``.
    """

    swapped: tuple[str, ...]
    kept: dict[str, str]
    switched_off: dict[str, str]
    change: UpgradeChange
    is_transformers_model: bool = False

    def __str__(self) -> str:
        swapped = describe_count(len(self.swapped), "layer")
        head = f"Upgrade: {swapped} swapped, {len(self.kept)} kept"
        if not self.swapped and not self.kept:
            text = f"{head}\n  The model has no torch.nn.MultiheadAttention; nothing was changed."
            advice = "\n  For a model of transformers, call headwise.register_huggingface()."
            return text + advice if self.is_transformers_model else text
        itself = "(the model itself)"
        sections = {
            "swapped": [name or itself for name in self.swapped],
            "kept": [f"{name or itself}: {why}" for name, why in self.kept.items()],
            "switched off": [f"{name or itself}: {a}" for name, a in self.switched_off.items()],
            "change": str(self.change).splitlines() if self.swapped else [],
            "fails now": [SCRIPTING] if self.swapped else [],
        }
        if any(a.startswith("use_nested_tensor") for a in self.switched_off.values()):
            cause = "padded positions are now computed; torch's nested path returned zeros there"
            if self.change.output is None:
                sections["change"].append(cause)
            else:
                sections["change"][0] += f" ({cause})"
        lines = [head]
        for label, entries in sections.items():
            more = len(entries) - PRINTED
            shown = entries if more <= 1 else [*entries[:PRINTED], f"... and {more} more"]
            lines += [f"  {'' if i else label:<13}{entry}" for i, entry in enumerate(shown)]
        return "\n".join(lines)

    __repr__ = __str__


def upgrade(model: nn.Module, *inputs: Any, **options: Any) -> Upgrade:
    """Swap every torch.nn.MultiheadAttention of ``model`` for `MultiheadAttention`, in place.

    `upgrade` measures the change of each layer's output on a seeded random input, in eval mode
    under no_grad. With example ``inputs`` and ``options`` it also runs the whole model before and
    after. Modes and random state are restored; hooks run during these runs.

    `torch.jit.script` of a swapped layer fails, where torch's layer scripts; the report says so.
    Use torch.export or torch.compile, or script the model before.

    Subclasses of torch's layer, and layers whose ``forward`` was replaced on the instance, are not
    swapped, since their changes would be lost.

    Args:
        model: any module; a `torch.nn.MultiheadAttention` itself is swapped too.
        *inputs: positional arguments of one call of the model.
        **options: keyword arguments of that call.

    Raises:
        Exception: the errors of the model on the example inputs; the model is then unchanged.
    """
    before = _run_in_eval_mode(model, inputs, options) if inputs or options else None
    names, kept = _find_layers_to_swap(model)
    layers: dict[str, LayerChange] = {}
    with ExitStack() as undo:
        for layer, (name, *_) in names.items():
            undo.callback(setattr, layer, "__class__", layer.__class__)
            layer.__class__ = _upgraded_class(layer)
            layers[name] = _measure_layer_change(layer)
        switched_off = dict(_switch_off_fused_paths(model, undo))
        after = None if before is None else _run_in_eval_mode(model, inputs, options)
        undo.pop_all()  # nothing failed: keep the changes
    output = None if before is None or after is None else _largest_difference(before, after)
    swapped = tuple(name for group in names.values() for name in group)
    is_known = hasattr(getattr(model, "config", None), "model_type")
    return Upgrade(swapped, kept, switched_off, UpgradeChange(layers, output), is_known)


Names = dict[nn.MultiheadAttention, list[str]]  # of the layers to swap, with all their names


def _find_layers_to_swap(model: nn.Module) -> tuple[Names, dict[str, str]]:
    names: Names = {}
    kept: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, torch.jit.ScriptModule):
            if getattr(module, "original_name", "") == "MultiheadAttention":
                kept[name] = "scripted: its code is compiled into it"
        elif isinstance(module, nn.MultiheadAttention):
            if reason := _reason_to_keep(module):
                kept[name] = reason
            else:
                names.setdefault(module, []).append(name)
    return names, kept


def _reason_to_keep(module: nn.MultiheadAttention) -> str | None:
    if isinstance(module, MultiheadAttention):
        return "already headwise's"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    # parametrize creates a subclass.
    kind = type(module).__bases__[0] if is_parametrized(module) else type(module)
    if kind is not nn.MultiheadAttention:
        return f"{kind.__module__}.{kind.__qualname__} is a subclass, whose changes would be lost"
    return None


def _upgraded_class(layer: nn.MultiheadAttention) -> type[MultiheadAttention]:
    if not is_parametrized(layer):
        return MultiheadAttention
    # parametrize stores its properties on a subclass for this one module: rebase that subclass.
    members = {k: v for k, v in vars(type(layer)).items() if k not in ("__dict__", "__weakref__")}
    return type(type(layer).__name__, (MultiheadAttention,), members)


def _switch_off_fused_paths(model: nn.Module, undo: ExitStack) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            attribute, off, inner = "activation_relu_or_gelu", 0, [module]
        elif isinstance(module, nn.TransformerEncoder):
            attribute, off, inner = "use_nested_tensor", False, list(module.layers)
        else:
            continue
        swapped = any(isinstance(getattr(x, "self_attn", None), MultiheadAttention) for x in inner)
        if swapped and getattr(module, attribute, off) != off:
            undo.callback(setattr, module, attribute, getattr(module, attribute))
            setattr(module, attribute, off)
            yield name, f"{attribute} = {off}"


# ---- the measured change -------------------------------------------------------------------------


def _measure_layer_change(layer: nn.MultiheadAttention) -> LayerChange:
    """Compare torch's forward with the drop-in's, on the same layer and a seeded random input."""
    note = _note_on_out_proj(layer)
    like = next(layer.parameters())
    if like.is_meta:
        return LayerChange(None, None, note)
    if len({parameter.dtype for parameter in layer.parameters()}) > 1:
        return LayerChange(None, None, note or "its parameters have several dtypes")
    if not isinstance(getattr(layer.out_proj, "weight", None), Tensor):
        return LayerChange(None, None, note)  # torch's forward cannot run
    generator = torch.Generator().manual_seed(SEED)
    widths = (layer.embed_dim, layer.kdim, layer.vdim)
    x, y, z = (torch.randn(BATCH, LENGTH, n, generator=generator).to(like) for n in widths)
    inputs = (x, x, x) if len(set(widths)) == 1 else (x, y, z)
    with evaluation_mode(layer), torch.no_grad():
        before = nn.MultiheadAttention.forward(layer, *inputs, need_weights=False)[0]
        after = MultiheadAttention.forward(layer, *inputs, need_weights=False)[0]  # type: ignore[arg-type]
        # The reference lacks what a replaced out_proj or its hooks add.
        verdict = _layer_error_budget(layer, inputs).check(after) if note is None else None
    return LayerChange(_largest_difference([before], [after]), verdict, note)


def _run_in_eval_mode(
    model: nn.Module, inputs: Sequence[Any], options: Mapping[str, Any]
) -> list[Tensor]:
    """Return the float tensors of the model's output, in eval mode under no_grad, seeded."""
    with evaluation_mode(model), torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(SEED)
        output = model(*inputs, **options)
    tensors = [leaf for leaf in iterate_leaves(output) if isinstance(leaf, Tensor)]
    parts = [part for leaf in tensors for part in (leaf.unbind() if leaf.is_nested else (leaf,))]
    return [part.detach().clone() for part in parts if part.is_floating_point()]


def _largest_difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> OutputDifference:
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


def _layer_error_budget(layer: nn.MultiheadAttention, inputs: tuple[Tensor, ...]) -> Budget:
    """Return the error budget of the whole layer; plain torch is torch's unfused path."""
    names = ("in_proj_weight", "in_proj_bias", "bias_k", "bias_v")
    separate = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    out_proj = {"out_proj_weight": layer.out_proj.weight, "out_proj_bias": layer.out_proj.bias}
    parameters = out_proj | {name: getattr(layer, name) for name in (*names, *separate)}

    def plain(*x: Tensor) -> Tensor:
        query, key, value = x * 3 if len(x) == 1 else x
        if layer.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        cast: dict[str, Any] = {
            name: None if weight is None else weight.to(query.dtype)
            for name, weight in parameters.items()
        }
        cast |= {"add_zero_attn": layer.add_zero_attn, "dropout_p": 0.0}
        cast["use_separate_proj_weight"] = not layer._qkv_same_embed_dim
        sizes = (layer.embed_dim, layer.num_heads)
        output = multi_head_attention_forward(query, key, value, *sizes, **cast)[0]
        return output.transpose(0, 1) if layer.batch_first else output

    inputs = inputs[:1] if inputs[0] is inputs[1] else inputs
    exact, allowed = allow_two_runs(plain, *inputs, dtype=inputs[0].dtype)
    return Budget("output", inputs[0].dtype, exact, allowed)


def _note_on_out_proj(layer: nn.MultiheadAttention) -> str | None:
    out_proj = layer.out_proj
    if type(out_proj) not in (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return f"out_proj is a {type(out_proj).__name__}, which is now called (torch reads weights)"
    if out_proj._forward_hooks or out_proj._forward_pre_hooks:
        return "out_proj has hooks, which now run"
    return None
