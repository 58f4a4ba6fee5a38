"""What does quantising the projections do?"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from headwise import functional
from headwise.budget import Budget
from headwise.errors import MissingExtraError
from headwise.layer.attention import Attention
from headwise.models.reading import Progress
from headwise.studies.experiments.quantised_projections import (
    INPUT_LEVELS,
    Rounded,
    Static,
    bound,
    dynamically,
    expected,
    quantised_weight,
)
from headwise.studies.experiments.still_there import status_of, status_of_once
from headwise.studies.experiments.timing import times_of
from headwise.studies.pictures.style import INK, LINE, SERIES, SOFT
from headwise.studies.question import Fact, Numbers, Question, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EMBED_DIM, HEADS, BATCH, LENGTH = 512, 8, 2, 128
TOKENS = {"one": 1, "many": 256}  # that are timed, and how often
ROUNDS = {"one": 40, "many": 20}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
STAGES = ("q, k, v", "scores", "weights", "head outputs", "output")
INTEGERS = ("once", "dynamic")
Replacement = Callable[[nn.Linear, Tensor], nn.Module]
FORMS: dict[str, Replacement] = {
    "float32": lambda projection, _: projection,
    "bfloat16": lambda projection, _: Rounded(projection),
    "dynamic": lambda projection, _: dynamically(projection),
    "once": lambda projection, x: Static(projection, x, packs_every_call=False),
    "every_call": lambda projection, x: Static(projection, x, packs_every_call=True),
}
NAMES = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "dynamic": "int8, dynamic",
    "once": "static, packed\nonce",
    "every_call": "static, packed\nevery call",
}
COLOURS = dict(zip(FORMS, (SOFT, SERIES[0], SERIES[2], SERIES[1], SERIES[3]), strict=True))


@torch.no_grad()
def measure(progress: Progress) -> dict[str, Any]:
    """Replace the projections of a layer, and compare every stage with float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch announces is in the status
        status = status_of_torch()
        progress("quantising", 1, 3)
        layer, x = Attention(EMBED_DIM, HEADS).eval(), torch.randn(BATCH, LENGTH, EMBED_DIM)
        compared = compare(layer, x)
        progress("timing", 2, 3)
        times = {name: times_of_projections(name, layer, x) for name in TOKENS}
        stored = quantised_weight(layer.q_proj.weight).int_repr()
    return {
        "embed_dim": EMBED_DIM,
        "heads": HEADS,
        "batch": BATCH,
        "length": LENGTH,
        "tokens": TOKENS,
        "levels": INPUT_LEVELS,
        "bytes": {"float32": layer.q_proj.weight.nbytes, "int8": stored.nbytes},
        **compared,
        "times": times,
        "packing": {name: found["every_call"] / found["once"] for name, found in times.items()},
        "torch": metadata.version("torch").split("+")[0],
        "status": status,
        "ways": len(status),
        "deprecated": sum("deprecated" in found for found in status.values()),
    }


# ---- what is measured ------------------------------------------------------------------------


def compare(layer: Attention, x: Tensor) -> dict[str, Any]:
    """The errors of every form, against float64, their bounds and the error budget."""
    layers = {name: replaced(layer, x, form) for name, form in FORMS.items()}
    exact = stages(copy.deepcopy(layer).double(), x.double())
    found = {name: stages(own, x) for name, own in layers.items()}
    errors = {name: errors_of(those, exact) for name, those in found.items()}
    budget = budget_of(layer, x)
    in_steps = {name: against_steps(layer, layers[name], x, name) for name in INTEGERS}
    return {
        "same_bits": torch.equal(found["once"]["output"], found["every_call"]["output"]),
        "steps": in_steps,
        "errors": errors,
        "least_times_bfloat16": min(
            errors[name][stage] / errors["bfloat16"][stage] for name in INTEGERS for stage in STAGES
        ),
        "budget": {name: budget.check(those["output"]).ratio for name, those in found.items()},
    }


def replaced(layer: Attention, x: Tensor, form: Replacement) -> Attention:
    """A copy of the layer with other projections, their steps chosen for what each is given."""
    merged = layer.head_outputs(x).transpose(1, 2).flatten(2)
    own = copy.deepcopy(layer)
    for name in PROJECTIONS:
        given = merged if name == "out_proj" else x
        own.set_submodule(name, form(layer.get_submodule(name), given))  # type: ignore[arg-type]
    return own


def stages(layer: Attention, x: Tensor) -> dict[str, Tensor]:
    """What a layer makes of its input, one after the other."""
    matrix = layer.matrix(x)
    found = (
        torch.stack([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)]),
        functional.scores(matrix.q, matrix.k),
        matrix.dense(),
        layer.head_outputs(x),
        layer(x),
    )
    return dict(zip(STAGES, found, strict=True))


