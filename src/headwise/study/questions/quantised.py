"""Question: what does quantising the projections do?"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import MissingExtraError
from headwise.function import stages as reference
from headwise.layers.attention import Attention
from headwise.study.drawing import INK, SERIES, SOFT, Axes, Figure, label_point, style_axes
from headwise.study.experiments.measures import layer_error_budget, relative_times
from headwise.study.experiments.quantised import (
    BFloat16Projection,
    StaticQuantised,
    error_bound,
    expected_error,
    quantise_dynamically,
    quantise_weight,
    support_status,
    support_status_always_warning,
)
from headwise.study.implementations import SharedWeights
from headwise.study.question import Numbers
from headwise.support.progress import Progress

EMBED_DIM, HEADS, BATCH, LENGTH = 512, 8, 2, 128
TOKENS = {"one": 1, "many": 256}  # of the timing
ROUNDS = {"one": 40, "many": 20}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
STAGES = ("q, k, v", "scores", "attention weights", "head outputs", "output")
INTEGERS = ("once", "dynamic")
Replacement = Callable[[nn.Linear, Tensor], nn.Module]
FORMS: dict[str, Replacement] = {
    "float32": lambda projection, _: projection,
    "bfloat16": lambda projection, _: BFloat16Projection(projection),
    "dynamic": lambda projection, _: quantise_dynamically(projection),
    "once": lambda projection, x: StaticQuantised(projection, x, packs_every_call=False),
    "every_call": lambda projection, x: StaticQuantised(projection, x, packs_every_call=True),
}
VARIES = {
    "budget",
    "errors",
    "least_times_bfloat16",
    "speed",
    "status",
    "steps",
    "times",
    "torch",
}


@torch.no_grad()
def measure(progress: Progress) -> dict[str, Any]:
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
            times[name] = relative_times(functions, against="float32", rounds=ROUNDS[name])
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


# ---- what is measured ------------------------------------------------------------------------


def compare_forms(layer: Attention, x: Tensor) -> dict[str, Any]:
    """Compare the errors of every form with their bounds and the error budget."""
    layers = {name: replace_projections(layer, x, form) for name, form in FORMS.items()}
    exact = compute_stages(copy.deepcopy(layer).double(), x.double())
    tensors = {name: compute_stages(replaced, x) for name, replaced in layers.items()}
    # The root mean square error of each stage as a share of its size.
    errors = {
        name: {
            stage: float((by_stage[stage].double() - exact[stage]).norm() / exact[stage].norm())
            for stage in STAGES
        }
        for name, by_stage in tensors.items()
    }
    weights = SharedWeights.of_linears(*map(layer.get_submodule, PROJECTIONS))
    budget = layer_error_budget(x, x, x, weights, num_heads=HEADS)
    return {
        "same_bits": torch.equal(tensors["once"]["output"], tensors["every_call"]["output"]),
        "steps": {name: errors_against_bounds(layer, layers[name], x, name) for name in INTEGERS},
        "errors": errors,
        "least_times_bfloat16": min(
            errors[name][stage] / errors["bfloat16"][stage] for name in INTEGERS for stage in STAGES
        ),
        "budget": {
            name: budget.check(by_stage["output"]).ratio for name, by_stage in tensors.items()
        },
    }


def replace_projections(layer: Attention, x: Tensor, form: Replacement) -> Attention:
    """Copy the layer with other projections, whose steps suit their inputs."""
    merged = reference.merge_heads(layer.head_outputs(x))
    replaced = copy.deepcopy(layer)
    for name in PROJECTIONS:
        inputs = merged if name == "out_proj" else x
        replaced.set_submodule(name, form(layer.get_submodule(name), inputs))  # type: ignore[arg-type]
    return replaced


def compute_stages(layer: Attention, x: Tensor) -> dict[str, Tensor]:
    """Return the tensors of each stage of a layer."""
    matrix = layer.matrix(x)
    tensors = (
        torch.stack([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)]),
        reference.scores(matrix.q, matrix.k),
        matrix.dense(),
        layer.head_outputs(x),
        layer(x),
    )
    return dict(zip(STAGES, tensors, strict=True))


def errors_against_bounds(
    layer: Attention, replaced: Attention, x: Tensor, form: str
) -> dict[str, float]:
    """Return the largest error of q, k and v over its bound, and the typical error of q."""
    shares, squares, stores_output = [], [], form != "dynamic"
    for name in PROJECTIONS[:3]:
        projection: Any = layer.get_submodule(name)
        exact = copy.deepcopy(projection).double()(x.double())
        error = replaced.get_submodule(name)(x).double() - exact
        shares.append((error.abs() / error_bound(projection, x, stores_output=stores_output)).max())
        squares.append((error**2).mean())
    return {
        "share": float(max(shares)),
        "expected": expected_error(layer.q_proj, x, stores_output=stores_output),
        "measured": float(squares[0].sqrt()),
    }


def torch_quantisation_status() -> dict[str, str]:
    """Return whether torch still supports each way to quantise, by trying each on small tensors.

    Raises:
        MissingExtraError: the installed torch no longer has quantised linears.
    """
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


def facts(n: Numbers) -> dict[str, bool]:
    """Check the facts of the text by the numbers."""
    return {
        "bytes": n["bytes"]["float32"] == 4 * n["bytes"]["int8"],
        "packing": n["same_bits"],
        "bound": max(errors["share"] for errors in n["steps"].values()) <= 1,
        "bfloat16": (n["least_times_bfloat16"] > 1),
        "budget": n["budget"]["float32"] <= 1 < min(n["budget"][name] for name in INTEGERS),
    }


# ---- the picture -------------------------------------------------------------------------------

NAMES = {
    "bfloat16": "bfloat16",
    "dynamic": "int8, dynamic",
    "once": "int8, static",
    "every_call": "static, packed\nat every call",
}
COLOURS = {
    "float32": SOFT,
    "bfloat16": SERIES[0],
    "dynamic": SERIES[2],
    "once": SERIES[1],
    "every_call": SERIES[3],
}


def draw(figure: Figure, n: Numbers) -> None:
    """Draw the error after each stage, and the time of a projection."""
    figure.set_figheight(4.4)
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(3.3, 2.5))[0]
    _draw_errors(left.subplots(), n)
    single, many = right.subplots(2, 1, sharex=True)
    _draw_times(single, n["times"]["one"], "Time of a projection: one token")
    _draw_times(many, n["times"]["many"], f"{n['tokens']['many']} tokens")
    many.set_xlabel("times float32's, logarithmic")


def _draw_errors(axes: Axes, n: Numbers) -> None:
    """Draw a labelled line for each form; both static forms have the same errors."""
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
        label_point(axes, label, (len(stages) - 0.85, values[-1]), (0, above), **look)
    axes.set(yscale="log", ylim=(1e-7, 0.3))
    axes.set_yticks(
        [0.1, 0.01, 0.001, 1e-4, 1e-5, 1e-6, 1e-7],
        ["10 %", "1 %", "0.1 %", "0.01 %", "0.001 %", "0.0001 %", "0.00001 %"],
    )
    axes.set_xticks(
        range(len(stages)),
        [stage.replace(" ", "\n").replace(",\n", ", ") for stage in stages],
    )
    ends, label = (-0.25, len(stages) - 0.75), "relative difference from float64"
    style_axes(axes, "Error after each stage", xlim=ends, ylabel=label)


def _draw_times(axes: Axes, times: Mapping[str, float], title: str) -> None:
    """Draw each form's time relative to float32; faster forms are to the left."""
    for row, name in enumerate(NAMES):
        time, colour = times[name], COLOURS[name]
        axes.plot([1, time], [row, row], color=colour, linewidth=4, solid_capstyle="butt")
        axes.plot(time, row, marker="o", markersize=8, color=colour)
        right, side = (8, "left") if time > 1 else (-8, "right")
        label_point(axes, f"{time:.2f}", (time, row), (right, 0), ha=side, va="center", color=INK)
    axes.axvline(1, color=SOFT, linewidth=1)
    axes.set_xscale("log")
    axes.set_xticks(ticks := [0.1, 0.3, 1, 3, 10], [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(min(0.1, *times.values()) / 1.2, 1.7 * max(10.0, *times.values()))
    axes.set_yticks(range(len(NAMES)), list(NAMES.values()))
    axes.set_ylim(len(NAMES) - 0.4, -0.6)
    axes.set_title(title, loc="left")
