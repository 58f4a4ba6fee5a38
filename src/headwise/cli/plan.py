"""``headwise plan``: the computed costs of a model over many GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headwise.cli.output import NO, YES, print_result, stderr_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from headwise.sharding.costs.cost_plan import CostPlan
    from headwise.sharding.costs.step_costs import Machine, StepCosts

GB, MB = 1e9, 1e6
Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL_OR_CONFIG",
        show_default=False,
        help="A folder with config.json, or a file with such a config. No weights are read.",
    ),
]
Gpus = Annotated[int, typer.Option(min=1, show_default=False, help="GPUs in all.")]
Context = Annotated[int, typer.Option(min=1, show_default=False, help="Tokens of a sequence.")]
DType = Annotated[
    Literal["bfloat16", "float16", "float32", "float64"],
    typer.Option(help="Of weights and activations."),
]
Bandwidth = Annotated[
    str,
    typer.Option(
        metavar="WITHIN,ACROSS",
        help="GB/s that a GPU sends in one direction, within its node and between nodes.",
    ),
]
Teraflops = Annotated[float, typer.Option(help="Operations a second that a GPU reaches, in 10^12.")]
Checkpointing = Annotated[
    bool,
    typer.Option(
        "--checkpointing", help="Keep the input of each layer alone, and compute it again."
    ),
]
Bidirectional = Annotated[
    bool, typer.Option("--bidirectional", help="Queries attend to later keys as well.")
]


def plan(
    model: Model,
    *,
    gpus: Gpus,
    context: Context,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    dtype: DType = "bfloat16",
    bandwidth: Bandwidth = "450,50",
    node: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    memory: Annotated[float, typer.Option(help="GB of each GPU.")] = 80,
    teraflops: Teraflops = 400,
    checkpointing: Checkpointing = False,
    bidirectional: Bidirectional = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Compute memory, operations, bytes sent and time of a model over many GPUs.

    The ways are heads over ranks, all-to-all, gathered keys, a ring, and their
    mixtures. Everything is computed from the config; nothing is measured.
    """
    options = {
        "gpus": gpus,
        "context": context,
        "batch": batch,
        "dtype": dtype,
        "causal": not bidirectional,
        "checkpointing": checkpointing,
    }
    machine = {"node": node, "memory": memory, "teraflops": teraflops}
    raise typer.Exit(_plan_and_print(model, options, bandwidth, machine, as_json=as_json))


def _plan_and_print(
    model: Path,
    options: dict[str, Any],
    bandwidth: str,
    machine: dict[str, Any],
    *,
    as_json: bool,
) -> int:
    import time

    from headwise.cli.progress_bar import progress_bar

    start = time.perf_counter()
    with progress_bar(stderr_console(), "loading torch"):
        from headwise.sharding.costs.cost_plan import plan_costs

        gpus = _make_machine(bandwidth, machine)
        costs = plan_costs(model, machine=gpus, **options)
    print_result(
        start=start,
        show=lambda console: _print_plan(
            costs, model, console, checkpointing=options["checkpointing"]
        ),
        as_json=costs.to_json if as_json else None,
    )
    return YES if costs.fastest_forward else NO


def _make_machine(bandwidth: str, others: dict[str, Any]) -> Machine:
    from headwise.errors import OptionError
    from headwise.sharding.costs.step_costs import Machine

    try:
        within, across = map(float, bandwidth.split(","))
    except ValueError:
        raise OptionError(
            saw=f"a bandwidth of {bandwidth!r:.40}",
            needed="two numbers of GB/s: within a node, and between nodes",
            do="give {bandwidth}",
            parameter={"bandwidth": ("450,50",)},
        ) from None
    return Machine(within=within, across=across, **others)


def _print_plan(costs: CostPlan, model: Path, console: Console, *, checkpointing: bool) -> None:
    for line in _format_heading(costs, model):
        console.print(line, markup=False)
    for line in _yield_fastest_ways(costs, checkpointing=checkpointing):
        console.print(line, style="bold", markup=False)
    console.print(_attention_cost_table(costs))
    console.print(_format_attention_and_projection_teraflops(costs), markup=False)
    console.print(_model_cost_table(costs))
    for line in _list_notes(costs):
        console.print(line, style="dim", markup=False)


def _format_heading(costs: CostPlan, model: Path) -> list[str]:
    sizes = costs.sizes
    sequences = "1 sequence" if costs.batch == 1 else f"{costs.batch:,} sequences"
    gpus = "1 GPU" if costs.gpus == 1 else f"{costs.gpus:,} GPUs"
    return [
        f"{model}: {sizes.layers} layers, {sizes.heads} heads and {sizes.kv_heads} kv heads of "
        f"{sizes.head_dim}, {sizes.weights / 1e9:.1f} billion weights.",
        f"{sequences} of {costs.context:,} tokens on {gpus}, {costs.dtype}. "
        "Computed, not measured.",
    ]


