"""QK-norm: normalisation of queries and keys, which bounds the scores.

Henry et al. 2020 (arXiv:2010.04245); with learned weights as in Dehghani et al. 2023
(arXiv:2302.05442). Model families differ in the options of `QKNorm`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.function.norm import normalise
from headwise.function.spec import NormRule, Over, Place
from headwise.support.text import describe_value

Kind = Literal["rms", "layer"]
_CHOICES = {"kind": get_args(Kind), "over": get_args(Over), "place": get_args(Place)}


class Placement(TypedDict, total=False):
    """Device and dtype of the parameters of a module, as in torch."""

    device: torch.device | str | None
    dtype: torch.dtype | None


@dataclass(frozen=True)
class QKNorm:
    """Options of QK-norm; `module` makes the norm.

        Qwen3       QKNorm()                            each head, RMS
        OLMo 2      QKNorm(over="width")                all heads of a token together
        Gemma 3     QKNorm(one_plus=True)               the weight is stored less 1
        torchtune   QKNorm(place="after")               after the rotation
        Llama 4     QKNorm(place="after", has_weight=False)

    All heads share one weight. The layer norms of Cohere, Chameleon and StableLM 2 have a weight
    of (heads, head_dim), one row for each head: they fit only where the rows are equal.

    Args:
        kind: "rms" divides by the root mean square; "layer" subtracts the mean first, and adds a
            bias.
        over: "head" normalises the head_dim numbers of each head; "width" the whole projection of
            a token, before it is split into heads.
        place: "before" or "after" the rotary rotation.
        one_plus: True if the weight is stored as its difference from 1, so that weight decay
            pulls it towards 1.
        eps: added to the mean square, or to the variance.
        has_weight: False for a norm without learned parameters.

    Raises:
        OptionError: a value outside its range, or ``over="width"`` with ``place="after"`` or
            ``has_weight=False``.
    """

    kind: Kind = "rms"
    over: Over = "head"
    place: Place = "before"
    one_plus: bool = False
    eps: float = 1e-6
    has_weight: bool = True

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise OptionError(
                    saw=f"QKNorm({name}={describe_value(getattr(self, name))})",
                    needed=" or ".join(f'"{choice}"' for choice in choices),
                    do=f'{name}="{choices[0]}" is the default',
                )
        if not 0 < self.eps < math.inf:
            raise OptionError(
                saw=f"QKNorm(eps={self.eps})",
                needed="a positive finite number, since vectors of zeros give NaN otherwise",
                do="eps=1e-6",
            )
        if self.over == "width" and not self.has_weight:
            raise OptionError(
                saw='QKNorm(over="width", has_weight=False)',
                needed="a norm without weight of each head, as models have it",
                do='over="head" with has_weight=False, or has_weight=True',
            )
        if self.over == "width" and self.place == "after":
            raise OptionError(
                saw='QKNorm(over="width", place="after")',
                needed='over="width" before the rotation: rotation applies to heads, after the '
                "width is split",
                do='over="head" with place="after", or place="before"',
            )

    @classmethod
    def of(cls, rule: NormRule) -> QKNorm:
        """Return the options of a norm that a description states."""
        assert rule.kind != "l2"
        shape = rule.kind, rule.over, rule.place, rule.weight_offset == 1, rule.eps
        return cls(*shape, rule.has_weight)

    @property
    def rule(self) -> NormRule:
        """The norm, as `AttentionSpec` has it."""
        offset = 1.0 if self.one_plus else 0.0
        shape = self.kind, self.over, self.place, offset, self.eps
        return NormRule(*shape, has_weight=self.has_weight)

    def normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Normalise the last axis of ``x``."""
        offset = 1.0 if self.one_plus else 0.0
        return normalise(x, weight, bias, kind=self.kind, eps=self.eps, weight_offset=offset)

    def module(
        self,
        width: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Norm:
        """Return the norm of a last axis of ``width``, with its learned weight (and bias).

        ``width`` is head_dim for ``over="head"``, num_heads * head_dim for ``over="width"``.
        """
        return Norm(self, width, device=device, dtype=dtype)


class Norm(nn.Module):
    """Norm of the last axis, made by `QKNorm.module`.

    Half types are normalised in float32 and rounded once, as in Gemma and OLMo; Llama and Qwen
    also round before they apply the weight.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, options: QKNorm, width: int, **place: Unpack[Placement]) -> None:
        super().__init__()
        self.options, self.width = options, width
        held = {
            "weight": options.has_weight,
            "bias": options.has_weight and options.kind == "layer",
        }
        for name, is_held in held.items():
            values = nn.Parameter(torch.empty(width, **place)) if is_held else None
            self.register_parameter(name, values)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to 1 and the bias to 0."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.options.one_plus else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Float[Tensor, "*axes width"]) -> Float[Tensor, "*axes width"]:
        """Divide x by its root mean square, or subtract its mean and divide by its deviation."""
        return self.options.normalise(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return the width and the options."""
        return f"{self.width}, {self.options}"
