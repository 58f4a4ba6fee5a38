"""Question: what does quantising the projections do?

Quantisation rounds a number to a multiple of ``step``, so the number changes by at most half a
step. With steps s_x, s_w and s_y for inputs, weights and outputs,

    |error of output o| <= s_x / 2 * sum |w_oi| + s_w / 2 * sum |x_i| + n * s_x * s_w / 4 + s_y / 2

where both sums run over the n inputs i. The error of each product is at most
|x| * s_w / 2 + |w| * s_x / 2 + s_x * s_w / 4, the sum of integers is exact, and the output is
rounded once more. The bias may also be an integer, in steps of s_x * s_w. A range that ends
between two steps loses at most half a step at its end.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.errors import MissingExtraError
from headwise.function.stages import merge_heads
from headwise.function.stages import scores as attention_scores
from headwise.layers.attention import Attention
from headwise.study import drawing, implementations, measures, question

EMBED_DIM, HEADS, BATCH, LENGTH = 512, 8, 2, 128
TOKENS = {"one": 1, "many": 256}  # of the timing
ROUNDS = {"one": 40, "many": 20}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
STAGES = ("q, k, v", "scores", "attention weights", "head outputs", "output")
INTEGERS = ("once", "dynamic")

# Inputs use half of the 256 values of quint8, as torch does by default on x86: with all values, the
# sum of two products would overflow the sixteen bits of older processors.
INPUT_LEVELS, OUTPUT_LEVELS, WEIGHT_LEVELS = 127, 255, 254


class QuantisedRange(NamedTuple):
    """Evenly spaced numbers, ``step`` apart; ``zero`` of them are below 0."""

    step: float
    zero: int

    @classmethod
    def from_values(cls, x: Tensor, *, levels: int) -> QuantisedRange:
        """Return a range of ``levels`` steps that covers 0 and all numbers of ``x``."""
        low, high = (float(end) for end in x.detach().aminmax())
        low, high = min(low, 0.0), max(high, 0.0)
        step = (high - low) / levels
        return cls(step, round(-low / step))


def quantise_weight(weight: Float[Tensor, "out_features in_features"]) -> Tensor:
    """Quantise a weight to qint8, symmetric around 0."""
    step = 2 * float(weight.detach().abs().max()) / WEIGHT_LEVELS
    return torch.quantize_per_tensor(weight.detach(), step, 0, torch.qint8)


class StaticQuantised(nn.Module):
    """A projection in int8 with fixed input and output ranges; its input and output are floats.

    ``x`` are sample inputs, which determine the ranges. ``packs_every_call`` packs the weights into
    the kernel's order at every call, as ``torch.ao.nn.quantized.functional.linear`` does, not once.
    """

    def __init__(self, projection: nn.Linear, x: Tensor, *, packs_every_call: bool) -> None:
        super().__init__()
        self.input_range = QuantisedRange.from_values(x, levels=INPUT_LEVELS)
        self.output_range = QuantisedRange.from_values(projection(x), levels=OUTPUT_LEVELS)
        self.weight, self.bias = quantise_weight(projection.weight), projection.bias.detach()
        self.packed: nn.Module | None = None
        if not packs_every_call:
            packed = torch.ao.nn.quantized.Linear(projection.in_features, projection.out_features)
            packed.set_weight_bias(self.weight, self.bias)
            packed.scale, packed.zero_point = self.output_range
            self.packed = packed

    def forward(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out"]:
        """(..., in_features) to (..., out_features)."""
        stored = torch.quantize_per_tensor(x, *self.input_range, torch.quint8)
        if self.packed is None:
            linear = torch.ao.nn.quantized.functional.linear
            output = linear(stored, self.weight, self.bias, *self.output_range)
        else:
            output = self.packed(stored)
        return output.dequantize()


def quantise_dynamically(projection: nn.Linear) -> nn.Module:
    """Return a projection with packed int8 weights; torch chooses the input range at every call."""
    linear = torch.ao.nn.quantized.dynamic.Linear(projection.in_features, projection.out_features)
    linear.set_weight_bias(quantise_weight(projection.weight), projection.bias.detach())
    return linear


class BFloat16Projection(nn.Module):
    """A projection in bfloat16; its input and output are float32."""

    def __init__(self, projection: nn.Linear) -> None:
        super().__init__()
        self.weight = projection.weight.detach().bfloat16()
        self.bias = projection.bias.detach().bfloat16()

    def forward(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out"]:
        """(..., in_features) to (..., out_features)."""
        return nn.functional.linear(x.bfloat16(), self.weight, self.bias).float()


@torch.no_grad()
def error_bound(
    projection: nn.Linear, x: Float[Tensor, "*batch in_features"], *, stores_output: bool
) -> Float[Tensor, "*batch out"]:
    """Return the largest possible error of each output, by the formula of this module."""
    weight, wide, ones = projection.weight.detach().double(), x.double(), torch.ones_like
    of_x = QuantisedRange.from_values(x, levels=INPUT_LEVELS).step
    of_weight = 2 * float(weight.abs().max()) / WEIGHT_LEVELS
    of_output = QuantisedRange.from_values(projection(x), levels=OUTPUT_LEVELS).step
    by_inputs = of_x / 2 * nn.functional.linear(ones(wide), weight.abs())
    by_weights = of_weight / 2 * nn.functional.linear(wide.abs(), ones(weight))
    both = (projection.in_features / 4 + 1 / 2) * of_x * of_weight
    return by_inputs + by_weights + both + (of_output / 2 if stores_output else 0.0)


Replacement = Callable[[nn.Linear, Tensor], nn.Module]
FORMS: dict[str, Replacement] = {
    "float32": lambda projection, _: projection,
    "bfloat16": lambda projection, _: BFloat16Projection(projection),
    "dynamic": lambda projection, _: quantise_dynamically(projection),
    "once": lambda projection, x: StaticQuantised(projection, x, packs_every_call=False),
    "every_call": lambda projection, x: StaticQuantised(projection, x, packs_every_call=True),
}
VARIES = {"bound", "budget", "errors", "least_times_bfloat16", "speed", "status", "times", "torch"}


@torch.no_grad()
def measure(progress: question.Progress) -> dict[str, Any]:
    """Replace the projections of a layer, and compare every stage with float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations are in the status
        status = torch_quantisation_status()
        layer, x = Attention(EMBED_DIM, HEADS).eval(), torch.randn(BATCH, LENGTH, EMBED_DIM)
        compared = compare_forms(layer, x)
        projections = {name: form(layer.q_proj, x) for name, form in FORMS.items()}
        # The time of one projection of these tokens, with floats as input and output.
        times = {}
        for name, count in TOKENS.items():
            inputs = x.flatten(0, 1)[:count]
            functions = {
                form: partial(projection, inputs) for form, projection in projections.items()
            }
            times[name] = measures.relative_times(functions, against="float32", rounds=ROUNDS[name])
        speeds = [1 / by_form["once"] for by_form in times.values()]
        stored = quantise_weight(layer.q_proj.weight).int_repr()
    return {
        "embed_dim": EMBED_DIM,
        "heads": HEADS,
        "batch": BATCH,
        "length": LENGTH,
        "tokens": TOKENS,
        "bytes": {"float32": layer.q_proj.weight.nbytes, "int8": stored.nbytes},
        **compared,
        "times": times,
        "speed": {"least": min(speeds), "most": max(speeds)},
        "torch": metadata.version("torch").split("+")[0],
        "status": status,
    }


