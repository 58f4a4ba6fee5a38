"""What `upgrade` measures: how far the output moved, and whether it moved within the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import multi_head_attention_forward

from headwise.budget.budget import Budget, Verdict
from headwise.layers.torch_api.layer import MultiheadAttention
from headwise.support.modes import evaluating
from headwise.support.nested import leaves

BATCH, LENGTH, SEED = 3, 17, 0


@dataclass(frozen=True)
class Difference:
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

    difference: Difference | None
    verdict: Verdict | None
    note: str | None


@dataclass(frozen=True)
class Change:
    """The measured change of the output.

    Attributes:
        layers: for each swapped layer, by its first name.
        output: of the whole model on the example inputs; None where none were given.
    """

    layers: Mapping[str, LayerChange]
    output: Difference | None

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


def measure(layer: nn.MultiheadAttention) -> LayerChange:
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
    return LayerChange(largest_difference([before], [after]), verdict, note)


def run(model: nn.Module, inputs: Sequence[Any], options: Mapping[str, Any]) -> list[Tensor]:
    """Every tensor of the model's output, in eval mode under no_grad, from one random state."""
    with evaluating(model), torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(SEED)
        output = model(*inputs, **options)
    tensors = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
    parts = [part for leaf in tensors for part in (leaf.unbind() if leaf.is_nested else (leaf,))]
    return [part.detach().clone() for part in parts if part.is_floating_point()]


def largest_difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> Difference:
    """Element by element; see `Difference`."""
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
    return Difference(largest, scale, mended)


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
