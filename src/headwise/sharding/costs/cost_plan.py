"""`plan_costs`: the ways to divide a model over GPUs, with their computed costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headwise.checkpoints.config import Config
from headwise.errors import OptionError
from headwise.sharding.costs.layer_costs import LayerCosts
from headwise.sharding.costs.model_sizes import ModelSizes
from headwise.sharding.costs.sharding_way import find_refusal, ways_over
from headwise.sharding.costs.step_costs import Machine, StepCosts

ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
MOST_GPUS = 2**20


@dataclass(frozen=True, kw_only=True)
class CostPlan:
    """Computed costs of a model over GPUs; nothing is measured.

    Attributes:
        sizes: the sizes of the model.
        gpus: the GPUs, all of which work on the same sequences.
        context: tokens of a sequence.
        batch: sequences.
        dtype: of weights and activations.
        machine: the GPUs as stated.
        possible: the costs of every way whose heads and tokens divide.
        refused: kind -> why no way of this kind is possible.
    """

    sizes: ModelSizes
    gpus: int
    context: int
    batch: int
    dtype: str
    machine: Machine
    possible: tuple[StepCosts, ...]
    refused: Mapping[str, str]

    @cached_property
    def best_step_of_each_kind(self) -> tuple[StepCosts, ...]:
        """The best way of each kind, the fastest first; those that do not fit come last.

        The best is the fastest training step that fits; if none fits, the one with least memory.
        """
        best: dict[str, StepCosts] = {}
        for step in sorted(self.possible, key=_preference_key):
            best.setdefault(step.way.kind, step)
        return tuple(sorted(best.values(), key=lambda s: (not s.fits_step, s.step_seconds)))

    @property
    def fastest_forward(self) -> StepCosts | None:
        """The fastest forward pass that fits; None if none does."""
        fitting = [step for step in self.possible if step.fits_forward]
        return min(fitting, key=lambda step: step.forward_seconds, default=None)

    @property
    def fastest_step(self) -> StepCosts | None:
        """The fastest training step that fits; None if none does."""
        return next((step for step in self.best_step_of_each_kind if step.fits_step), None)

    @property
    def fastest_step_in_headwise(self) -> StepCosts | None:
        """The fastest training step that fits, of the ways that this library runs."""
        return next(
            (
                step
                for step in self.best_step_of_each_kind
                if step.fits_step and step.way.is_in_headwise
            ),
            None,
        )

    @property
    def smallest_step(self) -> StepCosts:
        """The way whose training step takes the least memory."""
        return min(self.possible, key=lambda step: step.step_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return the plan for JSON; sizes in bytes, times in seconds, per GPU."""
        fastest = {"forward": self.fastest_forward, "training": self.fastest_step}
        return {
            "computed": True,
            "gpus": self.gpus,
            "context": self.context,
            "batch": self.batch,
            "dtype": self.dtype,
            "machine": asdict(self.machine),
            "model": {**asdict(self.sizes), "weights": self.sizes.weights},
            "ways": [_step_json(step) for step in self.best_step_of_each_kind],
            "refused": dict(self.refused),
            "fastest": {name: step and str(step.way) for name, step in fastest.items()},
        }