def compare_forms(layer: Attention, x: Tensor) -> dict[str, Any]:
    merged, layers = merge_heads(layer.head_outputs(x)), {}
    for name, form in FORMS.items():
        layers[name] = copy.deepcopy(layer)
        for path in PROJECTIONS:
            inputs = merged if path == "out_proj" else x
            layers[name].set_submodule(path, form(layer.get_submodule(path), inputs))  # type: ignore[arg-type]
    exact = compute_stages(copy.deepcopy(layer).double(), x.double())
    tensors = {name: compute_stages(replaced, x) for name, replaced in layers.items()}
    # The root mean square error of each stage as a share of its size.
    errors: dict[str, dict[str, float]] = {}
    for name, by_stage in tensors.items():
        apart = {stage: by_stage[stage].double() - exact[stage] for stage in STAGES}
        errors[name] = {s: float(apart[s].norm() / exact[s].norm()) for s in STAGES}
    weights = implementations.SharedWeights.of_linears(*map(layer.get_submodule, PROJECTIONS))
    budget = measures.layer_error_budget(x, x, x, weights, num_heads=HEADS)
    return {
        "same_bits": torch.equal(tensors["once"]["output"], tensors["every_call"]["output"]),
        "bound": {name: largest_share_of_bound(layer, layers[name], x, name) for name in INTEGERS},
        "errors": errors,
        "least_times_bfloat16": min(
            errors[name][stage] / errors["bfloat16"][stage] for name in INTEGERS for stage in STAGES
        ),
        "budget": {
            name: budget.check(by_stage["output"]).ratio for name, by_stage in tensors.items()
        },
    }