def errors_of(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """How far each stage is off in the root mean square, as a share of its size."""
    return {
        name: float((found[name].double() - exact[name]).norm() / exact[name].norm())
        for name in STAGES
    }


def against_steps(layer: Attention, own: Attention, x: Tensor, form: str) -> dict[str, float]:
    """The largest error of q, k and v as a share of its bound; the usual size of the error of q."""
    shares, squares, stores_output = [], [], form != "dynamic"
    for name in PROJECTIONS[:3]:
        projection = layer.get_submodule(name)
        assert isinstance(projection, nn.Linear)
        exact = copy.deepcopy(projection).double()(x.double())
        error = own.get_submodule(name)(x).double() - exact
        shares.append((error.abs() / bound(projection, x, stores_output=stores_output)).max())
        squares.append((error**2).mean())
    return {
        "share": float(max(shares)),
        "expected": expected(layer.q_proj, x, stores_output=stores_output),
        "measured": float(squares[0].sqrt()),
    }


def budget_of(layer: Attention, x: Tensor) -> Budget:
    """What float32's rounding may do to the output."""

    def output(x: Tensor, *parameters: Tensor) -> Tensor:
        *inner, out = zip(parameters[::2], parameters[1::2], strict=True)
        q, k, v = (functional.split_heads(linear(x, *pair), heads=HEADS) for pair in inner)
        return linear(functional.merge_heads(functional.head_outputs(q, k, v)), *out)

    parts = [layer.get_submodule(name) for name in PROJECTIONS]
    return Budget.of(output, x, *(p for part in parts for p in part.parameters()))


def times_of_projections(tokens: str, layer: Attention, x: Tensor) -> dict[str, float]:
    """How long one projection of so many tokens takes, floats in and floats out."""
    given = x.flatten(0, 1)[: TOKENS[tokens]]
    works = {name: partial(form(layer.q_proj, x), given) for name, form in FORMS.items()}
    return times_of(works, against="float32", rounds=ROUNDS[tokens])


def status_of_torch() -> dict[str, str]:
    """What became of torch's ways to quantise a projection: each is used on something small.

    Raises:
        MissingExtraError: the installed torch has no quantised linears any more.
    """
    x, small = torch.ones(2, 4), nn.Linear(4, 4)
    tensors = partial(torch.quantize_per_tensor, x, 1.0, 0, torch.quint8)
    status = {"tensors": status_of_once(tensors)}
    status_of(tensors)  # the one warning of this process is given here, where nobody need hear it
    status |= {
        "every_call": status_of(lambda: Static(small, x, packs_every_call=True)(x)),
        "once": status_of(lambda: Static(small, x, packs_every_call=False)(x)),
        "dynamic": status_of(lambda: dynamically(small)(x)),
        "whole_model": status_of(
            lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(small), {nn.Linear})(x)
        ),
        "old_name": status_of(lambda: torch.nn.quantized.dynamic.Linear(4, 4)(x)),
    }
    if "gone" in (status["every_call"], status["once"], status["dynamic"]):
        raise MissingExtraError(
            saw=f"torch {metadata.version('torch')} without quantised linears",
            needed="a torch that still has torch.ao.nn.quantized",
            do="ask with an older torch",
        )
    return status


# ---- the picture -----------------------------------------------------------------------------


def draw(figure: Figure, n: Numbers) -> None:
    """The error after each stage, and the time of a projection."""
    figure.set_size_inches(7.6, 4.2)
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(3.1, 2.6))[0]
    _draw_errors(left.subplots(), n)
    one, many = right.subplots(2, 1, sharex=True)
    _draw_times(one, n["times"]["one"], "one token")
    _draw_times(many, n["times"]["many"], f"{n['tokens']['many']} tokens")
    many.set_xlabel("time of a projection, float32 is 1")


def _draw_errors(axes: Axes, n: Numbers) -> None:
    """A line for each form, its name above or below it. Both static forms have the same errors."""
    labels = (
        ("float32", "float32", 8),
        ("bfloat16", "bfloat16", -17),
        ("dynamic", "int8, dynamic", -17),
        ("once", "int8, static", 8),
    )
    for name, label, above in labels:
        values = [n["errors"][name][stage] for stage in STAGES]
        axes.plot(range(len(STAGES)), values, marker="o", ms=5, color=COLOURS[name])
        axes.annotate(
            label,
            (len(STAGES) - 0.85, values[-1]),
            xytext=(0, above),
            textcoords="offset points",
            ha="right",
            color=COLOURS[name],
        )
    axes.set_yscale("log")
    axes.set_ylim(1e-7, 0.3)
    axes.set_yticks(
        [0.1, 0.01, 0.001, 1e-4, 1e-5, 1e-6, 1e-7],
        ["10 %", "1 %", "0.1 %", "0.01 %", "0.001 %", "0.0001 %", "0.00001 %"],
    )
    axes.set_xticks(range(len(STAGES)), [stage.replace("head ", "head\n") for stage in STAGES])
    axes.set_xlim(-0.25, len(STAGES) - 0.75)
    axes.set_ylabel("error, share of the exact values")
    axes.grid(axis="y", color=LINE)