def plan_costs(
    model: Path | str | Config,
    *,
    gpus: int,
    context: int,
    batch: int = 1,
    dtype: str = "bfloat16",
    machine: Machine | None = None,
    causal: bool = True,
    checkpointing: bool = False,
) -> CostPlan:
    """Compute memory, operations, bytes on the wire and time of a model over GPUs.

    Args:
        model: a folder with config.json, a file with such a config, or its fields.
        gpus: GPUs, all of which work on the same sequences.
        context: tokens of a sequence.
        batch: sequences.
        dtype: of weights and activations: float64, float32, bfloat16 or float16.
        machine: the GPUs; 80 GB, 400 TFLOP/s, 8 in a node, 450 and 50 GB/s if None.
        causal: True if a query attends to no later key.
        checkpointing: True if each layer keeps its input alone, and is computed again in backward.

    Raises:
        OptionError: the config states no attention, or an option is outside its range.
    """
    _require_options(dtype, gpus=gpus, context=context, batch=batch)
    machine = machine or Machine()
    _require_positive_machine_numbers(machine)
    sizes = ModelSizes.of(model)
    refused, possible = dict[str, str](), list[StepCosts]()
    fixed: dict[str, Any] = {
        "batch": batch,
        "context": context,
        "itemsize": ITEMSIZES[dtype],
        "causal": causal,
    }
    for way in ways_over(gpus):
        if reason := find_refusal(way, sizes, context):
            refused.setdefault(way.kind, reason)
            continue
        layer = LayerCosts(sizes=sizes, way=way, window=sizes.windows[0], **fixed)
        possible.append(StepCosts(layer=layer, machine=machine, checkpointing=checkpointing))
    kinds = {step.way.kind for step in possible}
    left = {kind: reason for kind, reason in refused.items() if kind not in kinds}
    what: dict[str, Any] = {"gpus": gpus, "context": context, "batch": batch, "dtype": dtype}
    return CostPlan(sizes=sizes, machine=machine, possible=tuple(possible), refused=left, **what)


def _preference_key(step: StepCosts) -> tuple[bool, float]:
    """Return a sort key: what fits by its time, what does not fit by its memory."""
    return not step.fits_step, step.step_seconds if step.fits_step else step.step_bytes


def _step_json(step: StepCosts) -> dict[str, Any]:
    layer, way = step.layer, step.way
    attention, projections = layer.attention_operations(), layer.projection_operations()
    weights = layer.sent_for_weights()
    return {
        "way": str(way),
        "ranks": way.groups,
        "in_headwise": way.is_in_headwise,
        "groups_across_nodes": sorted(way.groups_across_nodes(step.machine.node)),
        "layer": {
            "sent_forward": layer.sent_forward(),
            "sent_backward": layer.sent_backward(),
            "sent_for_mlp": layer.sent_for_mlp(),
            "sent_for_weights": {"forward": weights[0], "backward": weights[1]},
            "attention_operations": {"forward": attention[0], "backward": attention[1]},
            "projection_operations": {"forward": projections[0], "backward": projections[1]},
            "weight_bytes": layer.weight_bytes,
            "attention_bytes": layer.attention_bytes(),
            "mlp_bytes": layer.mlp_bytes(),
            "keys_and_values_bytes": layer.keys_and_values_bytes(),
            "buffer_bytes": layer.buffer_bytes(),
            "gradient_buffer_bytes": layer.gradient_buffer_bytes(),
        },
        "forward": {
            "seconds": step.forward_seconds,
            "bytes": step.forward_bytes,
            "fits": step.fits_forward,
        },
        "training": {
            "seconds": step.step_seconds,
            "bytes": step.step_bytes,
            "fits": step.fits_step,
        },
    }


def _require_options(dtype: str, **counts: int) -> None:
    if dtype not in ITEMSIZES:
        raise OptionError(
            saw=f"a dtype {dtype!r:.40}",
            needed=f"one of {', '.join(ITEMSIZES)}",
            do="give {dtype}, or leave it out for bfloat16",
            parameter={"dtype": ("bfloat16",)},
        )
    for name, count in counts.items():
        most = MOST_GPUS if name == "gpus" else 2**40
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
            raise OptionError(
                saw=f"{name} {count!r:.40}",
                needed=f"a whole number from 1 to {most}",
                do=f"give {{{name}}} as a count",
                parameter={name: ()},
            )


def _require_positive_machine_numbers(machine: Machine) -> None:
    for name, value in asdict(machine).items():
        if not 0 < value < float("inf"):
            raise OptionError(
                saw=f"{name} {value!r:.40}",
                needed="a positive number",
                do="state the bandwidths, the memory and the speed of your GPUs",
            )