def compute_stages(layer: Attention, x: Tensor) -> dict[str, Tensor]:
    matrix = layer.matrix(x)
    projected = torch.stack([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)])
    scores = attention_scores(matrix.q, matrix.k)
    tensors = (projected, scores, matrix.dense(), layer.head_outputs(x), layer(x))
    return dict(zip(STAGES, tensors, strict=True))


def largest_share_of_bound(layer: Attention, replaced: Attention, x: Tensor, form: str) -> float:
    shares = []
    for name in PROJECTIONS[:3]:
        projection: Any = layer.get_submodule(name)
        exact = copy.deepcopy(projection).double()(x.double())
        error = (replaced.get_submodule(name)(x).double() - exact).abs()
        bound = error_bound(projection, x, stores_output=form != "dynamic")
        shares.append(float((error / bound).max()))
    return max(shares)


def support_status(use: Callable[[], object]) -> str:
    """Return ``works``, ``works, deprecated`` if torch warns of removal, or ``gone``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            use()
        except (AttributeError, ImportError, NotImplementedError, RuntimeError):
            return "gone"
    is_deprecated = any("deprecated" in str(warning.message) for warning in caught)
    return "works, deprecated" if is_deprecated else "works"


def support_status_always_warning(use: Callable[[], object]) -> str:
    """Return the status of a feature whose warning torch shows only once in a process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        return support_status(use)
    finally:
        torch.set_warn_always(before)


def torch_quantisation_status() -> dict[str, str]:
    x, small = torch.ones(2, 4), nn.Linear(4, 4)

    def tensors() -> Tensor:
        return torch.quantize_per_tensor(x, 1.0, 0, torch.quint8)

    status = {"tensors": support_status_always_warning(tensors)}
    support_status(tensors)  # the process's only warning, suppressed here
    status |= {
        "every_call": support_status(lambda: StaticQuantised(small, x, packs_every_call=True)(x)),
        "once": support_status(lambda: StaticQuantised(small, x, packs_every_call=False)(x)),
        "dynamic": support_status(lambda: quantise_dynamically(small)(x)),
        "whole_model": support_status(
            lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(small), {nn.Linear})(x)
        ),
        "old_name": support_status(lambda: torch.nn.quantized.dynamic.Linear(4, 4)(x)),
    }
    if "gone" in (status["every_call"], status["once"], status["dynamic"]):
        raise MissingExtraError(
            saw=f"torch {metadata.version('torch')} without quantised linears",
            needed="a torch that still has torch.ao.nn.quantized",
            do="install an older torch to answer this question",
        )
    return status