def _yield_fastest_ways(costs: CostPlan, *, checkpointing: bool) -> Iterator[str]:
    memory = f"{costs.machine.memory:g} GB"
    forward, step, smallest = costs.fastest_forward, costs.fastest_step, costs.smallest_step
    if forward is None:
        yield f"No forward pass fits in {memory}."
    else:
        yield f"Fastest forward pass that fits: {forward.way}."
    if step is None:
        advice = "" if checkpointing else " --checkpointing keeps less."
        yield (
            f"No training step fits in {memory}: the smallest, {smallest.way}, takes "
            f"{smallest.step_bytes / GB:,.0f} GB.{advice}"
        )
        return
    yield f"Fastest training step that fits: {step.way}."
    if not step.way.is_in_headwise:
        here = costs.fastest_step_in_headwise
        yield f"Fastest that headwise runs: {here.way if here else 'none'}."


def _attention_cost_table(costs: CostPlan) -> Table:
    """Return the table of one layer's attention, for each GPU."""

    def numbers(step: StepCosts) -> list[float]:
        layer = step.layer
        return [
            sum(layer.sent_forward().values()),
            sum(layer.sent_backward().values()),
            layer.attention_bytes(),
            layer.keys_and_values_bytes(),
        ]

    titles = ("sent\nforward", "sent\nbackward", "kept for\nbackward", "keys,\nvalues")
    title = "Attention of one layer on each GPU, MB"
    rows = {
        step: [f"{n / MB:,.0f}" for n in numbers(step)] for step in costs.best_step_of_each_kind
    }
    return _make_cost_table(title, titles, rows, best=None)


def _model_cost_table(costs: CostPlan) -> Table:
    """Return the table of the whole model, for each GPU."""

    def cell(value: float, fits: bool) -> str:
        return f"{value / GB:,.1f}" if fits else f"[red]{value / GB:,.1f} no[/red]"

    rows = {
        step: [
            cell(step.forward_bytes, step.fits_forward),
            cell(step.step_bytes, step.fits_step),
            _format_three_digits(step.forward_seconds),
            _format_three_digits(step.step_seconds),
        ]
        for step in costs.best_step_of_each_kind
    }
    titles = ("forward\nGB", "training\nGB", "forward\ns", "training\ns")
    return _make_cost_table("The model on each GPU", titles, rows, best=costs.fastest_step)


def _make_cost_table(
    title: str,
    titles: tuple[str, ...],
    rows: dict[StepCosts, list[str]],
    *,
    best: StepCosts | None,
) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("way", no_wrap=True)
    table.add_column("ranks", no_wrap=True)
    for name in titles:
        table.add_column(name, justify="right")
    for step, cells in rows.items():
        mark = "" if step.way.is_in_headwise else " *"
        ranks = "x".join(map(str, step.way.groups.values()))
        style = "bold" if step is best else ""
        table.add_row(f"{step.way.kind}{mark}", ranks, *cells, style=style)
    return table


def _format_attention_and_projection_teraflops(costs: CostPlan) -> str:
    def text(values: Callable[[StepCosts], float]) -> str:
        low, high = (
            min(map(values, costs.best_step_of_each_kind)),
            max(map(values, costs.best_step_of_each_kind)),
        )
        numbers = f"{low / 1e12:,.3g}"
        return numbers if high < 1.005 * low else f"{numbers} to {high / 1e12:,.3g}"

    parts = [
        text(lambda step, at=at: step.layer.attention_operations()[at])  # type: ignore[misc]
        for at in (0, 1)
    ]
    others = [
        text(lambda step, at=at: step.layer.projection_operations()[at])  # type: ignore[misc]
        for at in (0, 1)
    ]
    return (
        f"Operations of a layer on each GPU, in 10^12: attention {parts[0]} forward and {parts[1]} "
        f"backward; projections and MLP {others[0]} and {others[1]}."
    )


def _format_three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _list_notes(costs: CostPlan) -> list[str]:
    machine = costs.machine
    lines = [f"Not possible: {reason}." for reason in costs.refused.values()]
    if any(not step.way.is_in_headwise for step in costs.best_step_of_each_kind):
        lines.append("* Tokens divided in two ways at once: computed, and not run by headwise.")
    lines += [
        f"Stated: {machine.within:g} GB/s within a node of {machine.node} GPUs, "
        f"{machine.across:g} between nodes, {machine.teraflops:g} TFLOP/s, {machine.memory:g} GB.",
        "Assumed: FSDP2 over all ranks; AdamW with two float32 moments; the MLP divided like the "
        "heads; a ring and the weights are sent while the GPU computes, all else is waited for; no "
        "latency; the loss is computed in pieces.",
        *costs.sizes.notes,
    ]
    return lines