def _draw_times(axes: Axes, times: Mapping[str, float], title: str) -> None:
    """A bar for each form, with its number at the end."""
    places = range(len(FORMS))
    bars = axes.barh(places, [times[name] for name in FORMS], color=list(COLOURS.values()))
    axes.bar_label(bars, [f"{times[name]:.2f}" for name in FORMS], padding=4, color=INK)
    axes.set_yticks(places, [NAMES[name] for name in FORMS], size=9)
    axes.invert_yaxis()
    axes.set_title(title, loc="left")
    axes.margins(x=0.18)
    axes.spines["bottom"].set_visible(False)


# ---- the question ----------------------------------------------------------------------------

QUESTION = Question(
    id="quantised",
    asks="What does quantising the projections do?",
    claim="It makes the weights a quarter as large and the output less exact, far beyond what "
    "float32's rounding does. Packing the weights on every call changes the time and nothing else.",
    measure=measure,
    facts=(
        Fact(
            "the weights of a projection take {bytes[int8]:,} bytes as int8 and "
            "{bytes[float32]:,} as float32, four times as many",
            lambda n: n["bytes"]["float32"] == 4 * n["bytes"]["int8"],
        ),
        Fact(
            "packed on every call or packed once, the weights give the same output, bit by bit",
            lambda n: n["same_bits"],
        ),
        Fact(
            "no element of q, k and v is further off than half a step of each number that was "
            "rounded lets it be: {steps[once][share]:.2f} of that at most with static steps, "
            "{steps[dynamic][share]:.2f} with dynamic ones",
            lambda n: max(found["share"] for found in n["steps"].values()) <= 1,
        ),
        Fact(
            "after every stage int8 is further off than bfloat16, at least "
            "{least_times_bfloat16:.1f} times as far: at the output by "
            "{errors[once][output]:percent} with static steps and by "
            "{errors[dynamic][output]:percent} with dynamic ones",
            lambda n: n["least_times_bfloat16"] > 1,
        ),
        Fact(
            "the output leaves the error budget of float32, {budget[once]:,.0f} times (static) and "
            "{budget[dynamic]:,.0f} times (dynamic); "
            "float32 itself uses {budget[float32]:.2f} of it",
            lambda n: n["budget"]["float32"] <= 1 < min(n["budget"][name] for name in INTEGERS),
        ),
        Fact(
            "all that was tried still works in torch {torch}, {deprecated} of {ways} with a "
            "warning that it is deprecated",
            lambda n: "gone" not in n["status"].values(),
        ),
    ),
    verdict="It makes the weights a quarter as large and the output {errors[once][output]:percent} "
    "off, {budget[once]:,.0f} times what float32's rounding may do; packing the weights on every "
    "call changes no bit of it and takes {packing[one]:.1f} times as long for one token, "
    "{packing[many]:.1f} times for {tokens[many]}.",
    why="Eight bits have room for a few hundred evenly spaced numbers, so every weight and every "
    "input moves by up to half a step. Of q that makes {steps[once][measured]:.4f} in the root "
    "mean square, where the steps let expect {steps[once][expected]:.4f}; later stages add to it. "
    "Packing brings the same integers into the order that the kernel reads, and takes the same "
    "time for one token as for many. Inputs use only {levels} steps, since older processors "
    "overflow with all of them.",
    caption="A layer of width {embed_dim} with {heads} heads, random weights, {batch} texts of "
    "{length} tokens. Left: how far each stage is from float64, on a logarithmic scale; only the "
    "projections are quantised, all in between is float32. int8 is above bfloat16, and both far "
    "above float32. Right: how long a projection takes here, from floats to floats. Packing on "
    "every call is the longest bar for one token.",
    draw=draw,
    table=Table(
        columns=("projections by", "in torch here", "error of the output"),
        rows=(
            ("float32", "works", "{errors[float32][output]:sci}"),
            ("bfloat16", "works", "{errors[bfloat16][output]:sci}"),
            (
                "torch.ao.nn.quantized.dynamic.Linear (dynamic)",
                "{status[dynamic]}",
                "{errors[dynamic][output]:sci}",
            ),
            (
                "torch.ao.nn.quantized.Linear (static, packed once)",
                "{status[once]}",
                "{errors[once][output]:sci}",
            ),
            (
                "torch.ao.nn.quantized.functional.linear (static, packed on every call)",
                "{status[every_call]}",
                "{errors[every_call][output]:sci}",
            ),
            (
                "torch.quantize_per_tensor (makes the quint8 and qint8 tensors of these three)",
                "{status[tensors]}",
                "",
            ),
            (
                "torch.ao.quantization.quantize_dynamic (puts dynamic ones into a whole model)",
                "{status[whole_model]}",
                "",
            ),
            ("torch.nn.quantized (the old name)", "{status[old_name]}", ""),
        ),
    ),
    varies=frozenset(
        {
            *("steps", "errors", "least_times_bfloat16", "budget"),
            *("times", "packing", "torch", "status", "deprecated"),
        }
    ),
)