def facts(n: question.Numbers) -> dict[str, bool]:
    return {
        "bytes": n["bytes"]["float32"] == 4 * n["bytes"]["int8"],
        "packing": n["same_bits"],
        "bound": max(n["bound"].values()) <= 1,
        "bfloat16": n["least_times_bfloat16"] > 1,
        "budget": n["budget"]["float32"] <= 1 < min(n["budget"][name] for name in INTEGERS),
    }


NAMES = {
    "bfloat16": "bfloat16",
    "dynamic": "int8, dynamic",
    "once": "int8, static",
    "every_call": "static, packed\nat every call",
}
COLOURS = {
    "float32": drawing.SOFT,
    "bfloat16": drawing.SERIES[0],
    "dynamic": drawing.SERIES[2],
    "once": drawing.SERIES[1],
    "every_call": drawing.SERIES[3],
}


def draw(figure: drawing.Figure, n: question.Numbers) -> None:
    figure.set_figheight(4.4)
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(3.3, 2.5))[0]
    _draw_errors(left.subplots(), n)
    single, many = right.subplots(2, 1, sharex=True)
    _draw_times(single, n["times"]["one"], "Time of a projection: one token")
    _draw_times(many, n["times"]["many"], f"{n['tokens']['many']} tokens")
    many.set_xlabel("times float32's, logarithmic")


def _draw_errors(axes: drawing.Axes, n: question.Numbers) -> None:
    stages = list(n["errors"]["float32"])
    thin, wide = (2.0, 5, 1.0), (6.0, 9, 0.55)  # keeps the other line visible
    for name, label, above, (width, size, alpha) in (
        ("float32", "float32", 9, thin),
        ("bfloat16", "bfloat16", -9, thin),
        ("once", "int8, static", 6, wide),
        ("dynamic", "int8, dynamic", -12, thin),
    ):
        values = list(n["errors"][name].values())
        look: dict[str, Any] = {"linewidth": width, "markersize": size, "alpha": alpha}
        axes.plot(range(len(stages)), values, marker="o", color=COLOURS[name], **look)
        look = {"ha": "right", "va": "bottom" if above > 0 else "top", "color": COLOURS[name]}
        drawing.label_point(axes, label, (len(stages) - 0.85, values[-1]), (0, above), **look)
    axes.set(yscale="log", ylim=(1e-7, 0.3))
    axes.set_yticks(
        [0.1, 0.01, 0.001, 1e-4, 1e-5, 1e-6, 1e-7],
        ["10 %", "1 %", "0.1 %", "0.01 %", "0.001 %", "0.0001 %", "0.00001 %"],
    )
    axes.set_xticks(
        range(len(stages)), [stage.replace(" ", "\n").replace(",\n", ", ") for stage in stages]
    )
    ends, label = (-0.25, len(stages) - 0.75), "relative difference from float64"
    drawing.style_axes(axes, "Error after each stage", xlim=ends, ylabel=label)


def _draw_times(axes: drawing.Axes, times: Mapping[str, float], title: str) -> None:
    for row, name in enumerate(NAMES):
        time, colour = times[name], COLOURS[name]
        axes.plot([1, time], [row, row], color=colour, linewidth=4, solid_capstyle="butt")
        axes.plot(time, row, marker="o", markersize=8, color=colour)
        right, side = (8, "left") if time > 1 else (-8, "right")
        drawing.label_point(
            axes, f"{time:.2f}", (time, row), (right, 0), ha=side, va="center", color=drawing.INK
        )
    axes.axvline(1, color=drawing.SOFT, linewidth=1)
    axes.set_xscale("log")
    axes.set_xticks(ticks := [0.1, 0.3, 1, 3, 10], [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(min(0.1, *times.values()) / 1.2, 1.7 * max(10.0, *times.values()))
    axes.set_yticks(range(len(NAMES)), list(NAMES.values()))
    axes.set_ylim(len(NAMES) - 0.4, -0.6)
    axes.set_title(title, loc="left")
