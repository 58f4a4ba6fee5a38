"""Weights and biases with other values."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase
from benchmarks.faults.geometry import Geometry
from benchmarks.faults.injectors.head_order import rows_of
from benchmarks.faults.injectors.injector import (
    STAGE_OF_ROLE,
    Injector,
    names_of_a_scale,
    weights_of,
)
from benchmarks.faults.reference_layer import ReferenceLayer


class _EveryGeometry(Injector):
    family = "values"


class SignFlipped(_EveryGeometry):
    """The weight and bias of one role are negated; no public report."""

    name = "sign"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Negate one role."""
        role = draw.choice("qkvo")
        negated = {name: -layer.weight(name).detach() for name in weights_of(layer, role)}
        return self.case(
            layer,
            layer.with_weights(**negated),
            draw,
            stage=STAGE_OF_ROLE[role],
            parameters={"role": role},
        )


class FactorOnWeights(_EveryGeometry):
    """The weight and bias of one role have a factor (GRPO-Zero #10, T5: transformers #18284).

    A factor on q or k without a norm is the same function as another scale.
    """

    name = "factor"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Multiply one role by a known form."""
        g = layer.geometry
        forms = {
            "head_dim ** 0.5": g.head_dim**0.5,
            "head_dim ** -0.5": g.head_dim**-0.5,
            "head_dim ** -0.25": g.head_dim**-0.25,
            "2": 2.0,
            "1 / 2": 0.5,
            "2 ** 0.5": 2**0.5,
        }
        form = draw.choice(sorted(forms))
        role = draw.choice("vo" if g.qk_norm else "qkvo")
        scaled = {
            name: layer.weight(name).detach() * forms[form] for name in weights_of(layer, role)
        }
        return self.case(
            layer,
            layer.with_weights(**scaled),
            draw,
            stage=STAGE_OF_ROLE[role],
            parameters={"role": role, "factor": forms[form], "form": form},
            equals=names_of_a_scale(g) - {self.name} if role in "qk" else frozenset(),
        )


class RowsZero(_EveryGeometry):
    """The rows of one head are zero (TransformerLens #1620, vLLM #58142)."""

    name = "rows zero"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Zero the rows of one head of q, k or v, bias included."""
        role = draw.choice("qkv")
        rows = rows_of(layer.geometry, role)
        head = draw.integer(0, len(rows))
        changed = {}
        for name in weights_of(layer, role):
            changed[name] = layer.weight(name).detach().clone()
            changed[name][rows[head]] = 0.0
        return self.case(
            layer,
            layer.with_weights(**changed),
            draw,
            stage=role,
            parameters={"role": role, "rows": tuple(rows[head].tolist())},
            heads=(head,),
        )


class InitialValues(_EveryGeometry):
    """A weight was never loaded and has its initial values (axolotl #762, optimum #1827)."""

    name = "weights at their initial values"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Draw one weight as torch's Linear does."""
        role = draw.choice("qkvo")
        weight = layer.weight(f"w{role}")
        bound = weight.shape[1] ** -0.5
        fresh = draw.spread(*weight.shape, low=-bound, high=bound)
        return self.case(
            layer,
            layer.with_weights(**{f"w{role}": fresh}),
            draw,
            stage=STAGE_OF_ROLE[role],
            parameters={"role": role, "bound": bound},
        )


class WeightRounded(_EveryGeometry):
    """Weights went through a narrower dtype (OLMo #716, TransformerLens #683)."""

    name = "dtype's rounding of weights"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Round one role, or all roles, to float16 or bfloat16."""
        roles = draw.choice(("qkvo", "q", "k", "v", "o"))
        names = [name for role in roles for name in weights_of(layer, role)]
        first = layer.weight(f"w{roles[0]}").detach()
        dtypes = (torch.bfloat16, torch.float16, torch.float32)
        dtype = draw.choice([t for t in dtypes if bool((first.to(t) != first).any())])
        rounded = {name: layer.weight(name).detach().to(dtype).double() for name in names}
        return self.case(
            layer,
            layer.with_weights(**rounded),
            draw,
            stage=STAGE_OF_ROLE[roles[0]],
            parameters={"roles": roles, "dtype": str(dtype)},
        )


def effective_biases(geometry: Geometry) -> list[str]:
    """Return the roles whose bias changes the output.

    A key bias adds the same number to all scores of a query. It cancels in the softmax, unless
    a rotary embedding, a norm, a softcap or a sink comes between.
    """
    g = geometry
    roles = ["q", "v"] if g.biases else []
    if g.biases and (g.rotary or g.qk_norm or g.softcap or g.sink):
        roles.append("k")
    return roles + (["o"] if g.out_bias else [])


class _BiasFault(Injector):
    family = "values"

    def applies(self, geometry: Geometry) -> bool:
        """Return True where a bias has an effect."""
        return bool(effective_biases(geometry))

    def changed(self, bias: Tensor) -> Tensor | None:
        """Return the faulty bias."""
        raise NotImplementedError

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Change one bias."""
        role = draw.choice(effective_biases(layer.geometry))
        name = f"b{role}"
        faulty = layer.with_weights(**{name: self.changed(layer.weight(name).detach())})
        return self.case(layer, faulty, draw, stage=STAGE_OF_ROLE[role], parameters={"role": role})


class BiasMissing(_BiasFault):
    """A bias is dropped (onnxruntime/mobius #396)."""

    name = "bias missing"
    equals = frozenset({"bias zero"})

    def changed(self, bias: Tensor) -> Tensor | None:
        """Return no bias."""
        return None


class BiasZero(_BiasFault):
    """A bias is zero; no public report."""

    name = "bias zero"
    equals = frozenset({"bias missing"})

    def changed(self, bias: Tensor) -> Tensor | None:
        """Return zeros."""
        return torch.zeros_like(bias)


INJECTORS = (
    SignFlipped(),
    FactorOnWeights(),
    RowsZero(),
    InitialValues(),
    WeightRounded(),
    BiasMissing(),
    BiasZero(),
)
